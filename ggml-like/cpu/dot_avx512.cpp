// Dot kernels for AVX-512 (F, BW, VL, DQ). Compiled with those instructions: no std headers here.
//
// NVFP4: 64 bytes are 128 codes, seen as 16 dwords. For i = 0..7 the lowest code of every dword picks its
// value from a 16-entry register (vpermps looks at 4 bits only, so no mask), is multiplied into a partial
// sum, and the dwords shift right by 4. A dword's 8 codes share one block scale: it is applied to the partial
// sum, once per 128 weights. Activations are packed so that step i finds element 8 * lane + i in lane `lane`.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include <immintrin.h>

#include "ggml-like/cpu/dot_tiles.h"
#include "ggml-like/cpu/vector_tiles.h"

namespace quern::cpu {
namespace {

constexpr int64_t kSpan = 128;  // weights in 64 bytes of codes
constexpr int64_t kPair = 256;  // one 16-byte load of block scales

__mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

struct Avx512 {
    using V = __m512;
    static constexpr int kLanes = 16;
    static constexpr int kMaxTokens = 4;
    static constexpr int kRows = 4;
    static constexpr int kColumns = 4;
    static constexpr int kPrefetch = 8192;

    static V once(V a) {
        asm("" : "+v"(a));
        return a;
    }
    static V zero() { return _mm512_setzero_ps(); }
    static V set1(float a) { return _mm512_set1_ps(a); }
    static V load(const float* p) { return _mm512_loadu_ps(p); }
    static V load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static void store(float* p, V a) { _mm512_storeu_ps(p, a); }
    static void store_first(float* p, V a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
    static V add(V a, V b) { return _mm512_add_ps(a, b); }
    static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static V div(V a, V b) { return _mm512_div_ps(a, b); }
    static V max(V a, V b) { return _mm512_max_ps(a, b); }
    static V min(V a, V b) { return _mm512_min_ps(a, b); }
    static V power(V magic) {
        const __m512i exponent = _mm512_add_epi32(_mm512_castps_si512(magic), _mm512_set1_epi32(127));
        return _mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23));
    }
    static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static float sum(V a) {
        const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
        c = _mm_add_ps(c, _mm_movehl_ps(c, c));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
    }
};

struct F32 : NeverPoisoned {
    static constexpr int kBytes = 4;
    static __m512 load(const uint8_t* p) { return _mm512_loadu_ps(p); }
    static __m512 load_first(const uint8_t* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
};

struct Bf16 : NeverPoisoned {
    static constexpr int kBytes = 2;
    static __m512 widen(__m256i v) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
    }
    static __m512 load(const uint8_t* p) {
        return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static __m512 load_first(const uint8_t* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
};

struct F16 : NeverPoisoned {
    static constexpr int kBytes = 2;
    static __m512 load(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static __m512 load_first(const uint8_t* p, int n) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
    }
};

/// 16 E4M3 values, times 2^-8: their bits are those of a half with a smaller exponent bias. Exact.
__m512 widen_e4m3(__m128i v) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(v), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<short>(0xbfff))));
}

struct F8 {
    static constexpr int kBytes = 1;
    static constexpr float kFactor = 256.0f;
    static __m512 load(const uint8_t* p) {
        return widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static __m512 load_first(const uint8_t* p, int n) {
        return widen_e4m3(_mm_maskz_loadu_epi8(first(n), p));
    }
    static bool poisoned(const uint8_t* p, int64_t n) { return has_e4m3_nan(p, n); }
};

/// Values of the codes, times 2^8 to undo what widen_e4m3 leaves out of the scales.
__m512 code_table() {
    return _mm512_setr_ps(0.0f, 128.0f, 256.0f, 384.0f, 512.0f, 768.0f, 1024.0f, 1536.0f, -0.0f, -128.0f,
                          -256.0f, -384.0f, -512.0f, -768.0f, -1024.0f, -1536.0f);
}

struct Nvfp4Tile {
    static constexpr int kRows = 2;

    /// Up to kSpan weights of R rows: codes[r] and the scales of the span, lane by lane, in scale[r].
    /// x[t] points at the packed span, whose vectors have `lanes` floats.
    template <int R, int T, bool kWhole>
    static void span(__m512i (&codes)[R], const __m512 (&scale)[R], const float* const (&x)[T], int lanes,
                     __m512 (&acc)[R][T]) {
        const __m512 table = code_table();
        const __mmask16 used = first(lanes);
        __m512 part[R][T];
        for (int i = 0; i < 8; ++i) {
            __m512 xv[T];
            for (int t = 0; t < T; ++t)
                xv[t] = Avx512::once(kWhole ? _mm512_loadu_ps(x[t] + i * 16)
                                            : _mm512_maskz_loadu_ps(used, x[t] + i * lanes));
            for (int r = 0; r < R; ++r) {
                const __m512 wv = _mm512_permutexvar_ps(codes[r], table);
                codes[r] = _mm512_srli_epi32(codes[r], 4);
                for (int t = 0; t < T; ++t)
                    part[r][t] = i == 0 ? _mm512_mul_ps(wv, xv[t]) : _mm512_fmadd_ps(wv, xv[t], part[r][t]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) acc[r][t] = _mm512_fmadd_ps(part[r][t], scale[r], acc[r][t]);
    }

    /// Scales of lanes 0..15 of the first or the second span of a pair: each block is two lanes.
    template <int kHalf>
    static __m512 spread(__m512 scales) {
        const __m512i lanes =
            kHalf == 0 ? _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7)
                       : _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
        return _mm512_permutexvar_ps(lanes, scales);
    }

    /// One whole span, the first or second half of a pair whose scales are in `all`.
    template <int R, int T, int kHalf>
    static void add_span(const uint8_t* codes, const RowBlock& w, int64_t at, const __m512 (&all)[R],
                         const float* const* x, __m512 (&acc)[R][T]) {
        __m512i c[R];
        __m512 s[R];
        for (int r = 0; r < R; ++r) {
            const uint8_t* from = codes + r * w.row_bytes + at / 2;
            if (T == 1) __builtin_prefetch(from + Avx512::kPrefetch);
            c[r] = _mm512_loadu_si512(from);
            s[r] = spread<kHalf>(all[r]);
        }
        const float* xs[T];
        for (int t = 0; t < T; ++t) xs[t] = x[t] + at;
        span<R, T, true>(c, s, xs, 16, acc);
    }

    template <int R, int T>
    static void tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
        const uint8_t* codes = static_cast<const uint8_t*>(w.data) + row * w.row_bytes;
        const uint8_t* scales = static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes;
        __m512 acc[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) acc[r][t] = _mm512_setzero_ps();
        const int64_t whole = k - k % kPair;
        for (int64_t i = 0; i < whole; i += kPair) {
            __m512 all[R];
            for (int r = 0; r < R; ++r) {
                const uint8_t* from = scales + r * w.scale_row_bytes + i / 16;
                all[r] = widen_e4m3(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
            }
            add_span<R, T, 0>(codes, w, i, all, x, acc);
            add_span<R, T, 1>(codes, w, i + kSpan, all, x, acc);
        }
        if (whole < k) rest<R, T>(codes, scales, w, whole, k - whole, x, acc);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) y[t][row + r] = Avx512::sum(acc[r][t]);
    }

    /// The last `count` < kPair weights, with masked loads.
    template <int R, int T>
    static void rest(const uint8_t* codes, const uint8_t* scales, const RowBlock& w, int64_t begin,
                     int64_t count, const float* const* x, __m512 (&acc)[R][T]) {
        for (int half = 0; half * kSpan < count; ++half) {
            const int64_t at = begin + half * kSpan;
            const int64_t left = count - half * kSpan;
            const int lanes = static_cast<int>((left < kSpan ? left : kSpan) / 8);
            __m512i c[R];
            __m512 s[R];
            for (int r = 0; r < R; ++r) {
                c[r] = _mm512_maskz_loadu_epi32(first(lanes), codes + r * w.row_bytes + at / 2);
                const __m128i v =
                    _mm_maskz_loadu_epi8(first(lanes / 2), scales + r * w.scale_row_bytes + at / 16);
                s[r] = spread<0>(widen_e4m3(v));
            }
            const float* xs[T];
            for (int t = 0; t < T; ++t) xs[t] = x[t] + at;
            span<R, T, false>(c, s, xs, lanes, acc);
        }
    }

    static bool poisoned(const RowBlock& w, int64_t row, int64_t k) {
        return has_e4m3_nan(static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes, k / 16);
    }
};

void pack(const float* x, int64_t k, float* packed) {
    const __m512i lane = _mm512_setr_epi32(0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120);
    for (int64_t begin = 0; begin < k; begin += kSpan) {
        const int lanes = static_cast<int>((k - begin < kSpan ? k - begin : kSpan) / 8);
        const __mmask16 used = first(lanes);
        for (int i = 0; i < 8; ++i) {
            const __m512 v = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), used, lane, x + begin + i, 4);
            _mm512_mask_storeu_ps(packed + begin + i * lanes, used, v);
        }
    }
}

}  // namespace

const DotKernels& avx512_dot_kernels() {
    static constexpr DotKernels kKernels = {
        "avx512",
        run_rows<Avx512, PlainTile<Avx512, F32>>,
        run_rows<Avx512, PlainTile<Avx512, Bf16>>,
        run_rows<Avx512, PlainTile<Avx512, F16>>,
        run_rows<Avx512, PlainTile<Avx512, F8>>,
        run_rows<Avx512, BlockScaledTile<Avx512, F8>>,
        run_rows<Avx512, Nvfp4Tile>,
        pack,
        dot_product<Avx512>,
        add_scaled<Avx512>,
        combine_rows<Avx512>,
        softmax<Avx512>,
        gelu_tanh<Avx512>,
    };
    return kKernels;
}

}  // namespace quern::cpu

#endif
