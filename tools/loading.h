// Loading: from what the command line says to a model in memory. Shared by the subcommands.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "models/model.h"

namespace quern {

/// `given`, or the demo checkpoint if empty: ../models/demo or ../share/quern/models/demo from the program,
/// else where it was built. Throws Error(model) that says how to name one if there is none.
std::string model_or_demo(const std::string& given);

/// What -ngl accepts: 0, auto, all, or a number of 99 and more (all). Throws Error(usage) for other values.
enum class GpuWish { none, automatic, all };
GpuWish parse_gpu_layers(const std::string& value);

/// The backend for the wish. Throws Error(device) if a GPU is demanded and this build or machine has none.
/// `threads`: 0 = as many as this process may use.
std::unique_ptr<Backend> make_backend(GpuWish wish, int threads, int device = 0);

/// Progress of a load on stderr: nothing in the first second, then a bar with bytes, rate and time left on a
/// terminal, else a line every few seconds.
class ProgressBar {
  public:
    void update(const LoadProgress& progress);
    /// Removes the bar.
    ~ProgressBar();

  private:
    using Clock = std::chrono::steady_clock;
    Clock::time_point start_ = Clock::now();
    Clock::time_point shown_ = start_;
    bool visible_ = false;
};

}  // namespace quern
