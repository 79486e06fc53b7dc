#include "ggml-like/cpu/thread_pool.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <set>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif

namespace quern::cpu {
namespace {

constexpr uint32_t kClosed = 0x80000000u;
constexpr int kSpins = 96;  // a few microseconds of pauses
constexpr int kMaxThreads = 1024;

// Which pool's loop this thread is inside of, and as which worker.
thread_local const ThreadPool* inside_pool = nullptr;
thread_local int inside_worker = 0;

struct InsideLoop {
    const ThreadPool* pool_before = inside_pool;
    int worker_before = inside_worker;

    InsideLoop(const ThreadPool* pool, int worker) {
        inside_pool = pool;
        inside_worker = worker;
    }
    ~InsideLoop() {
        inside_pool = pool_before;
        inside_worker = worker_before;
    }
};

void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

std::string first_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

int affinity_threads() {
    const int online = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) != 0) return online;
    std::set<std::string> cores;  // threads of one core share this file's text
    int logical = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &set)) continue;
        ++logical;
        const std::string siblings = first_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                                "/topology/thread_siblings_list");
        cores.insert(siblings.empty() ? "cpu" + std::to_string(cpu) : siblings);
    }
    return logical == 0 ? online : static_cast<int>(cores.size());
#else
    return online;
#endif
}

int usable_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

/// Smallest quota from this process's cgroup v2 up to the root; 0: none.
int cgroup_cpus() {
    std::ifstream groups("/proc/self/cgroup");
    std::string line;
    int limit = 0;
    while (std::getline(groups, line)) {
        if (line.rfind("0::/", 0) != 0) continue;
        std::string path = line.substr(3);
        while (true) {
            const int cpus = cpus_from_cgroup_quota(first_line("/sys/fs/cgroup" + path + "/cpu.max"));
            if (cpus > 0) limit = limit == 0 ? cpus : std::min(limit, cpus);
            const size_t slash = path.rfind('/');
            if (path.empty() || slash == std::string::npos) break;
            path.resize(slash);
        }
    }
    return limit;
}

}  // namespace

int cpus_from_cgroup_quota(std::string_view text) {
    const size_t space = text.find(' ');
    if (space == std::string_view::npos) return 0;
    const auto number = [](std::string_view digits) {
        int64_t value = 0;
        const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), value);
        return result.ec == std::errc() ? value : int64_t{0};
    };
    const int64_t quota = number(text.substr(0, space));
    const int64_t period = number(text.substr(space + 1));
    if (quota <= 0 || period <= 0) return 0;
    const int64_t cpus = quota / period + (quota % period != 0 ? 1 : 0);
    return static_cast<int>(std::min<int64_t>(cpus, 1 << 20));
}

int default_threads() {
    const int cores = affinity_threads();
    const int quota = cgroup_cpus();
    return std::max(1, quota > 0 ? std::min(cores, quota) : cores);
}

ThreadPool::ThreadPool(int threads) : gate_(kClosed) {
    const int count = std::min(threads > 0 ? threads : default_threads(), kMaxThreads);
    spin_ = count > 1 && count <= usable_cpus();
    workers_.reserve(static_cast<size_t>(count - 1));
    try {
        for (int worker = 1; worker < count; ++worker) {
            workers_.emplace_back([this, worker] { worker_main(worker); });
        }
    } catch (const std::system_error&) {
        // No more threads to be had: those that started are the pool.
    }
}

ThreadPool::~ThreadPool() {
    stop_.store(true, std::memory_order_relaxed);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

uint32_t ThreadPool::wait_change(std::atomic<uint32_t>& value, uint32_t old) const {
    for (int i = 0; spin_ && i < kSpins; ++i) {
        const uint32_t now = value.load(std::memory_order_acquire);
        if (now != old) return now;
        pause();
    }
    value.wait(old, std::memory_order_acquire);
    return value.load(std::memory_order_acquire);
}

void ThreadPool::worker_main(int worker) {
    const InsideLoop inside(this, worker);
    uint32_t seen = 0;
    while (true) {
        seen = wait_change(epoch_, seen);
        if (stop_.load(std::memory_order_relaxed)) return;
        if (!enter()) continue;
        take_chunks(worker);
        leave();
    }
}

/// False when the loop was closed before this worker came.
bool ThreadPool::enter() {
    uint32_t gate = gate_.load(std::memory_order_relaxed);
    while (!(gate & kClosed)) {
        if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acquire,
                                        std::memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

void ThreadPool::leave() {
    if (gate_.fetch_sub(1, std::memory_order_release) == (kClosed | 1u)) gate_.notify_one();
}

void ThreadPool::take_chunks(int worker) {
    while (true) {
        const int64_t begin = next_.fetch_add(loop_.grain, std::memory_order_relaxed);
        if (begin >= loop_.n) return;
        try {
            loop_.body(loop_.context, begin, std::min(loop_.n, begin + loop_.grain), worker);
        } catch (...) {
            const std::lock_guard lock(error_mutex_);
            if (!error_) error_ = std::current_exception();
            next_.store(loop_.n, std::memory_order_relaxed);
        }
    }
}

void ThreadPool::close_and_wait() {
    uint32_t gate = gate_.fetch_or(kClosed, std::memory_order_acquire) | kClosed;
    while (gate != kClosed) gate = wait_change(gate_, gate);
}

void ThreadPool::run(int64_t n, int64_t grain, Body body, void* context) {
    if (n <= 0) return;
    if (inside_pool == this) return body(context, 0, n, inside_worker);
    const std::lock_guard lock(callers_);
    const InsideLoop inside(this, 0);
    // The counter runs past n by at most one grain a thread: keep that far from overflow.
    grain = std::clamp<int64_t>(grain, 1, n);
    if (workers_.empty() || grain >= n) return body(context, 0, n, 0);

    loop_ = {body, context, n, grain};
    next_.store(0, std::memory_order_relaxed);
    gate_.store(0, std::memory_order_release);
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    take_chunks(0);
    close_and_wait();
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace quern::cpu
