// ThreadPool: a fixed set of workers for the loops of CPU ops.
//
// parallel_for cuts [0, n) into chunks of `grain` that the caller and the workers take from a shared counter,
// so a late or preempted worker delays nothing but the chunk it holds. Workers spin for a few microseconds
// after a loop, then sleep in the kernel; they never spin when there are more threads than cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

namespace quern::cpu {

class ThreadPool {
  public:
    /// threads: the caller of parallel_for counts as one; 0 = default_threads().
    explicit ThreadPool(int threads = 0);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    /// Calls f(begin, end, worker) for disjoint chunks that cover [0, n); a chunk has at most max(grain, 1)
    /// elements unless everything runs inline. `worker` is in [0, size()), never used twice at a time.
    /// Returns when all chunks are done. The first exception of any chunk is rethrown here; chunks not yet
    /// begun are then dropped. Called from inside a loop of the same pool it runs inline, as one chunk, with
    /// the caller's worker number. Calls from different threads wait for each other.
    template <typename F>
    void parallel_for(int64_t n, int64_t grain, F&& f) {
        using Function = std::remove_reference_t<F>;
        run(
            n, grain,
            [](void* context, int64_t begin, int64_t end, int worker) {
                (*static_cast<Function*>(context))(begin, end, worker);
            },
            const_cast<void*>(static_cast<const void*>(std::addressof(f))));
    }

  private:
    using Body = void (*)(void* context, int64_t begin, int64_t end, int worker);

    struct Loop {  // written by the caller while the gate is closed and empty
        Body body = nullptr;
        void* context = nullptr;
        int64_t n = 0;
        int64_t grain = 1;
    };

    void run(int64_t n, int64_t grain, Body body, void* context);
    void worker_main(int worker);
    bool enter();
    void leave();
    void take_chunks(int worker);
    void close_and_wait();
    uint32_t wait_change(std::atomic<uint32_t>& value, uint32_t old) const;

    std::vector<std::thread> workers_;
    bool spin_ = false;
    std::mutex callers_;

    // Separate cache lines: the counter is written for every chunk, the others once a loop.
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> gate_;      // kClosed | workers inside the current loop
    alignas(64) std::atomic<uint32_t> epoch_{0};  // changes when there is something to do
    alignas(64) Loop loop_;
    std::atomic<bool> stop_{false};
    std::mutex error_mutex_;
    std::exception_ptr error_;
};

/// Threads that this process may keep busy: physical cores in its affinity mask, at most the CPU quota of its
/// control groups; at least 1.
int default_threads();

/// cgroup v2 "cpu.max" ("max 100000" or "QUOTA PERIOD") as a number of CPUs, rounded up; 0: no limit or not
/// understood.
int cpus_from_cgroup_quota(std::string_view text);

}  // namespace quern::cpu
