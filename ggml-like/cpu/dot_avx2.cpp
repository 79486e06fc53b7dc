// Dot kernels for AVX2 with FMA and F16C. Compiled with those instructions: no std headers here.
//
// NVFP4: pshufb turns the low and the high codes of 32 bytes into signed bytes (twice the value); they go
// through a small buffer, because widening bytes straight from memory is the cheapest way to 8 lanes. The two
// products of a lane inside a block are summed, then scaled. Activations are packed evens first in each
// block.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include <immintrin.h>

#include "ggml-like/cpu/dot_tiles.h"
#include "ggml-like/cpu/vector_tiles.h"

namespace quern::cpu {
namespace {

constexpr int64_t kChunk = 512;  // weights decoded at a time

__m256i first(int n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane);
}

struct Avx2 {
    using V = __m256;
    static constexpr int kLanes = 8;
    static constexpr int kMaxTokens = 4;
    static constexpr int kRows = 2;
    static constexpr int kColumns = 2;
    static constexpr int kPrefetch = 4096;

    static V once(V a) {
        asm("" : "+x"(a));
        return a;
    }
    static V zero() { return _mm256_setzero_ps(); }
    static V set1(float a) { return _mm256_set1_ps(a); }
    static V load(const float* p) { return _mm256_loadu_ps(p); }
    static V load_first(const float* p, int n) { return _mm256_maskload_ps(p, first(n)); }
    static void store(float* p, V a) { _mm256_storeu_ps(p, a); }
    static void store_first(float* p, V a, int n) { _mm256_maskstore_ps(p, first(n), a); }
    static V add(V a, V b) { return _mm256_add_ps(a, b); }
    static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static V div(V a, V b) { return _mm256_div_ps(a, b); }
    static V max(V a, V b) { return _mm256_max_ps(a, b); }
    static V min(V a, V b) { return _mm256_min_ps(a, b); }
    static V power(V magic) {
        const __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(magic), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static float sum(V a) {
        __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        c = _mm_add_ps(c, _mm_movehl_ps(c, c));
        return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
    }
};

/// The first n values of `kBytes` bytes, zeros after them.
template <int kBytes>
__m128i load_bytes(const uint8_t* p, int n) {
    alignas(16) uint8_t bytes[16] = {};
    for (int i = 0; i < n * kBytes; ++i) bytes[i] = p[i];
    return _mm_load_si128(reinterpret_cast<const __m128i*>(bytes));
}

struct F32 : NeverPoisoned {
    static constexpr int kBytes = 4;
    static __m256 load(const uint8_t* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
    static __m256 load_first(const uint8_t* p, int n) {
        return _mm256_maskload_ps(reinterpret_cast<const float*>(p), first(n));
    }
};

struct Bf16 : NeverPoisoned {
    static constexpr int kBytes = 2;
    static __m256 widen(__m128i v) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
    }
    static __m256 load(const uint8_t* p) {
        return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static __m256 load_first(const uint8_t* p, int n) { return widen(load_bytes<2>(p, n)); }
};

struct F16 : NeverPoisoned {
    static constexpr int kBytes = 2;
    static __m256 load(const uint8_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static __m256 load_first(const uint8_t* p, int n) { return _mm256_cvtph_ps(load_bytes<2>(p, n)); }
};

/// 8 E4M3 values, times 2^-8: their bits are those of a half with a smaller exponent bias. Exact.
__m256 widen_e4m3(__m128i v) {
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(v), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<short>(0xbfff))));
}

struct F8 {
    static constexpr int kBytes = 1;
    static constexpr float kFactor = 256.0f;
    static __m256 load(const uint8_t* p) {
        return widen_e4m3(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static __m256 load_first(const uint8_t* p, int n) { return widen_e4m3(load_bytes<1>(p, n)); }
    static bool poisoned(const uint8_t* p, int64_t n) { return has_e4m3_nan(p, n); }
};

/// A chunk of one row: block b has its even elements at low + 8 b, its odd ones at high + 8 b.
struct Decoded {
    alignas(32) int8_t low[kChunk / 2];
    alignas(32) int8_t high[kChunk / 2];
    alignas(32) float scale[kChunk / 16];
};

__m128i doubled_values() { return _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12); }

void decode(const uint8_t* codes, const uint8_t* scales, int64_t count, Decoded& out) {
    const __m256i table = _mm256_broadcastsi128_si256(doubled_values());
    const __m256i mask = _mm256_set1_epi8(15);
    const int64_t bytes = count / 2;
    int64_t i = 0;
    for (; i + 32 <= bytes; i += 32) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
        const __m256i low = _mm256_and_si256(v, mask);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(v, 4), mask);
        _mm256_store_si256(reinterpret_cast<__m256i*>(out.low + i), _mm256_shuffle_epi8(table, low));
        _mm256_store_si256(reinterpret_cast<__m256i*>(out.high + i), _mm256_shuffle_epi8(table, high));
    }
    for (; i < bytes; i += 8) {
        const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
        const __m128i low = _mm_and_si128(v, _mm256_castsi256_si128(mask));
        const __m128i high = _mm_and_si128(_mm_srli_epi16(v, 4), _mm256_castsi256_si128(mask));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out.low + i), _mm_shuffle_epi8(doubled_values(), low));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(out.high + i), _mm_shuffle_epi8(doubled_values(), high));
    }
    // 2^8 that widen_e4m3 leaves out, half of it for the doubled values
    const __m256 factor = _mm256_set1_ps(128.0f);
    const int64_t blocks = count / 16;
    for (int64_t b = 0; b < blocks; b += 8) {
        const bool whole = b + 8 <= blocks;
        const __m128i v = whole ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales + b))
                                : load_bytes<1>(scales + b, static_cast<int>(blocks - b));
        _mm256_store_ps(out.scale + b, _mm256_mul_ps(widen_e4m3(v), factor));
    }
}

__m256 widen_bytes(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

struct Nvfp4Tile {
    static constexpr int kRows = 2;

    template <int R, int T>
    static void tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
        const uint8_t* codes = static_cast<const uint8_t*>(w.data) + row * w.row_bytes;
        const uint8_t* scales = static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes;
        Decoded chunk[R];
        __m256 acc[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) acc[r][t] = _mm256_setzero_ps();
        for (int64_t begin = 0; begin < k; begin += kChunk) {
            const int64_t count = k - begin < kChunk ? k - begin : kChunk;
            for (int r = 0; r < R; ++r)
                decode(codes + r * w.row_bytes + begin / 2, scales + r * w.scale_row_bytes + begin / 16,
                       count, chunk[r]);
            for (int64_t b = 0; b < count / 16; ++b) {
                for (int r = 0; r < R; ++r) {
                    const __m256 even = widen_bytes(chunk[r].low + 8 * b);
                    const __m256 odd = widen_bytes(chunk[r].high + 8 * b);
                    const __m256 scale = _mm256_broadcast_ss(chunk[r].scale + b);
                    for (int t = 0; t < T; ++t) {
                        const float* xb = x[t] + begin + 16 * b;
                        const __m256 part = _mm256_mul_ps(even, _mm256_loadu_ps(xb));
                        acc[r][t] = _mm256_fmadd_ps(_mm256_fmadd_ps(odd, _mm256_loadu_ps(xb + 8), part),
                                                    scale, acc[r][t]);
                    }
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) y[t][row + r] = Avx2::sum(acc[r][t]);
    }

    static bool poisoned(const RowBlock& w, int64_t row, int64_t k) {
        return has_e4m3_nan(static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes, k / 16);
    }
};

}  // namespace

const DotKernels& avx2_dot_kernels() {
    static constexpr DotKernels kKernels = {
        "avx2",
        run_rows<Avx2, PlainTile<Avx2, F32>>,
        run_rows<Avx2, PlainTile<Avx2, Bf16>>,
        run_rows<Avx2, PlainTile<Avx2, F16>>,
        run_rows<Avx2, PlainTile<Avx2, F8>>,
        run_rows<Avx2, BlockScaledTile<Avx2, F8>>,
        run_rows<Avx2, Nvfp4Tile>,
        pack_even_odd,
        dot_product<Avx2>,
        add_scaled<Avx2>,
        combine_rows<Avx2>,
        softmax<Avx2>,
        gelu_tanh<Avx2>,
    };
    return kKernels;
}

}  // namespace quern::cpu

#endif
