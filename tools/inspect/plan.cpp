#include "tools/inspect/plan.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/planned_gpu.h"
#include "ggml-like/stage_group.h"
#include "models/model_group.h"
#include "models/stage_models.h"
#include "tools/engine/kv_types.h"
#include "tools/engine/page_tokens.h"
#include "tools/inspect/cards.h"

namespace quern {
namespace {

constexpr double kGiga = 1e9;
constexpr int64_t kDriver = 600ll << 20;  // what a driver and a context take of a card before anyone asks
constexpr double kWorthNaming = 0.05;     // of a token's bytes

std::unique_ptr<Model> open_for_planning(const PlanOptions& o, DenseFormat dense) {
    const OpenOptions options{.tokenizer = false, .dense = dense};
    const auto open = [&o](const OpenOptions& own) {
        return o.synthetic.empty() ? open_model(o.model, own) : open_synthetic(o.synthetic, o.mix, own);
    };
    if (o.ranks > 1 && o.shares.size() > 1)
        FAIL(usage, "-ts and -tp {}: a model is split one way; leave one of them out", o.ranks);
    if (o.shares.size() > 1) return open_stages({.of_device = o.shares}, options, open);
    return open_ranks(o.ranks, options, open);
}

/// What one rank sees, or all stages.
std::unique_ptr<Backend> make_planned(const PlanOptions& o, const std::string& name, int64_t total) {
    if (o.shares.size() < 2) return make_planned_gpu(name, total, total - kDriver);
    std::vector<std::unique_ptr<Backend>> stages;
    for (size_t i = 0; i < o.shares.size(); ++i)
        stages.push_back(make_planned_gpu(name, total, total - kDriver));
    return std::make_unique<StageGroup>(std::move(stages));
}

bool fits(const MemoryPlan& plan) {
    if (plan.stages.empty()) return plan.needed() <= plan.device.free_bytes;
    return std::all_of(plan.stages.begin(), plan.stages.end(), fits);
}

CostPlan::OnCard plan_card(const Model& model, const PlanOptions& o, const std::string& name, int64_t bytes,
                           double bandwidth) {
    const bool known = bytes > 0;
    const int64_t total = known ? bytes : int64_t{1} << 50;
    const auto gpu = make_planned(o, name, total);
    CostPlan::OnCard card{.name = name, .bandwidth = bandwidth, .memory = {}, .known_memory = known};
    card.memory = make_memory_plan(model, *gpu, o.engine, false);
    card.fits = fits(card.memory);
    const auto rate = [&](double depth) {
        return bandwidth / quern::total(token_bytes(model, card.memory, o.engine.sequences, depth));
    };
    card.short_rate = rate(std::min(CostPlan::kShortDepth, static_cast<double>(card.memory.context)));
    card.full_rate = rate(static_cast<double>(card.memory.context));
    return card;
}

std::vector<CostPlan::Component> components_of(const Model& model, const MemoryPlan& memory,
                                               int64_t sequences) {
    const TokenBytes plain = unquantized_token_bytes(model, sequences);
    std::vector<CostPlan::Component> out;
    for (const auto& read : token_bytes(model, memory, sequences, CostPlan::kShortDepth)) {
        const auto same = [&](const auto& part) { return part.first == read.first; };
        const auto part = std::find_if(plain.begin(), plain.end(), same);
        out.push_back({read.first, read.second, part == plain.end() ? 0 : part->second});
    }
    std::stable_sort(out.begin(), out.end(), [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
    return out;
}

/// Cards have so many 10^9 bytes. What a format does not change is planned once, on a card where everything fits.
CostPlan::OfFormat plan_format(const Model& model, const PlanOptions& o, const char* format) {
    constexpr int64_t kPlenty = int64_t{1} << 50;
    EngineOptions engine = o.engine;
    engine.context = std::min(CostPlan::kSequenceTokens, model.info().context);
    engine.sequences = 1;
    engine.kv_type = format, engine.kv_type_v.clear();
    const auto gpu = make_planned_gpu("any", kPlenty, kPlenty);
    const MemoryPlan plan = make_memory_plan(model, *gpu, engine, false);
    const int64_t fixed = plan.needed() - plan.kv - plan.kept - plan.recurrent,
                  each = plan.token_bytes * engine.context + plan.slot_bytes;
    CostPlan::OfFormat out{.name = kv_name(plan.kv_types), .token_bytes = plan.token_bytes, .rooms = {}};
    for (const int64_t gigabytes : CostPlan::kCardGigabytes) {
        const int64_t left = std::max<int64_t>(0, gigabytes * 1'000'000'000 - kDriver - fixed);
        const int64_t tokens =
            std::max<int64_t>(0, left - plan.slot_bytes) / std::max<int64_t>(1, plan.token_bytes);
        out.rooms.push_back({.context = std::min(round_down_to_page(tokens), model.info().context),
                             .sequences = left / each});
    }
    return out;
}

/// Those that the model's heads fit.
std::vector<CostPlan::OfFormat> plan_formats(const Model& model, const PlanOptions& o) {
    std::vector<CostPlan::OfFormat> formats;
    for (const char* format : {"bf16", "fp8", "k8v4", "nvfp4", "tq4"}) try {
            formats.push_back(plan_format(model, o, format));
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::usage) throw;
        }
    return formats;
}

std::string bytes_text(double bytes) {
    if (bytes >= kGiga) return fmt::format("{:.3f} GB", bytes / kGiga);
    return bytes >= 1e6 ? fmt::format("{:.1f} MB", bytes / 1e6) : fmt::format("{:.1f} kB", bytes / 1e3);
}

/// What the whole would gain if this component's unquantized matrices were FP8, half of 16 bits.
double gain(const CostPlan& plan, const CostPlan::Component& c) {
    return plan.token_bytes() / (plan.token_bytes() - c.unquantized / 2);
}

std::string of_each(const CostPlan& plan) {
    return plan.ranks == 1 ? "" : fmt::format(" on each of {} GPUs", plan.ranks);
}

std::string component_table(const CostPlan& plan) {
    std::string text =
        fmt::format("bytes of a decoded token{}, {} sequence{}, {:.0f} tokens before it\n", of_each(plan),
                    plan.sequences, plan.sequences == 1 ? "" : "s", CostPlan::kShortDepth);
    for (const CostPlan::Component& c : plan.components)
        text += fmt::format("  {:16}{:>12}{:>7.1f} %{}\n", c.name, bytes_text(c.bytes),
                            100 * c.bytes / plan.token_bytes(),
                            c.unquantized > c.bytes / 2 ? "  not quantized" : "");
    text += fmt::format("  {:16}{:>12}\n", "together", bytes_text(plan.token_bytes()));
    for (const CostPlan::Component& c : plan.components)
        if (c.unquantized > kWorthNaming * plan.token_bytes())
            text +=
                fmt::format("  {} holds the speed back: {} of 16 bits; in FP8 the ceiling would be {:.2f}x\n",
                            c.name, bytes_text(c.unquantized), gain(plan, c));
    return text;
}

/// What PlanOptions::dense changes.
std::string dense_lines(const CostPlan& plan) {
    if (plan.info.dense == DenseFormat::as_stored) return {};
    const double before = plan.as_stored_token_bytes, after = plan.token_bytes();
    return fmt::format(
        "  --dense {}: {} of weights instead of {}, {} a token instead of {}, ceilings {:.2f}x\n",
        dense_format_name(plan.info.dense), bytes_text(static_cast<double>(plan.info.weight_bytes)),
        bytes_text(static_cast<double>(plan.as_stored_weight_bytes)), bytes_text(after), bytes_text(before),
        before / after);
}

std::string format_table(const CostPlan& plan) {
    std::string text =
        fmt::format("\nKV cache: context of one sequence, sequences of {}K, on cards of\n  {:8}{:>10}",
                    CostPlan::kSequenceTokens / 1024, "format", "a token");
    for (const int64_t gigabytes : CostPlan::kCardGigabytes)
        text += fmt::format("{:>14}", fmt::format("{} GB", gigabytes));
    text += "\n";
    for (const CostPlan::OfFormat& f : plan.formats) {
        text += fmt::format("  {:8}{:>10}", f.name, bytes_text(static_cast<double>(f.token_bytes)));
        for (const auto& room : f.rooms)
            text += fmt::format(
                "{:>14}", room.context == 0 ? "-" : fmt::format("{}, {}", room.context, room.sequences));
        text += "\n";
    }
    return text;
}

/// What the ceilings leave out.
std::string split_lines(const CostPlan& plan) {
    if (plan.ranks > 1)
        return fmt::format(
            "  {} cards share every layer: memory is of each, and the time of their sums comes on top\n",
            plan.ranks);
    if (plan.stages > 1)
        return fmt::format("  {} cards have some layers each: memory is of all, one works at a time\n",
                           plan.stages);
    return {};
}

std::string card_line(const CostPlan::OnCard& c) {
    const std::string head = fmt::format("  {:16}{:>9.0f} GB/s", c.name, c.bandwidth / kGiga);
    if (!c.fits)
        return head + fmt::format("  does not fit: needs {}, free {}\n",
                                  bytes_text(static_cast<double>(c.memory.needed())),
                                  bytes_text(static_cast<double>(c.memory.device.free_bytes)));
    return head + fmt::format("{:>14}{:>11}{:>12.0f}{:>14.0f}\n",
                              bytes_text(static_cast<double>(c.memory.needed())), c.memory.context,
                              c.short_rate, c.full_rate);
}

}  // namespace

double CostPlan::token_bytes() const {
    double sum = 0;
    for (const Component& c : components) sum += c.bytes;
    return sum;
}

CostPlan make_cost_plan(const PlanOptions& o) {
    const auto model = open_for_planning(o, o.dense);
    CostPlan plan{
        .info = model->info(), .sequences = o.engine.sequences, .components = {}, .cards = {}, .formats = {}};
    plan.ranks = o.ranks, plan.stages = std::max(1, static_cast<int>(o.shares.size()));
    std::vector<Card> cards;
    for (const std::string& name : o.cards) cards.push_back(find_card(name));
    for (const Card& c : cards.empty() ? usual_cards() : cards)
        plan.cards.push_back(plan_card(*model, o, c.name, c.mebibytes << 20, c.gigabytes_per_second * kGiga));
    if (o.bandwidth > 0) plan.cards.push_back(plan_card(*model, o, "--bandwidth", 0, o.bandwidth * kGiga));
    if (plan.stages == 1) plan.formats = plan_formats(*model, o);
    plan.components = components_of(*model, plan.cards.front().memory, plan.sequences);
    if (o.dense == DenseFormat::as_stored) return plan;
    const auto stored = open_for_planning(o, DenseFormat::as_stored);
    plan.as_stored_weight_bytes = stored->info().weight_bytes;
    plan.as_stored_token_bytes =
        quern::total(token_bytes(*stored, plan.cards.front().memory, plan.sequences, CostPlan::kShortDepth));
    return plan;
}

std::string describe(const CostPlan& plan) {
    std::string text = fmt::format("{}: {:.2f} B parameters, {}, {} of weights\n\n", plan.info.name,
                                   static_cast<double>(plan.info.parameters) / kGiga, plan.info.formats,
                                   bytes_text(static_cast<double>(plan.info.weight_bytes)));
    text += component_table(plan) + dense_lines(plan);
    const auto fitting = std::find_if(plan.cards.begin(), plan.cards.end(),
                                      [](const CostPlan::OnCard& c) { return c.known_memory && c.fits; });
    if (fitting != plan.cards.end()) text += "\n" + describe(fitting->memory);
    text += fmt::format(
        "\nceilings by memory bandwidth; what is reached is usually 60 to 90 % of them\n{}"
        "  {:16}{:>14}{:>14}{:>11}{:>12}{:>14}\n",
        split_lines(plan), plan.ranks * plan.stages == 1 ? "card" : "cards", "bandwidth", "memory", "context",
        "tok/s, 1k", "tok/s, full");
    for (const CostPlan::OnCard& c : plan.cards) text += card_line(c);
    return plan.formats.empty() ? text : text + format_table(plan);
}

nlohmann::ordered_json to_json(const CostPlan& plan) {
    nlohmann::ordered_json j{{"model", plan.info.name},
                             {"parameters", plan.info.parameters},
                             {"weight_bytes", plan.info.weight_bytes},
                             {"sequences", plan.sequences},
                             {"ranks", plan.ranks},
                             {"stages", plan.stages},
                             {"depth", CostPlan::kShortDepth},
                             {"token_bytes", plan.token_bytes()},
                             {"dense", dense_format_name(plan.info.dense)}};
    if (plan.info.dense != DenseFormat::as_stored)
        j["as_stored"] = {{"weight_bytes", plan.as_stored_weight_bytes},
                          {"token_bytes", plan.as_stored_token_bytes}};
    j["components"] = nlohmann::ordered_json::array();
    for (const CostPlan::Component& c : plan.components)
        j["components"].push_back({{"name", c.name},
                                   {"token_bytes", c.bytes},
                                   {"unquantized", c.unquantized},
                                   {"gain_in_fp8", gain(plan, c)}});
    j["cards"] = nlohmann::ordered_json::array();
    for (const CostPlan::OnCard& c : plan.cards)
        j["cards"].push_back({{"name", c.name},
                              {"bandwidth", c.bandwidth},
                              {"fits", c.fits},
                              {"needed_bytes", c.memory.needed()},
                              {"weight_bytes", c.memory.weight_bytes()},
                              {"kv_bytes", c.memory.kv},
                              {"recurrent_bytes", c.memory.recurrent},
                              {"scratch_bytes", c.memory.scratch_bytes()},
                              {"context", c.memory.context},
                              {"tokens_per_second", c.short_rate},
                              {"tokens_per_second_full_context", c.full_rate}});
    j["kv_formats"] = nlohmann::ordered_json::array();
    for (const CostPlan::OfFormat& f : plan.formats) {
        nlohmann::ordered_json rooms = nlohmann::ordered_json::array();
        for (size_t i = 0; i < f.rooms.size(); ++i)
            rooms.push_back({{"card_gigabytes", CostPlan::kCardGigabytes[i]},
                             {"context", f.rooms[i].context},
                             {"sequences_of_32k", f.rooms[i].sequences}});
        j["kv_formats"].push_back({{"format", f.name}, {"token_bytes", f.token_bytes}, {"cards", rooms}});
    }
    return j;
}

}  // namespace quern
