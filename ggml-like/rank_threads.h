// RankThreads: a thread for each rank of a model, for as long as the model lives.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace quern {

class RankThreads {
  public:
    /// Rank 0 is the thread that calls run(); the others get one each, on which `begin(rank)` is called first.
    RankThreads(int ranks, const std::function<void(int rank)>& begin);
    ~RankThreads();
    RankThreads(const RankThreads&) = delete;
    RankThreads& operator=(const RankThreads&) = delete;

    /// Calls work(rank) for all ranks at the same time and returns when all calls have ended. If one throws, calls `failed`
    /// on its thread, at once, and rethrows the error that came first. Not from two threads at a time.
    void run(const std::function<void(int rank)>& work, const std::function<void()>& failed);

  private:
    void serve(int rank, const std::function<void(int)>& begin);
    void do_work(int rank);

    std::mutex mutex_;
    std::condition_variable changed_;
    const std::function<void(int)>* work_ = nullptr;
    const std::function<void()>* failed_ = nullptr;
    int64_t runs_ = 0;
    int busy_ = 0;
    bool ending_ = false;
    std::exception_ptr error_;
    std::vector<std::thread> threads_;
};

}  // namespace quern
