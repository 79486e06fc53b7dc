#include "ggml-like/cpu/thread_pool.h"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace quern::cpu;

TEST_SUITE("cpu") {
    TEST_CASE("thread pool: every element once, with any number of threads and any grain") {
        for (const int threads : {1, 2, 3, 7}) {
            ThreadPool pool(threads);
            CHECK(pool.size() == threads);
            for (const int64_t n : {0, 1, 2, 5, 64, 1000}) {
                for (const int64_t grain : {-1, 0, 1, 3, 64, 5000}) {
                    CAPTURE(threads);
                    CAPTURE(n);
                    CAPTURE(grain);
                    std::vector<int> count(static_cast<size_t>(n));
                    std::vector<std::atomic<int>> busy(static_cast<size_t>(threads));
                    std::atomic<bool> good = true;
                    pool.parallel_for(n, grain, [&](int64_t begin, int64_t end, int worker) {
                        if (worker < 0 || worker >= threads || begin >= end || end > n) good = false;
                        if (busy[static_cast<size_t>(worker)]++ != 0) good = false;
                        for (int64_t i = begin; i < end; ++i) ++count[static_cast<size_t>(i)];
                        --busy[static_cast<size_t>(worker)];
                    });
                    CHECK(good);
                    for (const int c : count) CHECK(c == 1);
                }
            }
        }
    }

    TEST_CASE("thread pool: many short loops one after the other") {
        ThreadPool pool(3);
        int64_t sum = 0;
        for (int round = 0; round < 2000; ++round) {
            std::atomic<int64_t> part = 0;
            pool.parallel_for(8, 1, [&](int64_t begin, int64_t, int) { part += begin; });
            sum += part;
        }
        CHECK(sum == 2000 * 28);
    }

    TEST_CASE("thread pool: all workers take part") {
        ThreadPool pool(3);
        std::atomic<int> arrived = 0;
        // nobody leaves before all are there: needs three threads at once
        pool.parallel_for(3, 1, [&](int64_t, int64_t, int) {
            ++arrived;
            while (arrived < 3) std::this_thread::yield();
        });
        CHECK(arrived == 3);
    }

    TEST_CASE("thread pool: the first exception reaches the caller, and the pool lives on") {
        ThreadPool pool(3);
        for (int round = 0; round < 50; ++round) {
            std::atomic<int> ran = 0;
            std::string message;
            try {
                pool.parallel_for(1000, 1, [&](int64_t begin, int64_t, int) {
                    ++ran;
                    if (begin >= 3) throw std::runtime_error("chunk");
                });
            } catch (const std::runtime_error& e) {
                message = e.what();
            }
            CHECK(message == "chunk");
            CHECK(ran < 1000);
            ran = 0;
            pool.parallel_for(10, 1, [&](int64_t, int64_t, int) { ++ran; });
            CHECK(ran == 10);
        }
        CHECK_THROWS_AS(pool.parallel_for(1, 1, [](int64_t, int64_t, int) { throw 5; }), int);
    }

    TEST_CASE("thread pool: a loop inside a loop runs inline with the same worker number") {
        ThreadPool pool(2);
        std::atomic<int> inner = 0;
        std::atomic<bool> good = true;
        pool.parallel_for(6, 1, [&](int64_t, int64_t, int outer) {
            pool.parallel_for(10, 1, [&](int64_t begin, int64_t end, int worker) {
                if (begin != 0 || end != 10 || worker != outer) good = false;
                ++inner;
            });
        });
        CHECK(inner == 6);
        CHECK(good);
    }

    TEST_CASE("thread pool: loops of different threads wait for each other") {
        ThreadPool pool(2);
        std::atomic<int> inside = 0;
        std::atomic<bool> good = true;
        std::vector<std::thread> callers;
        for (int c = 0; c < 4; ++c) {
            callers.emplace_back([&] {
                for (int round = 0; round < 50; ++round) {
                    std::vector<int> count(16);
                    pool.parallel_for(16, 1, [&](int64_t begin, int64_t, int) {
                        if (++inside > 2) good = false;
                        ++count[static_cast<size_t>(begin)];
                        --inside;
                    });
                    for (const int n : count)
                        if (n != 1) good = false;
                }
            });
        }
        for (std::thread& caller : callers) caller.join();
        CHECK(good);
    }

    TEST_CASE("thread pool: idle workers sleep") {
        ThreadPool pool(2);
        pool.parallel_for(4, 1, [](int64_t, int64_t, int) {});
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        const std::clock_t before = std::clock();  // of the whole process
        std::this_thread::sleep_for(std::chrono::milliseconds(60));
        CHECK(static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC < 0.03);
    }

    TEST_CASE("thread pool: CPU quota of a control group") {
        CHECK(cpus_from_cgroup_quota("max 100000") == 0);
        CHECK(cpus_from_cgroup_quota("200000 100000") == 2);
        CHECK(cpus_from_cgroup_quota("150000 100000") == 2);
        CHECK(cpus_from_cgroup_quota("50000 100000\n") == 1);
        for (const char* odd :
             {"", "max", "100000", "0 100000", "5 0", "-5 100", "x y", "9 999999999999999999999"}) {
            CAPTURE(std::string(odd));
            CHECK(cpus_from_cgroup_quota(odd) == 0);
        }
        CHECK(default_threads() >= 1);
    }
}
