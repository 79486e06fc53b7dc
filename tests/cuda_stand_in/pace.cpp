#include "cuda_stand_in/pace.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
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

std::mutex busy_mutex;

/// Only with the mutex.
Busy& busy() {
    static Busy state;
    return state;
}

Clock::duration seconds(double s) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s));
}

}  // namespace

void set_pace(Pace pace) {
    const std::lock_guard lock(busy_mutex);
    busy() = {.pace = std::move(pace), .until = {}, .time = {}};
}

DeviceTime take_device_time() {
    const std::lock_guard lock(busy_mutex);
    return std::exchange(busy().time, {});
}

void begin_graph() {
    const std::lock_guard lock(busy_mutex);
    Busy& b = busy();
    if (b.pace.graph_seconds <= 0) return;
    const auto now = Clock::now();
    if (b.until != Clock::time_point{})
        b.time.idle_seconds.push_back(
            std::chrono::duration<double>(std::max(now, b.until) - b.until).count());
    ++b.time.graphs;
    b.until = std::max(now, b.until) + seconds(b.pace.graph_seconds);
}

namespace {

Clock::time_point busy_until() {
    const std::lock_guard lock(busy_mutex);
    return busy().until;
}

std::function<void(void*, size_t)> after_download() {
    const std::lock_guard lock(busy_mutex);
    return busy().pace.after_download;
}

}  // namespace

/// As a GPU's driver does, without giving the processor away at the end.
void wait_for_graphs() {
    constexpr auto kAwake = std::chrono::microseconds(300);
    const Clock::time_point until = busy_until();
    if (Clock::now() + kAwake < until) std::this_thread::sleep_until(until - kAwake);
    while (Clock::now() < until) {
    }
}

void downloaded(void* to, size_t bytes) {
    if (const auto write = after_download()) write(to, bytes);
}

}  // namespace quern::cuda_stand_in
