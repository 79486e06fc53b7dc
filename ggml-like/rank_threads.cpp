#include "ggml-like/rank_threads.h"

#include <utility>

namespace quern {

RankThreads::RankThreads(int ranks, const std::function<void(int)>& begin) {
    busy_ = ranks - 1;
    for (int rank = 1; rank < ranks; ++rank)
        threads_.emplace_back([this, rank, begin] { serve(rank, begin); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return busy_ == 0; });
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

void RankThreads::serve(int rank, const std::function<void(int)>& begin) {
    int64_t seen = 0;
    std::exception_ptr unusable;
    try {
        begin(rank);
    } catch (...) {
        unusable = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    if (unusable && !error_) error_ = unusable;
    for (;;) {
        if (--busy_ == 0) changed_.notify_all();
        changed_.wait(lock, [&] { return ending_ || runs_ != seen; });
        if (ending_) return;
        seen = runs_;
        lock.unlock();
        do_work(rank);
        lock.lock();
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
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return busy_ == 0; });
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

}  // namespace quern
