// A loop on many threads; its first error reaches the caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace quern {

/// Calls f(i) for all i below count. Calls begin in rising order of i, and none begins after an error. Of several errors
/// that of the smallest i is rethrown: the one that a plain loop would meet.
template <typename F>
void for_each_parallel(int threads, size_t count, F&& f) {
    std::atomic<size_t> next{0};
    std::exception_ptr error;
    size_t error_at = count;
    std::mutex mutex;
    const auto work = [&] {
        size_t i = 0;
        try {
            for (i = next++; i < count; i = next++) f(i);
        } catch (...) {
            const std::lock_guard lock(mutex);
            if (i < error_at) {
                error = std::current_exception();
                error_at = i;
            }
            next = count;
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int t = 1; t < threads && static_cast<size_t>(t) < count; ++t) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads to be had: those that run do all the work
    }
    work();
    for (std::thread& t : helpers) t.join();
    if (error) std::rethrow_exception(error);
}

}  // namespace quern
