// Loading: from the command line to a model in memory. Shared by the subcommands.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "models/model.h"
#include "models/weight_placement.h"
#include "tools/common/device_flags.h"
#include "tools/engine/dense_cost.h"
#include "tools/engine/engine.h"

namespace quern {

class Tokenizer;

/// `given`, or if empty the demo checkpoint: ../models/demo or ../share/quern/models/demo from the program, else where
/// it was built. If there is none, throws Error(model) that says how to name a model.
std::string model_or_demo(const std::string& given);

/// What -ngl asks for: the CPU; a GPU if one can be used; a GPU. -ngl with a number of layers asks for a GPU, too.
struct GpuOptions {
    enum class Kind { none, automatic, all } kind;
    int64_t layers = 0;  // the number, if one was given; check_layers compares it with the model's
    static const GpuOptions none, automatic, all;
    friend bool operator==(const GpuOptions&, const GpuOptions&) = default;
};
inline constexpr GpuOptions GpuOptions::none{Kind::none}, GpuOptions::automatic{Kind::automatic},
    GpuOptions::all{Kind::all};

/// 0, auto, all or a number of layers. Throws Error(usage) for other values.
GpuOptions parse_gpu_layers(const std::string& value);
/// Throws Error(usage) if fewer layers are asked for than the model has: it runs as a whole on one device.
void check_layers(const GpuOptions& gpu, int64_t layers);

/// Throws Error(device) if a GPU is demanded and there is none to use. With GpuOptions::automatic, a build with CUDA
/// says on stderr why it runs on the CPU. `threads`: 0 = as many as this process may use. With several ranks: a group of
/// them, each on a GPU of its own, or on the CPU, where they share the threads.
std::unique_ptr<Backend> make_backend(const GpuOptions& gpu, int threads, const DeviceChoice& devices = {});

/// fp8 or nvfp4. Throws Error(usage) for other values.
DenseFormat parse_dense(const std::string& value);
/// The text of --help.
inline constexpr const char* kDenseHelp =
    "hold attention and DeltaNet projections and the head in fp8 or nvfp4 where the checkpoint has them in "
    "16 bits; what that costs is measured and said, and too much is refused";

/// Progress of a load on stderr: nothing in the first second; then, on a terminal, a bar with bytes, rate and time
/// left, elsewhere a line every few seconds.
class ProgressBar {
  public:
    /// `activity`: the bar's first word; must outlive it.
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
    DeviceChoice devices;
    int threads = 0;
    bool tokenizer = true;
    const Tokenizer* shared_tokenizer = nullptr;  // OpenOptions::shared_tokenizer
    DenseFormat dense = DenseFormat::as_stored;
    EngineOptions engine;
    bool vision = false;  // read the checkpoint's vision tower, if it has one
    DenseFormat vision_format = DenseFormat::as_stored;
    bool allow_loss = false;    // whatever the KV cache's format costs
    bool measured = false;      // what `dense` and the KV cache cost is known, and accepted
    int64_t context_limit = 0;  // of a context that is chosen because it fits (engine.context 0); 0: none
    bool verbose = false;       // the memory plan, the time of the load and the model's notes on stderr
    OnProgress progress;        // called beside showing the bar
};

struct LoadedModel {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
    std::unique_ptr<Engine> engine;
    std::optional<DenseCost> dense_cost;  // what LoadOptions::dense cost; not for random weights
    std::optional<DenseCost> kv_cost;     // what a packed KV cache costs; likewise
};

/// Backend, weights, engine. What cannot work fails before weights are read: Error(device) without a usable GPU,
/// Error(memory) if the model will not fit, Error(usage), Error(model). The costs of LoadOptions::dense and of a packed KV
/// cache are measured and printed on stderr; Error(model) if one is not acceptable, unless `allow_loss` takes the latter.
LoadedModel load_and_start(const LoadOptions& options);
/// The same on this backend, which is this thread's.
LoadedModel load_and_start(const LoadOptions& options, std::unique_ptr<Backend> backend);

}  // namespace quern
