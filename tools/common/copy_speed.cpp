#include "tools/common/copy_speed.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "ggml-like/backend.h"

namespace quern {

double measure_copy_speed(Backend& backend, const std::function<void()>& meanwhile) {
    constexpr int kCopies = 10, kRuns = 4;
    const int64_t bytes = std::clamp<int64_t>(backend.memory_info().free_bytes / 4, 1 << 20, 1 << 30);
    const auto take = [&](const char* what) {
        return std::shared_ptr<void>(backend.alloc(bytes, what), [&backend](void* m) { backend.free(m); });
    };
    const auto from = take("a measured copy"), to = take("a measured copy");
    double best = 1e30;
    for (int run = 0; run < kRuns; ++run) {
        const auto begin = std::chrono::steady_clock::now();
        for (int i = 0; i < kCopies; ++i) backend.copy(to.get(), from.get(), bytes);
        if (run == 0 && meanwhile) meanwhile();
        backend.synchronize();
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        if (run > 0) best = std::min(best, seconds);
    }
    return 2.0 * kCopies * static_cast<double>(bytes) / best;
}

}  // namespace quern
