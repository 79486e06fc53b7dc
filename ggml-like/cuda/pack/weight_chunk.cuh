// Packed weights as A fragments with their block scales multiplied in, for the tiled products (packed.h has the
// layout).
#pragma once

#include "ggml-like/cuda/pack/decode.cuh"

namespace quern::cuda::pack {

using namespace ptx;

/// Times a row's factor, which holds kSumLift: the factor of sums over these fragments.
template <Kind K>
constexpr float kRowLift = K == Kind::nvfp4 ? 0x1p14f / kSumLift<K> : 1.0f / kSumLift<K>;

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    const __nv_bfloat162 v =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(v);
}

/// Both halves of a times one half of s. Written so that ptxas makes one instruction of it, which __byte_perm does not.
template <bool kUpper>
__device__ __forceinline__ uint32_t times_half(uint32_t a, uint32_t s) {
    uint32_t both;
    if constexpr (kUpper)
        asm("{ .reg .b16 l, u; mov.b32 {l, u}, %1; mov.b32 %0, {u, u}; }" : "=r"(both) : "r"(s));
    else
        asm("{ .reg .b16 l, u; mov.b32 {l, u}, %1; mov.b32 %0, {l, l}; }" : "=r"(both) : "r"(s));
    return times(a, both);
}

/// Four E4M3 scales, not negative, as BF16, times 2^112. A zero may become 2^97: the codes under it are zeros (packed.h).
__device__ __forceinline__ void lifted_scales(uint32_t bytes, uint32_t (&scale)[2]) {
#if __CUDA_ARCH__ >= 890
    // As FP16 all but zero are normal numbers, whose five bits of exponent become the low ones of BF16's; the high ones are set. Written out,
    // as `(v & m) | h` becomes two instructions.
    asm("{ .reg .b16 p, q; .reg .b32 v, w; mov.b32 {p, q}, %2;"
        "cvt.rn.f16x2.e4m3x2 v, p; cvt.rn.f16x2.e4m3x2 w, q; shr.u32 v, v, 3; shr.u32 w, w, 3;"
        "lop3.b32 %0, v, %3, %4, 0xea; lop3.b32 %1, w, %3, %4, 0xea; }"
        : "=&r"(scale[0]), "=&r"(scale[1])
        : "r"(bytes), "r"(0x0ff00ff0u), "r"(0x70007000u));
#else
    // E4M3's bits at BF16's place are too small by 2^120; factors of 2^119 and 2^113 make up for that. They are right for subnormals, too.
    const uint32_t even = times(times((bytes << 4) & 0x07f007f0u, 0x7b007b00u), 0x78007800u),
                   odd = times(times((bytes >> 4) & 0x07f007f0u, 0x7b007b00u), 0x78007800u);
    scale[0] = __byte_perm(even, odd, 0x5410), scale[1] = __byte_perm(even, odd, 0x7632);
#endif
}

/// A lane's part of one tile's chunk, and the A fragments of its four blocks of 16 columns.
template <Kind K>
struct WeightChunk;

template <>
struct WeightChunk<Kind::bf16> {
    const uint8_t* lane_data;
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) { lane_data = chunk + lane * 16; }
    __device__ __forceinline__ void fragment(int kk, uint32_t (&a)[4]) const {
        const uint4 v = *reinterpret_cast<const uint4*>(lane_data + kk * 512);
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};

template <>
struct WeightChunk<Kind::fp8> {
    const uint8_t* lane_data;
    float scale[2];
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        lane_data = chunk + lane * 16;
        const float2 s = *reinterpret_cast<const float2*>(chunk + 1024);
        scale[0] = s.x, scale[1] = s.y;
    }
    __device__ __forceinline__ void fragment(int kk, uint32_t (&a)[4]) const {
        const uint2 v = *reinterpret_cast<const uint2*>(lane_data + kk / 2 * 512 + kk % 2 * 8);
        decode_fp8(v.x, v.y, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = times(a[i], 0x7b807b80u);  // 2^120
    }
};

template <>
struct WeightChunk<Kind::nvfp4> {
    uint4 codes;
    uint32_t scale[2][2];  // of row g + 8r, blocks 2i and 2i + 1
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        codes = *reinterpret_cast<const uint4*>(chunk + lane * 16);
        const uint2 s = *reinterpret_cast<const uint2*>(chunk + 512 + lane / 4 * 8);
        lifted_scales(s.x, scale[0]);
        lifted_scales(s.y, scale[1]);
    }
    /// Weight * scale * 2^-14: 2 x 4 significant bits, exact.
    __device__ __forceinline__ void fragment(int kk, uint32_t (&a)[4]) const {
        decode_nvfp4(kk < 2 ? codes.x : codes.z, kk < 2 ? codes.y : codes.w, kk & 1, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t s = scale[i & 1][kk / 2];
            a[i] = kk % 2 == 0 ? times_half<false>(a[i], s) : times_half<true>(a[i], s);
        }
    }
};

}  // namespace quern::cuda::pack
