// How close the dot kernels come to the memory's speed. Prints, never fails. Run with
//   quern_tests --no-skip -ts=perf
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "ggml-like/cpu/dot.h"
#include "ggml-like/cpu/thread_pool.h"

using namespace quern::cpu;

namespace {

constexpr int64_t kBytes = int64_t{1} << 30;
constexpr int kRounds = 9;

template <typename F>
double seconds(F&& f) {
    const auto begin = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

/// Large enough that no cache holds it; the bytes are ordinary values in every format.
struct Memory {
    uint8_t* data = nullptr;
    explicit Memory(int64_t bytes) {
        data = static_cast<uint8_t*>(std::aligned_alloc(4096, static_cast<size_t>(bytes)));
        REQUIRE(data != nullptr);
        std::memset(data, 0x3c, static_cast<size_t>(bytes));
    }
    ~Memory() { std::free(data); }
};

uint64_t sink = 0;

/// Bytes a second of a plain sum over everything.
double read_speed(ThreadPool& pool, const uint8_t* data) {
    std::vector<uint64_t> sums(static_cast<size_t>(pool.size()) * 8);
    const double time = seconds([&] {
        pool.parallel_for(kBytes, 1 << 20, [&](int64_t begin, int64_t end, int worker) {
            uint64_t sum[8] = {};
            const auto* p = reinterpret_cast<const uint64_t*>(data + begin);
            for (int64_t i = 0; i < (end - begin) / 64; ++i) {
                __builtin_prefetch(p + 8 * i + 512);  // as the kernels do
                for (int j = 0; j < 8; ++j) sum[j] += p[8 * i + j];
            }
            for (const uint64_t s : sum) sums[static_cast<size_t>(worker) * 8] += s;
        });
    });
    for (const uint64_t s : sums) sink += s;
    return static_cast<double>(kBytes) / time;
}

struct Shape {
    const char* name;
    int64_t rows, cols, data_row, scale_row;
    RowKernel run;
    bool packed;
    int64_t bytes() const { return rows * (data_row + scale_row); }
};

/// One product after the other until `total` bytes of weights were read; seconds.
double multiply(ThreadPool& pool, const Shape& s, const uint8_t* data, const std::vector<const float*>& x,
                const std::vector<float*>& y, int64_t total) {
    const auto tokens = static_cast<int64_t>(x.size());
    const int64_t grain = std::max<int64_t>(4, (128 << 10) / s.data_row / 4 * 4);
    return seconds([&] {
        for (int64_t at = 0; at + s.bytes() <= total; at += s.bytes()) {
            pool.parallel_for(s.rows, grain, [&](int64_t begin, int64_t end, int) {
                std::vector<float*> to;
                for (float* row : y) to.push_back(row + begin);
                const RowBlock block{data + at + begin * s.data_row, s.data_row, end - begin,
                                     data + at + s.rows * s.data_row + begin * s.scale_row, s.scale_row};
                s.run(block, s.cols, x.data(), to.data(), tokens);
            });
        }
    });
}

}  // namespace

TEST_SUITE("perf" * doctest::skip()) {
    TEST_CASE("dot: speed of every kernel set, by memory and by arithmetic") {
        const Memory memory(kBytes);
        ThreadPool pool(2);
        constexpr size_t kFloats = 64 * 8192;
        const Memory activations(3 * kFloats * sizeof(float));  // x, packed x, y: aligned as those of a plan
        float* x = reinterpret_cast<float*>(activations.data);
        float *packed = x + kFloats, *y = packed + kFloats;
        for (size_t i = 0; i < kFloats; ++i) x[i] = static_cast<float>(i % 17) - 8.0f;
        const auto rows_of = [](float* v, int64_t tokens) {
            std::vector<float*> rows;
            for (int64_t t = 0; t < tokens; ++t) rows.push_back(v + t * 8192);
            return rows;
        };
        for (const DotKernels* set : available_dot_kernels()) {
            const Shape shapes[] = {
                {"bf16  8192 x 4096", 8192, 4096, 8192, 0, set->bf16, false},
                {"nvfp4 8192 x 8192", 8192, 8192, 4096, 512, set->nvfp4, true},
                {"nvfp4 8192 x 2048", 8192, 2048, 1024, 128, set->nvfp4, true},
                {"f8    8192 x 4096", 8192, 4096, 4096, 0, set->f8_e4m3, false},
                {"f16   8192 x 4096", 8192, 4096, 8192, 0, set->f16, false},
            };
            for (const Shape& s : shapes) {
                for (int64_t t = 0; t < 64; ++t) set->pack_nvfp4(x + t * 8192, s.cols, packed + t * 8192);
                const auto from = rows_of(s.packed ? packed : x, 64);
                const std::vector<const float*> all(from.begin(), from.end());
                const auto to = rows_of(y, 64);
                std::vector<double> speed, ratio, flops;
                const bool slow = std::strcmp(set->name, "scalar") == 0;
                for (int round = 0; round < (slow ? 1 : kRounds); ++round) {
                    const double memory_speed = read_speed(pool, memory.data);
                    const int64_t total = kBytes / s.bytes() * s.bytes();
                    speed.push_back(static_cast<double>(total) /
                                    multiply(pool, s, memory.data, {all[0]}, {to[0]}, total));
                    ratio.push_back(speed.back() / memory_speed);
                    Shape panel = s;
                    panel.rows = 2048;
                    const double time = multiply(pool, panel, memory.data, all, to, panel.bytes());
                    flops.push_back(2.0 * 64 * 2048 * static_cast<double>(s.cols) / time);
                }
                fmt::print(
                    "{:7} {}: 1 token {:6.2f} GB/s = {:3.0f} % of reading; 64 tokens {:6.1f} GFLOP/s\n",
                    set->name, s.name, median(speed) / 1e9, 100 * median(ratio), median(flops) / 1e9);
            }
        }
        CHECK(sink != 0);
    }
}
