#include "tools/loading.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string_view>

#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"
#include "tools/cli_values.h"

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

GpuWish parse_gpu_layers(const std::string& value) {
    if (value == "auto") return GpuWish::automatic;
    if (value == "all") return GpuWish::all;
    const bool numeric = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
    if (numeric && value.find_first_not_of('0') == std::string::npos) return GpuWish::none;
    if (numeric && (value.size() > 2 || value == "99")) return GpuWish::all;
    FAIL(usage, "-ngl {}: a model runs as a whole on the GPU or on the CPU; use 0, auto or all",
         printable(value));
}

std::unique_ptr<Backend> make_backend(GpuWish wish, int threads, int device) {
    if (wish == GpuWish::none) return make_cpu_backend(threads);
    const std::string reason = cuda_unavailable();
    if (reason.empty()) return make_cuda_backend(device);
    if (wish == GpuWish::all)
        FAIL(device, "a GPU was asked for (-ngl), but {}; use -ngl 0 or -ngl auto to run on the CPU", reason);
    return make_cpu_backend(threads);
}

void ProgressBar::update(const LoadProgress& progress) {
    const Clock::time_point now = Clock::now();
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
        std::fprintf(stderr, "quern: loading: %s\n", numbers.c_str());
        return;
    }
    const auto filled = static_cast<size_t>(part * kBarWidth + 0.5);
    const std::string bar = std::string(std::min<size_t>(filled, kBarWidth), '#');
    std::fprintf(stderr, "\rloading [%-*s] %s ", kBarWidth, bar.c_str(), numbers.c_str());
    std::fflush(stderr);
    visible_ = true;
}

ProgressBar::~ProgressBar() {
    if (visible_) std::fprintf(stderr, "\r%90s\r", "");
}

}  // namespace quern
