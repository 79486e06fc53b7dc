// Combinations of rows, softmax and GELU of every instruction set, against double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numbers>
#include <random>
#include <string>
#include <vector>

#include "ggml-like/cpu/dot.h"

namespace quern {
namespace {

using namespace cpu;

constexpr float kSentinel = -77.0f;

bool same_bits(float a, float b) { return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b); }

void check_combinations(const DotKernels& set, int64_t columns, int64_t rows) {
    constexpr int64_t kTokens = 6, kGap = 3;
    std::mt19937 random(static_cast<unsigned>(columns + rows));
    std::normal_distribution<float> normal;
    std::vector<float> b(static_cast<size_t>(rows * (columns + kGap)) + 1),
        a(static_cast<size_t>(kTokens * rows) + 1);
    for (auto* v : {&b, &a})
        for (float& x : *v) x = normal(random);
    std::vector<std::vector<float>> y(kTokens,
                                      std::vector<float>(static_cast<size_t>(columns) + 1, kSentinel));
    const float* from[kTokens];
    float* to[kTokens];
    for (size_t t = 0; t < kTokens; ++t)
        from[t] = a.data() + t * static_cast<size_t>(rows), to[t] = y[t].data();
    set.combine_rows(b.data(), columns + kGap, columns, from, rows, to, kTokens);
    std::vector<float> alone(static_cast<size_t>(columns));
    float* const to_alone = alone.data();
    for (size_t t = 0; t < kTokens; ++t) {
        CHECK(y[t].back() == kSentinel);
        set.combine_rows(b.data(), columns + kGap, columns, &from[t], rows, &to_alone, 1);
        for (int64_t c = 0; c < columns; ++c) {
            double sum = 0, magnitude = 0;
            for (int64_t r = 0; r < rows; ++r) {
                const double term =
                    static_cast<double>(from[t][r]) * b[static_cast<size_t>(r * (columns + kGap) + c)];
                sum += term;
                magnitude += std::fabs(term);
            }
            const float found = y[t][static_cast<size_t>(c)];
            CHECK(std::fabs(found - sum) <= 4e-6 * magnitude);
            CHECK(same_bits(found, alone[static_cast<size_t>(c)]));
        }
    }
}

void check_softmax(const DotKernels& set, int64_t n, float width) {
    std::mt19937 random(static_cast<unsigned>(n));
    std::normal_distribution<float> normal(-200, width);  // all far below 0
    std::vector<float> x(static_cast<size_t>(n) + 1, kSentinel);
    for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)] = normal(random);
    const std::vector<float> given(x.begin(), x.end() - 1);
    const double highest = *std::max_element(given.begin(), given.end());
    double sum = 0;
    for (const float v : given) sum += std::exp(v - highest);
    set.softmax(x.data(), n);
    CHECK(x.back() == kSentinel);
    for (size_t i = 0; i < given.size(); ++i) {
        const double expected = std::exp(given[i] - highest) / sum;
        CHECK(std::fabs(x[i] - expected) <= 2e-6 * expected + 1e-37);
    }
}

void check_gelu(const DotKernels& set, int64_t n) {
    std::vector<float> x(static_cast<size_t>(n) + 1, kSentinel), given;
    for (int64_t i = 0; i < n; ++i) {
        given.push_back(i < 3 ? std::array{0.0f, 1e30f, -40.0f}[static_cast<size_t>(i)]
                              : 0.07f * static_cast<float>(i) - 9.0f);
        x[static_cast<size_t>(i)] = given.back();
    }
    set.gelu_tanh(x.data(), n);
    CHECK(x.back() == kSentinel);
    for (size_t i = 0; i < given.size(); ++i) {
        const double v = given[i], u = std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v);
        const double expected = v / (1 + std::exp(-2 * u));
        CAPTURE(v);
        CHECK(std::fabs(x[i] - expected) <= 2e-7 * (3 + std::fabs(2 * u)) * std::fabs(expected) + 1e-30);
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("dot: combinations of rows, of any width and number, alone as among others") {
        for (const DotKernels* set : available_dot_kernels()) {
            CAPTURE(std::string(set->name));
            for (const int64_t columns : {1, 7, 8, 15, 16, 31, 64, 72, 131})
                for (const int64_t rows : {0, 1, 5, 72}) {
                    CAPTURE(columns);
                    CAPTURE(rows);
                    check_combinations(*set, columns, rows);
                }
        }
    }

    TEST_CASE("dot: softmax and GELU against double precision") {
        for (const DotKernels* set : available_dot_kernels()) {
            CAPTURE(std::string(set->name));
            for (const int64_t n : {1, 3, 8, 15, 16, 17, 100, 333}) {
                CAPTURE(n);
                for (const float width : {1.0f, 30.0f}) check_softmax(*set, n, width);
                check_gelu(*set, n);
            }
        }
    }

    TEST_CASE("dot: NaN in a softmax is seen in all of it") {
        for (const DotKernels* set : available_dot_kernels())
            for (const size_t at : {0u, 20u, 36u}) {
                std::vector<float> x(37, 1.0f);
                x[at] = std::numeric_limits<float>::quiet_NaN();
                set->softmax(x.data(), 37);
                for (const float v : x) CHECK(std::isnan(v));
            }
    }
}

}  // namespace
}  // namespace quern
