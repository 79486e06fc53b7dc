#include "cuda_stand_in/pace.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "cuda_stand_in/stand_in.h"

namespace quern::cuda_stand_in {
namespace {

using Clock = std::chrono::steady_clock;

struct Busy {
    Pace pace;
    Clock::time_point until{};
    DeviceTime time;
};

Busy& busy() {
    static Busy state;
    return state;
}

Clock::duration seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

}  // namespace

void set_pace(Pace pace) { busy() = {.pace = std::move(pace), .until = {}, .time = {}}; }

DeviceTime take_device_time() { return std::exchange(busy().time, {}); }

void begin_graph() {
    Busy& b = busy();
    if (b.pace.graph_seconds <= 0) return;
    const auto now = Clock::now();
    if (b.until != Clock::time_point{})
        b.time.idle_seconds.push_back(
            std::chrono::duration<double>(std::max(now, b.until) - b.until).count());
    ++b.time.graphs;
    b.until = std::max(now, b.until) + seconds(b.pace.graph_seconds);
}

/// As a GPU's driver does, without giving the processor away at the end.
void wait_for_graphs() {
    constexpr auto kAwake = std::chrono::microseconds(300);
    if (Clock::now() + kAwake < busy().until) std::this_thread::sleep_until(busy().until - kAwake);
    while (Clock::now() < busy().until) {
    }
}

void downloaded(void* to, size_t bytes) {
    if (busy().pace.after_download) busy().pace.after_download(to, bytes);
}

}  // namespace quern::cuda_stand_in
