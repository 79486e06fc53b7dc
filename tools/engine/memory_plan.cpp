#include "tools/engine/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ggml-like/check.h"
#include "ggml-like/kv_format.h"
#include "tools/engine/kv_types.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/speculation.h"
#include "tools/engine/stage_memory.h"
#include "tools/engine/state_pool.h"
#include "tools/engine/tower_plan.h"

namespace quern {
namespace {

/// Captured steps, and what a driver takes now and then: of up to 8 answers, and of each further number. One with 290 kernels takes
/// 0.9 MB on an H200, and there are some that launch many more.
constexpr int64_t kCaptureReserve = 64ll << 20, kFurtherReserve = 2ll << 20;
constexpr int64_t kUploadReserve = 128ll << 20;  // buffers of the load
constexpr int64_t kCpuStep = 512, kGpuStep = 8192;
/// Prompt rows between two answer steps at most: the answers pause for as long as these take.
/// Rows of mixtures take a sixth of a dense model's time.
constexpr int64_t kCpuGap = 128, kGpuGap = 1024, kGpuMixtureGap = 1408;
/// On an H200 a row of the 35B's prompts takes 14 us, and attention as much again after so many tokens.
constexpr int64_t kGpuGapDepth = 65536;

/// State tensors with shapes but no memory of their own, to build graphs that are only measured.
class PlannedState final : public StateViews {
  public:
    PlannedState(const std::vector<StateSpec>& specs, int64_t slots, int64_t pages) {
        for (const StateSpec& spec : specs) {
            Tensor t = state_tensor(spec, spec.paged ? pages : slots);
            t.data = &nowhere_;
            tensors_[{spec.layer, spec.role}] = t;
        }
    }
    Tensor find(int layer, StateRole role) const override { return tensors_.at({layer, role}); }
    bool has(int layer, StateRole role) const override { return tensors_.contains({layer, role}); }

  private:
    std::map<std::pair<int, StateRole>, Tensor> tensors_;
    mutable char nowhere_ = 0;
};

/// A GPU has kernels for BF16, and for keys and values that are both packed.
KvTypes kv_types_of(const EngineOptions& o, const Backend& backend) {
    const DType activation = backend.activation_dtype();
    const KvTypes types = parse_kv_types(o.kv_type, o.kv_type_v, activation);
    const auto packed = [](DType type) { return kv::packing_of(type, false) != kv::Packing::plain; };
    const bool runs = types == KvTypes(activation) || (packed(types.k) && packed(types.v));
    if (backend.captures() && !runs)
        FAIL(usage,
             "a KV cache in {} does not run on a GPU; choose bf16, or fp8, nvfp4 or tq4 for both keys and "
             "values",
             kv_name(types));
    return types;
}

void check_packing(const std::vector<StateSpec>& specs) {
    for (const StateSpec& s : specs) {
        if (s.role != StateRole::key && s.role != StateRole::value) continue;
        const int head_dim = static_cast<int>(s.shape[2]);
        if (!kv::fits(kv::packing_of(s.dtype, s.role == StateRole::value), head_dim))
            FAIL(usage, "a KV cache in {} does not fit this model, whose heads have {} elements; choose fp8",
                 kv_name(s.dtype), head_dim);
    }
}

void check_options(const EngineOptions& o, int64_t longest) {
    if (o.sequences < 1 || o.sequences > 1024)
        FAIL(usage, "{} sequences at the same time; choose 1 to 1024", o.sequences);
    if (o.step_tokens < 0 || o.step_tokens > 1 << 16)
        FAIL(usage, "{} tokens in a step; choose 1 to 65536, or 0 for what suits the backend", o.step_tokens);
    if (o.prompt_logits < 1) FAIL(usage, "{} rows of logits in a step; choose at least 1", o.prompt_logits);
    if (o.speculation.draft_max < 1 || o.speculation.draft_max > kMaxDraft)
        FAIL(usage, "drafts of up to {} tokens; choose 1 to {}", o.speculation.draft_max, kMaxDraft);
    if (o.context < 0) FAIL(usage, "the context is {} tokens; it must be positive", o.context);
    if (o.context > longest)
        FAIL(usage, "a context of {} tokens was asked for, but this model was made for {}", o.context,
             longest);
}

void count_weights(MemoryPlan& plan, const Model& model, const Backend& backend) {
    for (const WeightUse& use : model.weights().uses) {
        if (use.again()) continue;
        int64_t bytes = use.vector != nullptr ? aligned_bytes(use.vector->bytes()) : 0;
        if (use.matrix != nullptr) bytes = backend.placed_bytes(*use.matrix, use.order);
        if (use.experts != nullptr) bytes = backend.placed_bytes(*use.experts, use.order);
        if (bytes == 0 && !use.copy) plan.mapped += use.bytes();
        const auto same = [&](const MemoryPlan::Group& g) { return g.name == use.group; };
        auto group = std::find_if(plan.weights.begin(), plan.weights.end(), same);
        if (group == plan.weights.end()) group = plan.weights.insert(group, {use.group, 0});
        group->bytes += bytes;
    }
}

/// Drafters in place of those that are named draft alone, but by the side of weights that are named.
bool drafts_by(DrafterKind drafter, const EngineOptions& o) {
    const DrafterKind kind = o.speculation.kind;
    return allows(kind, drafter) && (o.drafter == nullptr || kind == drafter);
}

/// Rows of one answer in a step at most.
int64_t longest_slice(const EngineOptions& o) {
    return std::max(kMaxAnswerSlice, journal_entries(o.speculation));
}

StepLimits step_limits(const EngineOptions& o, const Model& model, const Backend& backend) {
    const bool device = backend.captures(), mixture = model.info().experts > 0;
    const int64_t chosen = o.step_tokens > 0 ? o.step_tokens : device ? kGpuStep : kCpuStep;
    const int64_t rows = std::max<int64_t>(chosen, kPageTokens);
    const int64_t answers =
        device ? most_answer_rows(model.info().experts_used) : std::max(kMaxAnswerRows, o.sequences);
    return {.prompt_rows = rows,
            .gap_rows = std::min(rows, !device   ? kCpuGap
                                       : mixture ? kGpuMixtureGap
                                                 : kGpuGap),
            .prompt_logits = std::clamp<int64_t>(o.prompt_logits, kPageTokens, rows),
            .answer_rows = std::min(answers, longest_slice(o) * o.sequences),
            .gap_depth = device && mixture ? kGpuGapDepth : 0};
}

std::vector<int64_t> powers_of_two_and(int64_t last) {
    std::vector<int64_t> list = {last};
    for (int64_t n = 1; n < last; n *= 2) list.push_back(n);
    return list;
}

/// With the MTP layer, steps leave hidden states, and it has passes of their shapes: that catch up, and for answers that
/// draft, up to `draft_max` tokens; of one sequence with all logits.
void add_mtp_passes(std::vector<BatchShape>& shapes, int64_t draft_max) {
    const size_t steps = shapes.size();
    for (size_t i = 0; i < steps; ++i) {
        shapes[i].pass = Pass::hidden;
        BatchShape pass = shapes[i];
        pass.pass = Pass::mtp;
        pass.logit_rows = 0;
        shapes.push_back(pass);
        if (pass.kind == StepKind::prompt) continue;
        pass.drafts = draft_max;
        pass.draft_rows = DraftRows::all;
        shapes.push_back(pass);
        pass.sequences = 1;
        pass.full_head = true;
        shapes.push_back(pass);
    }
}

/// With a DFlash drafter, steps tap hidden states, and there are passes of one block a sequence.
void add_dflash_passes(std::vector<BatchShape>& shapes, const MemoryPlan& plan) {
    for (BatchShape& shape : shapes) shape.pass = Pass::taps;
    for (const int64_t n : powers_of_two_and(block_sequences(plan))) {
        shapes.push_back(block_shape(plan, n, shapes.front().vocab));
        shapes.back().full_head = true;
    }
}

/// Passes that draft for one sequence.
std::vector<BatchShape> alone_shapes(const MemoryPlan& plan, const EngineOptions& o, int64_t vocab) {
    if (!plan.dflash && !plan.mtp) return {};
    BatchShape shape = plan.dflash ? block_shape(plan, 1, vocab) : decode_shape(1, plan.pages(), vocab);
    shape.draft_rows = DraftRows::all;
    if (plan.dflash) return {shape};
    shape.pass = Pass::mtp;
    shape.logit_rows = 0;
    shape.drafts = o.speculation.draft_max;
    std::vector<BatchShape> shapes;
    for (const int64_t rows : powers_of_two_and(o.speculation.draft_max + 1)) {
        shape.tokens = rows;
        shapes.push_back(draft_shape(shape, plan.steps.answer_rows));
    }
    return shapes;
}

/// Steps that need at least as much memory as all others: of either kind, with every power of two of rows and with the
/// most rows, for the fewest and the most sequences that may have so many; and the largest that is padded, of those with drafts.
std::vector<BatchShape> widest_shapes(const MemoryPlan& plan, const EngineOptions& o, int64_t vocab) {
    const int64_t slice_rows = longest_slice(o);
    std::vector<BatchShape> shapes;
    const auto add = [&](StepKind kind, int64_t tokens, int64_t sequences, int64_t logit_rows) {
        shapes.push_back({.kind = kind,
                          .tokens = tokens,
                          .sequences = sequences,
                          .logit_rows = std::min(tokens, logit_rows),
                          .pages = plan.pages(),
                          .vocab = vocab});
    };
    for (const int64_t tokens : powers_of_two_and(plan.steps.prompt_rows))
        for (const int64_t sequences : {int64_t{1}, std::min(plan.sequences, tokens)})
            add(StepKind::prompt, tokens, sequences, plan.steps.prompt_logits + sequences);
    // with the logits of all rows
    const int64_t rows = std::min(plan.steps.prompt_logits + 1, plan.steps.prompt_rows);
    add(StepKind::prompt, rows, 1, rows);
    for (const int64_t tokens : powers_of_two_and(plan.steps.answer_rows))
        for (const int64_t sequences :
             {(tokens + slice_rows - 1) / slice_rows, padded_sequences(std::min(plan.sequences, tokens))})
            add(StepKind::answer, tokens, sequences, tokens);
    shapes.push_back(decode_shape(padded_sequences(std::min(plan.sequences, plan.steps.answer_rows)),
                                  plan.pages(), vocab));
    if (plan.mtp) add_mtp_passes(shapes, o.speculation.draft_max);
    if (plan.dflash) add_dflash_passes(shapes, plan);
    return shapes;
}

void count_scratch(MemoryPlan& plan, const Model& model, const Backend& backend, const EngineOptions& o) {
    const PlannedState state(plan.specs, plan.sequences, plan.sequences * plan.pages());
    const LayerRange own = model.own_layers();
    if (model.info().vision && own.begin == 0) count_tower(plan, model, backend, o);
    const bool drafts = own.end == static_cast<int>(model.info().layers);  // of several devices the last
    for (BatchShape shape : widest_shapes(plan, o, model.info().vocab)) {
        if (!drafts && (shape.pass == Pass::mtp || shape.pass == Pass::dflash)) continue;
        shape.images = model.info().vision && shape.kind == StepKind::prompt;
        const ArenaPlan arena = plan_memory(model.build(shape, state, backend.activation_dtype()).graph);
        plan.arena = std::max(plan.arena, with_slack(arena.arena_bytes));
        plan.inputs = std::max(plan.inputs, arena.input_bytes);
    }
    if (!drafts || own.begin > 0) return;
    for (const BatchShape& shape : alone_shapes(plan, o, model.info().vocab)) {
        const ArenaPlan arena = plan_memory(model.build(shape, state, backend.activation_dtype()).graph);
        plan.drafting_arena = std::max(plan.drafting_arena, with_slack(arena.arena_bytes));
        plan.drafting_inputs = std::max(plan.drafting_inputs, arena.input_bytes);
    }
}

/// The longest context that fits beside everything else. On the CPU only half of the free memory is used: other programs
/// need some, too.
int64_t largest_context(const MemoryPlan& plan) {
    const int64_t page = page_bytes(plan.specs) * plan.sequences;
    if (page == 0) return plan.model_context;
    const int64_t left = plan.device.exact ? plan.device.free_bytes - (plan.needed() - plan.kv)
                                           : plan.device.free_bytes / 2 - (plan.needed() - plan.kv);
    return std::clamp(left / page * kPageTokens, std::min<int64_t>(kPageTokens, plan.model_context),
                      plan.model_context);
}

/// Recurrent states that fit into the rest of a device's memory and the cache's budget. Some of the rest stays free for
/// other programs and, if the context is to be as large as fits, most of it for that.
void count_kept(MemoryPlan& plan, int64_t budget) {
    if (!plan.device.exact) return;
    const int64_t left = std::max<int64_t>(0, plan.device.free_bytes - plan.needed());
    const int64_t room = std::min(budget, plan.context_chosen ? left / 4 : left - left / 8);
    const int64_t each = snapshots_bytes(plan.specs, 1);
    plan.kept_states = each > 0 ? room / each : 0;
    plan.kept = plan.kept_states * each;
}

int64_t capture_reserve(const MemoryPlan& plan, const EngineOptions& o) {
    const int64_t numbers = std::min(plan.sequences, plan.steps.answer_rows);
    return kCaptureReserve * (o.speculation.on() ? 2 : 1) +
           kFurtherReserve * std::max<int64_t>(0, numbers - kMaxUnpadded);
}

double giga(int64_t bytes) { return static_cast<double>(bytes) / 1e9; }

/// "1.23 GB", "20.5 kB"
std::string size(int64_t bytes) {
    const auto b = static_cast<double>(bytes);
    if (b >= 1e9) return fmt::format("{:.2f} GB", b / 1e9);
    if (b >= 1e6) return fmt::format("{:.1f} MB", b / 1e6);
    return fmt::format("{:.1f} kB", b / 1e3);
}

struct Line {
    std::string name;
    int64_t planned;
    int64_t measured;  // -1: not on its own
    std::string note;
};

std::vector<Line> lines_of(const MemoryPlan& p, const MemoryMeasured* m) {
    std::vector<Line> lines;
    for (const MemoryPlan::Group& g : p.weights)
        if (g.bytes > 0) lines.push_back({"  " + g.name, g.bytes, -1, ""});
    lines.push_back(
        {"weights", p.weight_bytes(), m ? m->weights : -1,
         p.mapped > 0 ? fmt::format("and {} read where the files are mapped", size(p.mapped)) : ""});
    lines.push_back({"  KV cache", p.kv, -1,
                     fmt::format("{}, {} a token x {} tokens x {} sequence{}", kv_name(p.kv_types),
                                 size(p.token_bytes), p.context, p.sequences, p.sequences == 1 ? "" : "s")});
    lines.push_back({"  recurrent", p.recurrent, -1, fmt::format("{} a sequence", size(p.slot_bytes))});
    if (p.kept > 0)
        lines.push_back({"  kept states", p.kept, -1, fmt::format("{} of earlier prompts", p.kept_states)});
    lines.push_back({"state", p.state_bytes(), m ? m->state : -1, ""});
    lines.push_back({"scratch", p.scratch_bytes(), m ? m->scratch : -1,
                     fmt::format("steps of up to {} tokens", p.steps.prompt_rows)});
    if (p.reserve > 0)
        lines.push_back({"reserve", p.reserve, m ? m->other : -1, "upload buffers, captured steps"});
    return lines;
}

std::string table(const MemoryPlan& p, const MemoryMeasured* m) {
    std::string text = fmt::format("memory    {}: {:.2f} GB, {:.2f} GB free before\n", p.device_name,
                                   giga(p.device.total_bytes), giga(p.device.free_bytes));
    text += fmt::format("  {:<18}{:>12}{}\n", "", "planned", m ? "    measured" : "");
    const auto cell = [](int64_t bytes) {
        return bytes < 0 ? std::string() : fmt::format("{:.1f} MB", giga(bytes) * 1e3);
    };
    for (const Line& l : lines_of(p, m)) {
        std::string line =
            fmt::format("  {:<18}{:>12}{:>12}  {}", l.name, cell(l.planned), cell(l.measured), l.note);
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    const int64_t all = m ? m->weights + m->state + m->scratch + m->other : -1;
    text += fmt::format("  {:<18}{:>12}{}\n", "together", cell(p.needed()),
                        m ? fmt::format("{:>12}", cell(all)) : "");
    const char* why =
        p.context < p.model_context ? ", the largest that fits" : ", all the model was made for";
    return text + fmt::format("  context {} tokens{}\n", p.context, p.context_chosen ? why : "");
}

}  // namespace

int64_t block_sequences(const MemoryPlan& plan) {
    return std::clamp<int64_t>(plan.steps.answer_rows / plan.block_rows, 1, plan.sequences);
}

BatchShape block_shape(const MemoryPlan& plan, int64_t sequences, int64_t vocab) {
    return {.kind = StepKind::answer,
            .tokens = sequences * plan.block_rows,
            .sequences = sequences,
            .logit_rows = sequences * (plan.block_rows - 1),
            .pages = plan.pages(),
            .vocab = vocab,
            .pass = Pass::dflash};
}

int64_t MemoryPlan::pages() const { return (context + kPageTokens - 1) / kPageTokens; }

int64_t MemoryPlan::weight_bytes() const {
    int64_t bytes = 0;
    for (const Group& g : weights) bytes += g.bytes;
    return bytes;
}

MemoryPlan make_memory_plan(const Model& model, const Backend& backend, const EngineOptions& options,
                            bool weights_placed, int64_t results) {
    if (backend.stages() > 1) return plan_stages(model, backend, options, weights_placed);
    const ModelInfo& info = model.info();
    check_options(options, info.context);
    MemoryPlan plan;
    plan.device_name = backend.name() + ", " + backend.description();
    plan.device = backend.memory_info();
    // Each guesses better than the other sometimes, but both cost.
    plan.dflash = info.dflash.has_value() && drafts_by(DrafterKind::dflash, options);
    plan.mtp = info.mtp && !plan.dflash && drafts_by(DrafterKind::mtp, options);
    if (plan.dflash) plan.block_rows = std::min(info.dflash->block, options.speculation.draft_max + 1);
    plan.kv_types = kv_types_of(options, backend);
    plan.specs = model.state_specs({.kv = plan.kv_types,
                                    .conv = backend.activation_dtype(),
                                    .journal = static_cast<int>(journal_entries(options.speculation)),
                                    .mtp = plan.mtp,
                                    .dflash = plan.dflash});
    check_packing(plan.specs);
    plan.model_context = info.context;
    plan.context_chosen = options.context == 0;
    plan.context = plan.context_chosen ? info.context : options.context;
    plan.sequences = options.sequences;
    plan.results = results;
    plan.steps = step_limits(options, model, backend);
    if (info.vision) plan.image_sizes = image_sizes(*info.vision, backend, options);
    if (!weights_placed) count_weights(plan, model, backend);
    plan.token_bytes = page_bytes(plan.specs) / kPageTokens;
    plan.slot_bytes = slot_bytes(plan.specs);
    plan.recurrent = slots_bytes(plan.specs, plan.sequences);
    if (plan.device.exact)
        plan.reserve = capture_reserve(plan, options) + (weights_placed ? 0 : kUploadReserve);
    count_scratch(plan, model, backend, options);
    const auto kv_bytes = [&] { return pages_bytes(plan.specs, plan.sequences * plan.pages()); };
    if (!plan.context_chosen) plan.kv = kv_bytes();
    count_kept(plan, options.cache_bytes - plan.features);
    if (plan.context_chosen) {
        plan.context = largest_context(plan);
        plan.kv = kv_bytes();
    }
    return plan;
}

namespace {

/// `advice_here`: what else to do about this device.
void require_fit(const MemoryPlan& p, const char* advice_here) {
    const int64_t have = p.device.free_bytes;
    if (p.needed() <= have) return;
    const std::string where = fmt::format("{:.2f} of {:.2f} GB are free on {}", giga(have),
                                          giga(p.device.total_bytes), p.device_name);
    if (p.weight_bytes() + p.reserve > have)
        FAIL(memory,
             "not enough memory: the weights alone take {:.2f} GB, and {}; close what uses the memory or "
             "choose a "
             "smaller checkpoint{}{}",
             giga(p.weight_bytes() + p.reserve), where, advice_here,
             p.device.exact ? ", or run on the CPU with -ngl 0" : "");
    std::string advice = fmt::format("lower -c (now {}; {} for each 1000 tokens)", p.context,
                                     size(1000 * p.token_bytes * p.sequences));
    if (p.sequences > 1)
        advice +=
            fmt::format(" or -np (now {}; {} each)", p.sequences, size(p.kv / p.sequences + p.slot_bytes));
    if (p.scratch_bytes() > have / 8) advice += fmt::format(" or -ub (now {})", p.steps.prompt_rows);
    FAIL(memory,
         "not enough memory: {:.2f} GB are needed (weights {:.2f}, KV cache {:.2f}, recurrent state {:.2f}, "
         "scratch {:.2f}, reserve {:.2f}), and {}; {}",
         giga(p.needed()), giga(p.weight_bytes()), giga(p.kv), giga(p.recurrent), giga(p.scratch_bytes()),
         giga(p.reserve), where, advice + advice_here);
}

}  // namespace

void require_fit(const MemoryPlan& p) {
    if (p.stages.empty()) return require_fit(p, "");
    for (const MemoryPlan& stage : p.stages) require_fit(stage, ", give this device fewer layers with -ts");
}

std::string describe(const MemoryPlan& plan) {
    if (plan.stages.empty()) return table(plan, nullptr);
    std::string text;
    for (const MemoryPlan& stage : plan.stages) text += table(stage, nullptr);
    return text;
}

std::string describe(const MemoryPlan& plan, const MemoryMeasured& measured) {
    const int64_t planned = plan.needed() - plan.reserve;
    const int64_t found = measured.weights + measured.state + measured.scratch;
    const double off =
        100 * static_cast<double>(found - planned) / static_cast<double>(std::max<int64_t>(planned, 1));
    std::string text = table(plan, &measured);
    if (std::abs(off) > 1)
        text += fmt::format(
            "  warning: measured {:+.1f} % beside the plan; another program may use this device\n", off);
    if (measured.other > plan.reserve)
        text += fmt::format("  warning: {} beyond weights, state and scratch; {} were reserved\n",
                            size(measured.other), size(plan.reserve));
    return text;
}

}  // namespace quern
