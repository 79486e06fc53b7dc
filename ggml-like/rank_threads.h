// RankThreads: a thread for each rank of a model, for as long as the model lives.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace quern {

class RankThreads {
  public:
    /// Rank 0 is the thread that calls run(); the others get one each, on which `begin(rank)` is called first. `spin`: how
    /// long a thread that waits looks for work before it sleeps, where waking it would take longer than it may.
    RankThreads(int ranks, const std::function<void(int rank)>& begin, std::chrono::microseconds spin);
    ~RankThreads();
    RankThreads(const RankThreads&) = delete;
    RankThreads& operator=(const RankThreads&) = delete;

    /// Calls work(rank) for all ranks at the same time and returns when all calls have ended. If one throws, calls `failed`
    /// on its thread, at once, and rethrows the error that came first. Not from two threads at a time.
    void run(const std::function<void(int rank)>& work, const std::function<void()>& failed);

  private:
    void serve(int rank, const std::function<void(int)>& begin);
    void do_work(int rank);
    void end_work();
    /// Returns when it is so: looks again and again for a while, then sleeps.
    template <typename F>
    void await(F&& so);

    const std::chrono::microseconds spin_;
    std::mutex mutex_;
    std::condition_variable changed_;
    const std::function<void(int)>* work_ = nullptr;
    const std::function<void()>* failed_ = nullptr;
    std::atomic<int64_t> runs_{0};
    std::atomic<int> busy_;
    std::atomic<bool> ending_{false};
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

}  // namespace quern
