// exp and what is made of it, and combinations of rows: loops that all instruction sets share, as those of dot_tiles.h.
//
// Beside what dot_tiles.h names, an instruction set `S` has mul, div; max and min, which keep a NaN of their second; power, 2^n of
// numbers n + kMagic; and kColumns, vectors of a row that are summed at a time.
#pragma once

#include "ggml-like/cpu/dot_tiles.h"

namespace quern::cpu {
namespace {

/// 1.5 * 2^23: a float of this size has no fraction, so n + kMagic has n, rounded to nearest, in its lowest bits.
constexpr float kMagic = 12582912.0f;

/// e^x to some 2e-7, relative; of x below -87 and above 88: e^-87 and e^88. NaN stays NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r by its series: the first term left out is below 6e-9.
template <typename S>
inline typename S::V exponential(typename S::V x) {
    using V = typename S::V;
    x = S::max(S::set1(-87.0f), S::min(S::set1(88.0f), x));
    const V magic = S::fma(x, S::set1(1.44269504f), S::set1(kMagic)), n = S::add(magic, S::set1(-kMagic));
    // ln 2 in two parts, of which the first times n is exact.
    const V r = S::fma(n, S::set1(2.12194440e-4f), S::fma(n, S::set1(-0.693359375f), x));
    constexpr float kFactors[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    V sum = S::set1(1.0f / 5040);
    for (const float factor : kFactors) sum = S::fma(sum, r, S::set1(factor));
    return S::mul(sum, S::power(magic));
}

/// x[i] = f(x[i]) for all of them.
template <typename S, typename F>
inline void replace(float* x, int64_t n, F&& f) {
    int64_t i = 0;
    for (; i + S::kLanes <= n; i += S::kLanes) S::store(x + i, f(S::load(x + i)));
    if (i == n) return;
    const int rest = static_cast<int>(n - i);
    S::store_first(x + i, f(S::load_first(x + i, rest)), rest);
}

template <typename S>
inline float sum_of(const float* x, int64_t n) {
    typename S::V sum = S::zero();
    int64_t i = 0;
    for (; i + S::kLanes <= n; i += S::kLanes) sum = S::add(sum, S::load(x + i));
    if (i < n) sum = S::add(sum, S::load_first(x + i, static_cast<int>(n - i)));
    return S::sum(sum);
}

template <typename S>
inline float highest_of(const float* x, int64_t n) {
    float highest = x[0];
    int64_t i = 0;
    if (n >= S::kLanes) {
        typename S::V all = S::load(x);
        for (i = S::kLanes; i + S::kLanes <= n; i += S::kLanes) all = S::max(all, S::load(x + i));
        float lanes[S::kLanes];
        S::store(lanes, all);
        for (const float lane : lanes) highest = lane > highest ? lane : highest;
    }
    for (; i < n; ++i) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

template <typename S>
void softmax(float* x, int64_t n) {
    if (n == 0) return;
    const auto minus_highest = S::set1(-highest_of<S>(x, n));
    replace<S>(x, n, [&](typename S::V v) { return exponential<S>(S::add(v, minus_highest)); });
    const auto factor = S::set1(1.0f / sum_of<S>(x, n));
    replace<S>(x, n, [&](typename S::V v) { return S::mul(v, factor); });
}

/// x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), as x / (1 + e^-2u).
template <typename S>
void gelu_tanh(float* x, int64_t n) {
    replace<S>(x, n, [](typename S::V v) {
        const auto cubic = S::fma(S::mul(v, v), S::set1(0.044715f), S::set1(1.0f));
        const auto power = exponential<S>(S::mul(S::mul(v, cubic), S::set1(-2 * 0.7978845608f)));
        return S::div(v, S::add(power, S::set1(1.0f)));
    });
}

/// Columns [0, N * kLanes) of T combinations; `last` < kLanes: only so many of the only vector.
template <typename S, int T, int N, bool kWhole>
inline void combine_tile(const float* b, int64_t row_floats, int last, const float* const* a, int64_t rows,
                         float* const* y, int64_t column) {
    using V = typename S::V;
    V acc[T][N];
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < N; ++n) acc[t][n] = S::zero();
    for (int64_t r = 0; r < rows; ++r) {
        const float* from = b + r * row_floats + column;
        V bv[N];
        for (int n = 0; n < N; ++n)
            bv[n] = kWhole ? S::load(from + n * S::kLanes) : S::load_first(from, last);
        for (int t = 0; t < T; ++t) {
            const V av = S::set1(a[t][r]);
            for (int n = 0; n < N; ++n) acc[t][n] = S::fma(av, bv[n], acc[t][n]);
        }
    }
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < N; ++n) {
            float* to = y[t] + column + n * S::kLanes;
            if (kWhole)
                S::store(to, acc[t][n]);
            else
                S::store_first(to, acc[t][n], last);
        }
}

/// All tokens, so that these columns of b stay in the nearest cache.
template <typename S, int N, bool kWhole>
inline void combine_columns(const float* b, int64_t row_floats, int last, const float* const* a, int64_t rows,
                            float* const* y, int64_t tokens, int64_t column) {
    int64_t t = 0;
    for (; t + 4 <= tokens; t += 4)
        combine_tile<S, 4, N, kWhole>(b, row_floats, last, a + t, rows, y + t, column);
    for (; t < tokens; ++t) combine_tile<S, 1, N, kWhole>(b, row_floats, last, a + t, rows, y + t, column);
}

template <typename S>
void combine_rows(const float* b, int64_t row_floats, int64_t columns, const float* const* a, int64_t rows,
                  float* const* y, int64_t tokens) {
    constexpr int64_t kBlock = S::kColumns * S::kLanes;
    int64_t c = 0;
    for (; c + kBlock <= columns; c += kBlock)
        combine_columns<S, S::kColumns, true>(b, row_floats, 0, a, rows, y, tokens, c);
    for (; c + S::kLanes <= columns; c += S::kLanes)
        combine_columns<S, 1, true>(b, row_floats, 0, a, rows, y, tokens, c);
    if (c < columns)
        combine_columns<S, 1, false>(b, row_floats, static_cast<int>(columns - c), a, rows, y, tokens, c);
}

}  // namespace
}  // namespace quern::cpu
