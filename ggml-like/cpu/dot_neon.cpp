// Dot kernels for AArch64, whose every CPU has NEON with FMA and half conversions.
//
// NVFP4: a table look-up turns 16 codes at a time into signed bytes (twice the value), which widen to floats.
// Activations are packed evens first in each block of 16, as a byte's low and high codes come apart.
#if defined(__aarch64__)

#include <arm_neon.h>

#include "ggml-like/cpu/dot_tiles.h"
#include "ggml-like/cpu/vector_tiles.h"

namespace quern::cpu {
namespace {

/// Eight lanes in two registers: enough independent sums for one token and one row.
struct Neon {
    struct V {
        float32x4_t low, high;
    };
    static constexpr int kLanes = 8;
    static constexpr int kMaxTokens = 4;
    static constexpr int kRows = 2;
    static constexpr int kColumns = 2;
    static constexpr int kPrefetch = 1024;

    static V once(V a) {
        asm("" : "+w"(a.low), "+w"(a.high));
        return a;
    }
    static V zero() { return set1(0.0f); }
    static V set1(float a) { return {vdupq_n_f32(a), vdupq_n_f32(a)}; }
    static V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
    static V load_first(const float* p, int n) {
        float all[8] = {};
        for (int i = 0; i < n; ++i) all[i] = p[i];
        return load(all);
    }
    static void store(float* p, V a) {
        vst1q_f32(p, a.low);
        vst1q_f32(p + 4, a.high);
    }
    static void store_first(float* p, V a, int n) {
        float all[8];
        store(all, a);
        for (int i = 0; i < n; ++i) p[i] = all[i];
    }
    static V add(V a, V b) { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
    static V mul(V a, V b) { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
    static V div(V a, V b) { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
    static V max(V a, V b) { return {vmaxq_f32(a.low, b.low), vmaxq_f32(a.high, b.high)}; }
    static V min(V a, V b) { return {vminq_f32(a.low, b.low), vminq_f32(a.high, b.high)}; }
    static V power(V magic) { return {power(magic.low), power(magic.high)}; }
    static float32x4_t power(float32x4_t magic) {
        const int32x4_t exponent = vaddq_s32(vreinterpretq_s32_f32(magic), vdupq_n_s32(127));
        return vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23));
    }
    static V fma(V a, V b, V c) {
        return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
    }
    static float sum(V a) { return vaddvq_f32(vaddq_f32(a.low, a.high)); }
};

/// The first n values of `kBytes` bytes, zeros after them, for the loads of whole vectors.
template <int kBytes>
struct Padded {
    uint8_t bytes[8 * kBytes] = {};
    Padded(const uint8_t* p, int n) {
        for (int i = 0; i < n * kBytes; ++i) bytes[i] = p[i];
    }
};

struct F32 : NeverPoisoned {
    static constexpr int kBytes = 4;
    static Neon::V load(const uint8_t* p) {
        return {vreinterpretq_f32_u8(vld1q_u8(p)), vreinterpretq_f32_u8(vld1q_u8(p + 16))};
    }
    static Neon::V load_first(const uint8_t* p, int n) { return load(Padded<kBytes>(p, n).bytes); }
};

struct Bf16 : NeverPoisoned {
    static constexpr int kBytes = 2;
    static Neon::V load(const uint8_t* p) {
        const uint16x8_t v = vreinterpretq_u16_u8(vld1q_u8(p));
        return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(v), 16)),
                vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(v), 16))};
    }
    static Neon::V load_first(const uint8_t* p, int n) { return load(Padded<kBytes>(p, n).bytes); }
};

Neon::V widen_halves(uint16x8_t v) {
    const float16x8_t halves = vreinterpretq_f16_u16(v);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}

struct F16 : NeverPoisoned {
    static constexpr int kBytes = 2;
    static Neon::V load(const uint8_t* p) { return widen_halves(vreinterpretq_u16_u8(vld1q_u8(p))); }
    static Neon::V load_first(const uint8_t* p, int n) { return load(Padded<kBytes>(p, n).bytes); }
};

/// 8 E4M3 values, times 2^-8: their bits are those of a half with a smaller exponent bias. Exact.
Neon::V widen_e4m3(uint8x8_t v) {
    const int16x8_t wide = vshlq_n_s16(vmovl_s8(vreinterpret_s8_u8(v)), 7);
    return widen_halves(vandq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0xbfff)));
}

struct F8 {
    static constexpr int kBytes = 1;
    static constexpr float kFactor = 256.0f;
    static Neon::V load(const uint8_t* p) { return widen_e4m3(vld1_u8(p)); }
    static Neon::V load_first(const uint8_t* p, int n) { return load(Padded<kBytes>(p, n).bytes); }
    static bool poisoned(const uint8_t* p, int64_t n) { return has_e4m3_nan(p, n); }
};

Neon::V widen_bytes(int8x8_t v) {
    const int16x8_t wide = vmovl_s8(v);
    return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(wide)))};
}

constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Nvfp4Tile {
    static constexpr int kRows = 2;

    /// Blocks [b, b + 8), or fewer at the end of a row: their scales, with the 2^8 that widen_e4m3 leaves out
    /// and half of that for the doubled values.
    static void scales(const uint8_t* p, int64_t count, float* out) {
        const Neon::V v = count >= 8 ? F8::load(p) : F8::load_first(p, static_cast<int>(count));
        Neon::store(out, Neon::mul(v, Neon::set1(128.0f)));
    }

    template <int R, int T>
    static void tile(const RowBlock& w, int64_t row, int64_t k, const float* const* x, float* const* y) {
        const uint8_t* codes = static_cast<const uint8_t*>(w.data) + row * w.row_bytes;
        const uint8_t* scale_rows = static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes;
        const int8x16_t table = vld1q_s8(kDoubled);
        const int64_t blocks = k / 16;
        float scale[R][8];
        Neon::V acc[R][T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) acc[r][t] = Neon::zero();
        for (int64_t b = 0; b < blocks; ++b) {
            for (int r = 0; r < R; ++r) {
                if (b % 8 == 0) scales(scale_rows + r * w.scale_row_bytes + b, blocks - b, scale[r]);
                const uint8x8_t v = vld1_u8(codes + r * w.row_bytes + 8 * b);
                const Neon::V even = widen_bytes(vqtbl1_s8(table, vand_u8(v, vdup_n_u8(15))));
                const Neon::V odd = widen_bytes(vqtbl1_s8(table, vshr_n_u8(v, 4)));
                const Neon::V factor = Neon::set1(scale[r][b % 8]);
                for (int t = 0; t < T; ++t) {
                    const float* xb = x[t] + 16 * b;
                    const Neon::V part = Neon::fma(odd, Neon::load(xb + 8), Neon::mul(even, Neon::load(xb)));
                    acc[r][t] = Neon::fma(part, factor, acc[r][t]);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) y[t][row + r] = Neon::sum(acc[r][t]);
    }

    static bool poisoned(const RowBlock& w, int64_t row, int64_t k) {
        return has_e4m3_nan(static_cast<const uint8_t*>(w.scale) + row * w.scale_row_bytes, k / 16);
    }
};

}  // namespace

const DotKernels& neon_dot_kernels() {
    static constexpr DotKernels kKernels = {
        "neon",
        run_rows<Neon, PlainTile<Neon, F32>>,
        run_rows<Neon, PlainTile<Neon, Bf16>>,
        run_rows<Neon, PlainTile<Neon, F16>>,
        run_rows<Neon, PlainTile<Neon, F8>>,
        run_rows<Neon, BlockScaledTile<Neon, F8>>,
        run_rows<Neon, Nvfp4Tile>,
        pack_even_odd,
        dot_product<Neon>,
        add_scaled<Neon>,
        combine_rows<Neon>,
        softmax<Neon>,
        gelu_tanh<Neon>,
    };
    return kKernels;
}

}  // namespace quern::cpu

#endif
