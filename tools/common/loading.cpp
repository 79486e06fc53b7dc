#include "tools/common/loading.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string_view>
#include <utility>

#include "ggml-like/backend_group.h"
#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"
#include "ggml-like/kv_format.h"
#include "tools/common/cli_values.h"
#include "tools/common/split_flags.h"
#include "tools/engine/kv_cost.h"
#include "tools/engine/kv_types.h"
#include "tools/engine/memory_plan.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

constexpr double kGiga = 1e9;
constexpr int kBarWidth = 30;

bool has_model(const fs::path& directory) {
    std::error_code ignored;
    return fs::exists(directory / "config.json", ignored) &&
           fs::exists(directory / "model.safetensors", ignored);
}

}  // namespace

std::string model_or_demo(const std::string& given) {
    if (!given.empty()) return given;
    std::error_code failed;
    const fs::path program = fs::read_symlink("/proc/self/exe", failed);
    std::vector<fs::path> places;
    if (!failed) {
        const fs::path above = program.parent_path().parent_path();
        places = {above / "models/demo", above / "share/quern/models/demo"};
    }
    places.emplace_back(QUERN_DEMO_DIR);
    for (const fs::path& place : places) {
        if (has_model(place)) return place.string();
    }
    FAIL(model, "no model: name a checkpoint with -m DIRECTORY; the demo checkpoint is not at {}",
         places.front().string());
}

GpuOptions parse_gpu_layers(const std::string& value) {
    if (value == "auto") return GpuOptions::automatic;
    if (value == "all") return GpuOptions::all;
    const bool numeric = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
    if (!numeric)
        FAIL(usage, "-ngl: expected 0, auto, all or a number of layers, found '{}'", printable(value));
    const int64_t layers = parse_integer(value, "-ngl", 0, INT32_MAX);
    return layers == 0 ? GpuOptions::none : GpuOptions{GpuOptions::Kind::all, layers};
}

void check_layers(const GpuOptions& gpu, int64_t layers) {
    if (gpu.layers > 0 && gpu.layers < layers)
        FAIL(usage,
             "-ngl {}: this model has {} layers and runs as a whole on the GPU or on the CPU; use all, auto "
             "or 0",
             gpu.layers, layers);
}

namespace {

std::unique_ptr<Backend> make_gpus(const std::vector<int>& devices, bool peer_access) {
    for (const int device : devices)
        if (const std::string reason = cuda_unavailable(device); !reason.empty())
            FAIL(device, "-tp {} needs {} GPUs, but {}", devices.size(), devices.size(), reason);
    return make_cuda_backends(devices, {.peer_access = peer_access});
}

}  // namespace

std::unique_ptr<Backend> make_backend(const GpuOptions& gpu, int threads, const DeviceChoice& devices) {
    if (devices.by_layers) return make_split_backend(gpu, threads, devices);
    const std::vector<int> of_ranks = devices.of_ranks();
    if (gpu.kind == GpuOptions::Kind::none) return make_cpu_backends(threads, devices.ranks);
    const std::string reason = cuda_unavailable(of_ranks.front());
    if (reason.empty()) return make_gpus(of_ranks, devices.peer_access);
    if (gpu.kind == GpuOptions::Kind::all)
        FAIL(device,
             "a GPU was asked for (-ngl, --device), but {}; use -ngl 0 or -ngl auto to run on the CPU",
             reason);
    if (cuda_built()) std::fprintf(stderr, "quern: running on the CPU: %s\n", reason.c_str());
    return make_cpu_backends(threads, devices.ranks);
}

DenseFormat parse_dense(const std::string& value) {
    if (value == "fp8") return DenseFormat::fp8;
    if (value == "nvfp4") return DenseFormat::nvfp4;
    FAIL(usage, "--dense: expected fp8 or nvfp4, found '{}'", printable(value));
}

namespace {

/// Other drafters in place of those that are named need no MTP layer, unless it is named.
MtpUse mtp_use(const LoadOptions& load) {
    const EngineOptions& o = load.engine;
    if (o.speculation.kind == DrafterKind::mtp) return MtpUse::required;
    return o.speculation.kind == DrafterKind::automatic && o.drafter == nullptr ? MtpUse::if_readable
                                                                                : MtpUse::none;
}

bool packs_kv(const EngineOptions& o) {
    const KvTypes types = parse_kv_types(o.kv_type, o.kv_type_v, DType::F32);
    return kv::packing_of(types.k, false) != kv::Packing::plain ||
           kv::packing_of(types.v, true) != kv::Packing::plain;
}

/// The drafter that is named, or that is in the checkpoint's folder.
std::string draft_model(const LoadOptions& o) {
    const SpeculationOptions& s = o.engine.speculation;
    const bool named = s.kind == DrafterKind::dflash;
    if (!named && (s.kind != DrafterKind::automatic || o.engine.drafter != nullptr)) return {};
    if (!s.draft_model.empty()) return s.draft_model;
    if (!o.synthetic.empty()) return named ? "new" : "";
    const fs::path beside = fs::path(model_or_demo(o.model)) / "dflash";
    if (has_model(beside)) return beside.string();
    if (named)
        FAIL(usage,
             "--spec dflash: name the drafter with -md DIR; this checkpoint has none in a folder 'dflash'");
    return {};
}

std::unique_ptr<Model> open(const LoadOptions& o, const Backend& backend) {
    OpenOptions options{.tokenizer = o.tokenizer,
                        .shared_tokenizer = o.shared_tokenizer,
                        .dense = o.dense,
                        .threads = backend.threads(),
                        .mtp = mtp_use(o),
                        .draft_head_bytes = o.engine.speculation.short_head ? kDraftHeadBytes : 0,
                        .draft_model = draft_model(o)};
    if (o.engine.speculation.short_head && backend.captures()) options.draft_format = DenseFormat::fp8;
    options.vision = o.vision;
    options.vision_format = o.vision_format;
    if (!options.draft_model.empty()) options.mtp = MtpUse::none;  // the other drafts
    if (o.synthetic.empty()) {
        // The comparison reads a text.
        options.tokenizer |= o.dense != DenseFormat::as_stored || packs_kv(o.engine);
        const std::string path = model_or_demo(o.model);
        return open_for(backend, o.devices.shares, options,
                        [&](const OpenOptions& own) { return open_model(path, own); });
    }
    if (o.tokenizer) options.text_from = model_or_demo({});
    return open_for(backend, o.devices.shares, options,
                    [&](const OpenOptions& own) { return open_synthetic(o.synthetic, o.mix, own); });
}

/// The weights are placed as they are stored, and a comparison runs with them.
void require_fit_as_stored(const Model& model, const Backend& backend) {
    const MemoryPlan all = make_memory_plan(model, backend, dense_cost_options(model), false);
    for (int s = 0; s < model.stages(); ++s) {
        MemoryPlan plan = all.of_stage(s);
        plan.weights.push_back({"as stored", extra_bytes_as_stored(model.of_stage(s), backend.of_stage(s))});
        if (plan.needed() > plan.device.free_bytes)
            FAIL(memory,
                 "not enough memory for --dense or --vision: the model is first loaded as it is stored, "
                 "which takes {:.2f} GB, and {:.2f} GB are free on {}; leave it out, or make a checkpoint in "
                 "that format once",
                 static_cast<double>(plan.needed()) / kGiga,
                 static_cast<double>(plan.device.free_bytes) / kGiga, plan.device_name);
    }
}

/// Requantizes, says what it cost, and refuses what costs too much.
DenseCost requantize_or_refuse(Model& model, Backend& backend) {
    ProgressBar bar("requantizing");
    const DenseCost cost = requantize_measured(model, backend, [&](const LoadProgress& p) { bar.update(p); });
    const char* format = dense_format_name(model.info().dense);
    if (!cost.acceptable())
        FAIL(model,
             "--dense {} changes this model too much: {}; accepted are a mean KL of {} and {:.0f} %. Leave "
             "it out{}",
             format, describe(cost), DenseCost::kMaxMeanKl, 100 * DenseCost::kMinAgreement,
             model.info().dense == DenseFormat::nvfp4 ? " or try --dense fp8" : "");
    std::fprintf(stderr, "quern: --dense %s: %s; %.1f s\n", format, describe(cost).c_str(), cost.seconds);
    return cost;
}

/// Says what a packed KV cache costs, and refuses what costs too much.
DenseCost measure_kv_or_refuse(Model& model, Backend& backend, const EngineOptions& o, bool allow_loss) {
    const DenseCost cost =
        measure_kv_cost(model, backend, kv_cost_tokens(model, backend), o.kv_type, o.kv_type_v);
    const std::string name = kv_name(parse_kv_types(o.kv_type, o.kv_type_v, backend.activation_dtype()));
    if (!(cost.kl_mean <= DenseCost::kMaxMeanKl) && !allow_loss)
        FAIL(model,
             "a KV cache in {} changes this model too much: {}; accepted is a mean KL of {}. Take another "
             "format (-ctk fp8), or run it all the same with --allow-loss",
             name, describe(cost), DenseCost::kMaxMeanKl);
    std::fprintf(stderr, "quern: KV cache in %s: %s; %.1f s\n", name.c_str(), describe(cost).c_str(),
                 cost.seconds);
    return cost;
}

}  // namespace

LoadedModel load_and_start(const LoadOptions& o) {
    require_one_split(o.devices);
    return load_and_start(o, make_backend(o.gpu, o.threads, o.devices));
}

LoadedModel load_and_start(const LoadOptions& o, std::unique_ptr<Backend> on) {
    LoadedModel loaded;
    loaded.backend = std::move(on);
    Backend& backend = *loaded.backend;
    EngineOptions engine = o.engine;
    const bool compared = o.dense != DenseFormat::as_stored && o.synthetic.empty() && !o.measured;
    MemoryPlan plan;
    std::string summary;
    {
        ProgressBar bar;
        loaded.model = open(o, backend);
        check_layers(o.gpu, loaded.model->info().layers);
        plan = make_memory_plan(*loaded.model, backend, engine, false);
        if (engine.context == 0 && o.context_limit > 0 && plan.context > o.context_limit) {
            engine.context = o.context_limit;
            plan = make_memory_plan(*loaded.model, backend, engine, false);
        }
        if (o.verbose) std::fputs(describe(plan).c_str(), stderr);
        require_fit(plan);
        if (changes_later(*loaded.model)) require_fit_as_stored(*loaded.model, backend);
        place_weights(*loaded.model, backend, [&](const LoadProgress& p) {
            bar.update(p);
            if (o.progress) o.progress(p);
        });
        summary = bar.summary();
    }
    if (compared)
        loaded.dense_cost = requantize_or_refuse(*loaded.model, backend);
    else if (changes_later(*loaded.model))
        requantize_weights(*loaded.model, backend);
    if (o.synthetic.empty() && packs_kv(engine) && !o.measured)
        loaded.kv_cost = measure_kv_or_refuse(*loaded.model, backend, engine, o.allow_loss);
    const int64_t weights = plan.device.free_bytes - backend.memory_info().free_bytes;
    engine.context = plan.context;
    if (plan.context_chosen && plan.context < plan.model_context && !o.verbose)
        std::fprintf(stderr,
                     "quern: context %lld tokens, the largest that fits; the model was made for %lld\n",
                     static_cast<long long>(plan.context), static_cast<long long>(plan.model_context));
    loaded.engine = std::make_unique<Engine>(*loaded.model, backend, engine);
    for (const std::string& note : loaded.engine->notes()) std::fprintf(stderr, "quern: %s\n", note.c_str());
    if (!o.verbose) return loaded;
    std::fprintf(stderr, "loaded    %s\n", summary.c_str());
    for (const std::string& note : loaded.model->notes()) std::fprintf(stderr, "note: %s\n", note.c_str());
    if (!plan.device.exact) return loaded;
    MemoryMeasured measured = loaded.engine->memory_measured();
    measured.weights = weights;
    std::fputs(describe(plan, measured).c_str(), stderr);
    return loaded;
}

void ProgressBar::update(const LoadProgress& progress) {
    const Clock::time_point now = Clock::now();
    bytes_ = progress.bytes_done;
    const double elapsed = std::chrono::duration<double>(now - start_).count();
    const double since = std::chrono::duration<double>(now - shown_).count();
    const bool terminal = ::isatty(STDERR_FILENO) != 0;
    if (elapsed < 1.0 || since < (terminal ? 0.1 : 5.0) || progress.bytes_total <= 0) return;
    shown_ = now;
    const double part = static_cast<double>(progress.bytes_done) / static_cast<double>(progress.bytes_total);
    const double rate = static_cast<double>(progress.bytes_done) / elapsed;
    const double left = rate > 0 ? static_cast<double>(progress.bytes_total - progress.bytes_done) / rate : 0;
    const std::string numbers = fmt::format(
        "{:.1f} of {:.1f} GB, {:.2f} GB/s, {:.0f} s left", static_cast<double>(progress.bytes_done) / kGiga,
        static_cast<double>(progress.bytes_total) / kGiga, rate / kGiga, left);
    if (!terminal) {
        std::fprintf(stderr, "quern: %s: %s\n", activity_, numbers.c_str());
        return;
    }
    const auto filled = static_cast<size_t>(part * kBarWidth + 0.5);
    const std::string bar = std::string(std::min<size_t>(filled, kBarWidth), '#');
    std::fprintf(stderr, "\r%s [%-*s] %s ", activity_, kBarWidth, bar.c_str(), numbers.c_str());
    std::fflush(stderr);
    visible_ = true;
}

std::string ProgressBar::summary() const {
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    const double giga = static_cast<double>(bytes_) / kGiga;
    return fmt::format("{:.2f} GB in {:.1f} s, {:.2f} GB/s", giga, seconds, seconds > 0 ? giga / seconds : 0);
}

ProgressBar::~ProgressBar() {
    if (visible_) std::fprintf(stderr, "\r%90s\r", "");
}

}  // namespace quern
