#include "ggml-like/rank_threads.h"

#include <utility>

namespace quern {

RankThreads::RankThreads(int ranks, const std::function<void(int)>& begin, std::chrono::microseconds spin)
    : spin_(spin), busy_(ranks - 1) {
    for (int rank = 1; rank < ranks; ++rank)
        threads_.emplace_back([this, rank, begin] { serve(rank, begin); });
    await([&] { return busy_ == 0; });
    std::unique_lock lock(mutex_);
    if (!error_) return;
    const std::exception_ptr error = error_;
    ending_ = true;
    changed_.notify_all();
    lock.unlock();
    for (std::thread& t : threads_) t.join();
    std::rethrow_exception(error);
}

RankThreads::~RankThreads() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
        changed_.notify_all();
    }
    for (std::thread& t : threads_) t.join();
}

/// What `so` looks at is changed under the mutex, so that nobody falls asleep just then.
template <typename F>
void RankThreads::await(F&& so) {
    const auto until = std::chrono::steady_clock::now() + spin_;
    while (std::chrono::steady_clock::now() < until)
        if (so()) return;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, so);
}

void RankThreads::end_work() {
    const std::lock_guard lock(mutex_);
    if (--busy_ == 0) changed_.notify_all();
}

void RankThreads::serve(int rank, const std::function<void(int)>& begin) {
    try {
        begin(rank);
    } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!error_) error_ = std::current_exception();
    }
    end_work();
    for (int64_t seen = 0;; ++seen) {
        await([&] { return ending_ || runs_ != seen; });
        if (ending_) return;
        do_work(rank);
        end_work();
    }
}

void RankThreads::do_work(int rank) {
    try {
        (*work_)(rank);
    } catch (...) {
        {
            const std::lock_guard lock(mutex_);
            if (!error_) error_ = std::current_exception();
        }
        (*failed_)();
    }
}

void RankThreads::run(const std::function<void(int)>& work, const std::function<void()>& failed) {
    {
        const std::lock_guard lock(mutex_);
        work_ = &work;
        failed_ = &failed;
        error_ = nullptr;
        busy_ = static_cast<int>(threads_.size());
        ++runs_;
        changed_.notify_all();
    }
    do_work(0);
    await([&] { return busy_ == 0; });
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace quern
