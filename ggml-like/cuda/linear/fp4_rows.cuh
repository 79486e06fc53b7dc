// NVFP4 weights times few rows of BF16 on tensor cores: exact products, the block's scale meets the FP32 sum
// of its 16. A tile's chunks are 16 x 64 weights (packed.h); the 8 columns of an mma are up to kPassRows rows
// of x.
//
// Limit: about 70 instructions a warp for 16 x 64 weights, 36 of them to decode codes. (FP8 products would
// need half of them, but mma.sync with FP8 operands is made of conversions and FP16 products on sm_90.)
#pragma once

#include "ggml-like/cuda/linear/dense_shapes.h"
#include "ggml-like/cuda/pack/decode.cuh"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

// ---- activations ----

/// Two numbers of x times kActivationLift.
__device__ __forceinline__ uint32_t lifted(uint32_t v) {
    const __nv_bfloat162 p = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&v),
                                     __float2bfloat162_rn(kActivationLift<Kind::nvfp4>));
    return *reinterpret_cast<const uint32_t*>(&p);
}

/// One of them.
__device__ __forceinline__ bf16 lifted(bf16 x) {
    return __hmul(x, __float2bfloat16(kActivationLift<Kind::nvfp4>));
}

/// 16 neighbouring numbers of a row of x.
struct Fp4Block {
    uint4 first{}, second{};

    __device__ __forceinline__ void load(const bf16* from) {
        first = __ldcg(reinterpret_cast<const uint4*>(from));
        second = __ldcg(reinterpret_cast<const uint4*>(from + 8));
    }
    /// Block `block` of a row. A lane's operands of blocks 2j and 2j + 1 become 16 neighbouring bytes. kLifted: times
    /// kActivationLift.
    template <bool kLifted = true>
    __device__ __forceinline__ void store(uint8_t* row, int block) const {
        const uint32_t a[4] = {first.x, first.y, first.z, first.w},
                       b[4] = {second.x, second.y, second.z, second.w};
        uint8_t* to = row + block / 2 * 64 + block % 2 * 8;
#pragma unroll
        for (int t = 0; t < 4; ++t)
            *reinterpret_cast<uint2*>(to + 16 * t) =
                kLifted ? make_uint2(lifted(a[t]), lifted(b[t])) : make_uint2(a[t], b[t]);
    }
};

/// A warp's 256 neighbouring numbers of a row of x, eight a lane: loads and stores of whole lines, where Fp4Block has halves of
/// sectors and banks that collide.
struct Fp4Piece {
    static constexpr int kNumbers = 256, kBytes = 2 * kNumbers;
    uint4 eight{};

    __device__ __forceinline__ void load(const bf16* from) {
        eight = __ldcg(reinterpret_cast<const uint4*>(from + 8 * (threadIdx.x % 32)));
    }
    /// Times kActivationLift, as Fp4Block stores them. to: the place of the first number in its row. Whole warp.
    __device__ __forceinline__ void store(uint8_t* to) const {
        const uint32_t w[4] = {lifted(eight.x), lifted(eight.y), lifted(eight.z), lifted(eight.w)};
        const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
        // Word i of four lanes becomes 16 neighbouring bytes: four matrices of 8 x 16 bytes, turned so that rows are in
        // different banks.
        const bool one = lane & 8, two = lane & 16;
        const uint32_t v[4] = {one ? w[1] : w[0], one ? w[2] : w[1], one ? w[3] : w[2], one ? w[0] : w[3]};
        const uint8_t* row = to + lane % 8 * 64 + (lane / 8 + lane % 8 / 2) % 4 * 16;
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
            "r"(two ? v[2] : v[0]), "r"(two ? v[3] : v[1]), "r"(two ? v[0] : v[2]), "r"(two ? v[1] : v[3])
            : "memory");
#else
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint32_t*>(to + lane / 4 * 64 + 16 * i + 4 * (lane % 4)) = w[i];
#endif
    }
};

/// Where number k of a row then begins, in bytes.
__device__ __forceinline__ int fp4_place(int k) {
    return k / 32 * 64 + k % 8 / 2 * 16 + k / 16 % 2 * 8 + k / 8 % 2 * 4 + k % 2 * 2;
}

// ---- products ----

/// Four E4M3 bytes to floats.
__device__ __forceinline__ void scales_of(uint32_t bytes, float (&s)[4]) {
#if __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 p, q, a, b, c, d; .reg .b32 v, w; mov.b32 {p, q}, %4;"
        "cvt.rn.f16x2.e4m3x2 v, p; cvt.rn.f16x2.e4m3x2 w, q; mov.b32 {a, b}, v; mov.b32 {c, d}, w;"
        "cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; cvt.f32.f16 %2, c; cvt.f32.f16 %3, d; }"
        : "=f"(s[0]), "=f"(s[1]), "=f"(s[2]), "=f"(s[3])
        : "r"(bytes));
#else
    decode_scales(bytes, s);
#endif
}

/// acc[nt] += chunk times rows 8 nt to 8 nt + 7; x(nt, j): operands of the lane's row of each eight (column g
/// of B) for blocks 2j and 2j + 1. kHalf: only even columns are wanted, sums of which are acc[..][0] and
/// acc[..][2].
template <bool kHalf, int NT, typename X>
__device__ __forceinline__ void multiply_fp4(const uint8_t* chunk, X&& x, int lane, float (&acc)[NT][4]) {
    const uint4 w = *reinterpret_cast<const uint4*>(chunk + 16 * lane);
    const uint2 bytes = *reinterpret_cast<const uint2*>(chunk + 512 + 8 * (lane >> 2));
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    float low[4], high[4];  // scales of weight rows g and g + 8
    scales_of(bytes.x, low);
    scales_of(bytes.y, high);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        uint4 v[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) v[nt] = x(nt, j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int kk = 2 * j + i;
            uint32_t a[4];
            decode_nvfp4(words[2 * j], words[2 * j + 1], i, a);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                float d[4] = {};
                mma(d, a, i ? v[nt].z : v[nt].x, i ? v[nt].w : v[nt].y);
                acc[nt][0] = __fmaf_rn(low[kk], d[0], acc[nt][0]);
                acc[nt][2] = __fmaf_rn(high[kk], d[2], acc[nt][2]);
                if constexpr (!kHalf) {
                    acc[nt][1] = __fmaf_rn(low[kk], d[1], acc[nt][1]);
                    acc[nt][3] = __fmaf_rn(high[kk], d[3], acc[nt][3]);
                }
            }
        }
    }
}

/// The same for one eight of rows; `x`: the lane's row at this chunk, plus 16 t.
template <bool kHalf>
__device__ __forceinline__ void multiply_fp4(const uint8_t* chunk, const uint8_t* x, int lane,
                                             float (&acc)[4]) {
    const auto operands = [&](int, int j) { return *reinterpret_cast<const uint4*>(x + 64 * j); };
    multiply_fp4<kHalf, 1>(chunk, operands, lane, reinterpret_cast<float(&)[1][4]>(acc));
}

/// Sum of n <= kMaxSplits values in order, `step` apart; all of them are read at once.
__device__ __forceinline__ float add_in_order(int n, const float* from, int step) {
    float value[kMaxSplits];
#pragma unroll
    for (int i = 0; i < kMaxSplits; ++i) value[i] = i < n ? from[i * step] : 0.0f;
    float sum = value[0];
#pragma unroll
    for (int i = 1; i < kMaxSplits; ++i)
        if (i < n) sum += value[i];
    return sum;
}

}  // namespace quern::cuda::linear
