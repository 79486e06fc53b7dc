// The loops that the dot kernels of all instruction sets share. For dot_*.cpp only.
//
// Everything is in an unnamed namespace on purpose: each of those files is compiled for other instructions,
// and a shared inline function could reach a CPU that lacks them. For the same reason: no std headers.
//
// An instruction set `S` has a vector type V of kLanes floats; zero, set1, load, load_first (the first n, others 0),
// store, store_first, add, fma, sum; once, which keeps a value in a register that compilers would load again for each
// FMA; kPrefetch, bytes ahead in a row; and kRows x kMaxTokens, the tile of accumulators that its registers can hold.
// A format `F` has kBytes per value, load, load_first, the factor kFactor that its loads leave out, and `poisoned` for
// rows that can only give NaN.
#pragma once

#include <cstdint>

#include "ggml-like/cpu/dot.h"

namespace quern::cpu {
namespace {

constexpr int64_t kScaleColumns = 128;  // of block-scaled FP8
constexpr uint32_t kNanBits = 0x7fc00000u;

/// An E4M3 NaN among values or block scales makes the whole sum NaN, so kernels need not carry it.
inline bool has_e4m3_nan(const uint8_t* p, int64_t n) {
    uint8_t found = 0;
    for (int64_t i = 0; i < n; ++i) found |= static_cast<uint8_t>((p[i] & 0x7f) + 1);
    return (found & 0x80) != 0;
}

/// A format without such rows.
struct NeverPoisoned {
    static constexpr float kFactor = 1.0f;
    static bool poisoned(const uint8_t*, int64_t) { return false; }
};

inline float nan_value() {
    float f;
    __builtin_memcpy(&f, &kNanBits, sizeof f);
    return f;
}

/// Rows [row, row + R) against tokens [0, T): each (row, token) has one accumulator, filled in order of k.
template <typename S, typename F, int R, int T>
inline void plain_tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
    using V = typename S::V;
    const uint8_t* p = static_cast<const uint8_t*>(w.data) + row * w.row_bytes;
    V acc[R][T];
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) acc[r][t] = S::zero();
    const int64_t whole = k - k % S::kLanes;
    for (int64_t i = 0; i < whole; i += S::kLanes) {
        V xv[T];
        for (int t = 0; t < T; ++t) xv[t] = S::once(S::load(x[t] + i));
        for (int r = 0; r < R; ++r) {
            const uint8_t* from = p + r * w.row_bytes + i * F::kBytes;
            if (T == 1) __builtin_prefetch(from + S::kPrefetch);
            const V wv = F::load(from);
            for (int t = 0; t < T; ++t) acc[r][t] = S::fma(wv, xv[t], acc[r][t]);
        }
    }
    if (whole < k) {
        const int n = static_cast<int>(k - whole);
        for (int r = 0; r < R; ++r) {
            const V wv = F::load_first(p + r * w.row_bytes + whole * F::kBytes, n);
            for (int t = 0; t < T; ++t) acc[r][t] = S::fma(wv, S::load_first(x[t] + whole, n), acc[r][t]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) y[t][row + r] = S::sum(acc[r][t]) * F::kFactor;
}

template <typename S, typename F>
struct PlainTile {
    static constexpr int kRows = S::kRows;

    template <int R, int T>
    static void tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
        plain_tile<S, F, R, T>(w, row, k, x, y);
    }
    static bool poisoned(const RowBlock& w, int64_t row, int64_t k) {
        return F::poisoned(static_cast<const uint8_t*>(w.data) + row * w.row_bytes, k);
    }
};

/// As plain_tile, with a partial sum and a scale for every kScaleColumns.
template <typename S, typename F>
struct BlockScaledTile {
    static constexpr int kRows = S::kRows;
    using V = typename S::V;

    template <int R, int T>
    static void tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
        V acc[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) acc[r][t] = S::zero();
        for (int64_t begin = 0; begin < k; begin += kScaleColumns) {
            const int64_t count = k - begin < kScaleColumns ? k - begin : kScaleColumns;
            add_group<R, T>(w, row, begin, count, x, acc);
        }
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) y[t][row + r] = S::sum(acc[r][t]);
    }

    template <int R, int T>
    static void add_group(const RowBlock& w, int64_t row, int64_t begin, int64_t count, const float* const* x,
                          V (&acc)[R][T]) {
        const int64_t whole = count - count % S::kLanes;
        for (int r = 0; r < R; ++r) {
            const uint8_t* p = static_cast<const uint8_t*>(w.data) + (row + r) * w.row_bytes + begin;
            V part[T];
            for (int t = 0; t < T; ++t) part[t] = S::zero();
            for (int64_t i = 0; i < whole; i += S::kLanes) {
                const V wv = F::load(p + i);
                for (int t = 0; t < T; ++t) part[t] = S::fma(wv, S::load(x[t] + begin + i), part[t]);
            }
            if (whole < count) {
                const int n = static_cast<int>(count - whole);
                const V wv = F::load_first(p + whole, n);
                for (int t = 0; t < T; ++t)
                    part[t] = S::fma(wv, S::load_first(x[t] + begin + whole, n), part[t]);
            }
            float scale;
            const char* scales = static_cast<const char*>(w.scale) + (row + r) * w.scale_row_bytes;
            __builtin_memcpy(&scale, scales + begin / kScaleColumns * 4, sizeof scale);
            const V sv = S::set1(scale * F::kFactor);
            for (int t = 0; t < T; ++t) acc[r][t] = S::fma(part[t], sv, acc[r][t]);
        }
    }

    static bool poisoned(const RowBlock& w, int64_t row, int64_t k) {
        return F::poisoned(static_cast<const uint8_t*>(w.data) + row * w.row_bytes, k);
    }
};

template <typename S, typename K, int T>
inline void all_rows(const RowBlock& w, int64_t k, const float* const* x, float* const* y) {
    constexpr int kRows = K::kRows;
    int64_t row = 0;
    for (; row + kRows <= w.rows; row += kRows) K::template tile<kRows, T>(w, row, k, x, y);
    for (; row < w.rows; ++row) K::template tile<1, T>(w, row, k, x, y);
}

/// Tokens are the outer loop: a tile's activations stay in the nearest cache over the rows.
template <typename S, typename K>
void run_block(const RowBlock& w, int64_t k, const float* const* x, float* const* y, int64_t tokens) {
    int64_t t = 0;
    for (; t + S::kMaxTokens <= tokens; t += S::kMaxTokens) all_rows<S, K, S::kMaxTokens>(w, k, x + t, y + t);
    for (; t + 2 <= tokens; t += 2) all_rows<S, K, 2>(w, k, x + t, y + t);
    for (; t < tokens; ++t) all_rows<S, K, 1>(w, k, x + t, y + t);
    for (int64_t row = 0; row < w.rows; ++row) {
        if (!K::poisoned(w, row, k)) continue;
        for (t = 0; t < tokens; ++t) y[t][row] = nan_value();
    }
}

/// All rows, all tokens: for many tokens in blocks of rows that stay in a core's second cache over all of them.
template <typename S, typename K>
void run_rows(const RowBlock& w, int64_t k, const float* const* x, float* const* y, int64_t tokens) {
    constexpr int64_t kBlockBytes = 256 << 10, kTokens = 256;
    const int64_t fitting = kBlockBytes / (w.row_bytes > 0 ? w.row_bytes : 1) / K::kRows * K::kRows,
                  block = fitting > K::kRows ? fitting : K::kRows;
    if (tokens <= S::kMaxTokens || w.rows <= block) return run_block<S, K>(w, k, x, y, tokens);
    for (int64_t first = 0; first < tokens; first += kTokens) {
        const int64_t count = tokens - first < kTokens ? tokens - first : kTokens;
        for (int64_t r = 0; r < w.rows; r += block) {
            const RowBlock rows = {static_cast<const uint8_t*>(w.data) + r * w.row_bytes, w.row_bytes,
                                   w.rows - r < block ? w.rows - r : block,
                                   static_cast<const uint8_t*>(w.scale) + r * w.scale_row_bytes,
                                   w.scale_row_bytes};
            float* to[kTokens];
            for (int64_t t = 0; t < count; ++t) to[t] = y[first + t] + r;
            run_block<S, K>(rows, k, x + first, to, count);
        }
    }
}

template <typename S>
float dot_product(const float* a, const float* b, int64_t n) {
    using V = typename S::V;
    constexpr int64_t kStep = 4 * S::kLanes;
    V acc[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
    int64_t i = 0;
    for (; i + kStep <= n; i += kStep)
        for (int j = 0; j < 4; ++j)
            acc[j] = S::fma(S::load(a + i + j * S::kLanes), S::load(b + i + j * S::kLanes), acc[j]);
    for (; i + S::kLanes <= n; i += S::kLanes) acc[0] = S::fma(S::load(a + i), S::load(b + i), acc[0]);
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        acc[1] = S::fma(S::load_first(a + i, rest), S::load_first(b + i, rest), acc[1]);
    }
    return S::sum(S::add(S::add(acc[0], acc[1]), S::add(acc[2], acc[3])));
}

template <typename S>
void add_scaled(float a, const float* x, float* y, int64_t n) {
    const typename S::V av = S::set1(a);
    int64_t i = 0;
    for (; i + S::kLanes <= n; i += S::kLanes) S::store(y + i, S::fma(av, S::load(x + i), S::load(y + i)));
    if (i < n) {
        const int rest = static_cast<int>(n - i);
        S::store_first(y + i, S::fma(av, S::load_first(x + i, rest), S::load_first(y + i, rest)), rest);
    }
}

/// Evens, then odds, of every 16: the order in which a byte's two codes come apart.
inline void pack_even_odd(const float* x, int64_t k, float* packed) {
    for (int64_t b = 0; b < k; b += 16) {
        for (int64_t i = 0; i < 8; ++i) {
            packed[b + i] = x[b + 2 * i];
            packed[b + 8 + i] = x[b + 2 * i + 1];
        }
    }
}

}  // namespace
}  // namespace quern::cpu
