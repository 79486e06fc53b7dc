// Loading: from what the command line says to a model in memory. Shared by the subcommands.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "models/model.h"
#include "models/weight_placement.h"
#include "tools/engine/dense_cost.h"
#include "tools/engine/engine.h"

namespace quern {

/// `given`, or the demo checkpoint if empty: ../models/demo or ../share/quern/models/demo from the program,
/// else where it was built. Throws Error(model) that says how to name one if there is none.
std::string model_or_demo(const std::string& given);

/// What -ngl asks for: the CPU, a GPU if one can be used, a GPU, or a GPU for so many layers, which must be
/// all.
struct GpuOptions {
    enum class Kind { none, automatic, all } kind;
    int64_t layers = 0;  // all: 0, or what the command line said; check_layers knows the model
    static const GpuOptions none, automatic, all;
    friend bool operator==(const GpuOptions&, const GpuOptions&) = default;
};
inline constexpr GpuOptions GpuOptions::none{Kind::none}, GpuOptions::automatic{Kind::automatic},
    GpuOptions::all{Kind::all};

/// 0, auto, all or a number of layers. Throws Error(usage) for other values.
GpuOptions parse_gpu_layers(const std::string& value);
/// Throws Error(usage) if the wish names fewer layers than the model has: it runs as a whole on one device.
void check_layers(const GpuOptions& wish, int64_t layers);

/// The backend for the wish. Throws Error(device) if a GPU is demanded and cannot be had; if one was merely
/// welcome and this build could use it, says on stderr why there is none. `threads`: 0 = as many as this
/// process may use.
std::unique_ptr<Backend> make_backend(const GpuOptions& wish, int threads, int device = 0);

/// fp8 or nvfp4. Throws Error(usage) for other values.
DenseFormat parse_dense(const std::string& value);
/// Of --help.
inline constexpr const char* kDenseHelp =
    "hold attention and DeltaNet projections and the head in fp8 or nvfp4 where the checkpoint has them in "
    "16 bits; "
    "what that costs is measured and said, and too much is refused";

/// Progress of a load on stderr: nothing in the first second, then a bar with bytes, rate and time left on a
/// terminal, else a line every few seconds.
class ProgressBar {
  public:
    /// `activity`: what the bar says is going on; must outlive it.
    explicit ProgressBar(const char* activity = "loading") : activity_(activity) {}
    void update(const LoadProgress& progress);
    /// "22.31 GB in 3.2 s, 6.97 GB/s", up to now.
    std::string summary() const;
    /// Removes the bar.
    ~ProgressBar();

  private:
    using Clock = std::chrono::steady_clock;
    const char* activity_;
    Clock::time_point start_ = Clock::now();
    Clock::time_point shown_ = start_;
    int64_t bytes_ = 0;
    bool visible_ = false;
};

/// What a subcommand loads, and how it will run it.
struct LoadOptions {
    std::string model;           // empty: the demo checkpoint
    std::string synthetic, mix;  // instead: random weights of this name, with the demo checkpoint's tokenizer
    GpuOptions gpu = GpuOptions::automatic;
    int device = 0, threads = 0;
    bool tokenizer = true;
    DenseFormat dense = DenseFormat::as_stored;
    EngineOptions engine;
    bool verbose = false;  // the memory plan and the time of the load on stderr
    OnProgress progress;   // beside the bar
};

struct LoadedModel {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
    std::unique_ptr<Engine> engine;
    std::optional<DenseCost> dense_cost;  // of LoadOptions::dense, but not of random weights
};

/// Backend, weights, engine. What cannot work fails before weights are read: Error(device) without a usable
/// GPU, Error(memory) if they will not fit, Error(usage), Error(model). LoadOptions::dense: measured, and said
/// on stderr; Error(model) if it is not acceptable.
LoadedModel load_and_start(const LoadOptions& wish);

}  // namespace quern
