// Answer rows: the convolution of a channel, the journal, and S.
#pragma once

#include "ggml-like/cuda/delta/delta.h"
#include "ggml-like/cuda/delta/rule.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kDim = 128, kTaps = 4, kBlock = 256, kWarps = kBlock / 32;
static_assert(kBlock == 2 * kDim, "a thread a channel of q and k");

/// The convolution of one channel: window and taps are loaded before the wait for the predecessor, inputs come after
/// it. The window stays as it was loaded until it is used: nothing waits for it before.
struct Channel {
    uint16_t past[kTaps - 1];  // BF16
    float4 taps;

    __device__ __forceinline__ void early(const DeltaStep& d, int channel, int64_t slot, int position,
                                          int place, int channels) {
        const auto* ring = static_cast<const uint16_t*>(d.conv_state) + slot * d.ring * channels + channel;
        taps = *reinterpret_cast<const float4*>(d.conv + channel * kTaps);
#pragma unroll
        for (int j = 0; j < kTaps - 1; ++j) {
            const int before = kTaps - 1 - j, p = place >= before ? place - before : place - before + d.ring;
            past[j] = position >= before ? ring[static_cast<int64_t>(p) * channels] : uint16_t{};
        }
    }
    /// The sum over the window and `now`; then `now` belongs to the window.
    __device__ __forceinline__ float sum_next(uint16_t now) {
        const float sum = fmaf(taps.w, as_float(now),
                               fmaf(taps.z, as_float(past[2]),
                                    fmaf(taps.y, as_float(past[1]), __fmul_rn(taps.x, as_float(past[0])))));
        past[0] = past[1], past[1] = past[2], past[2] = now;
        return sum;
    }
    /// SiLU of that sum, rounded to BF16 as x in memory is.
    __device__ __forceinline__ float next(uint16_t now) {
        const float sum = sum_next(now);
        return __bfloat162float(__float2bfloat16(sum / (1.0f + __expf(-sum))));
    }
};

__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
    for (int d = 8; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

__device__ __forceinline__ float dot(const float4& a, const float4& b) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, __fmul_rn(a.x, b.x))));
}
__device__ __forceinline__ float4 advance4(const float4& s, float decay, float u, const float4& k) {
    return {advance(s.x, decay, u, k.x), advance(s.y, decay, u, k.y), advance(s.z, decay, u, k.z),
            advance(s.w, decay, u, k.w)};
}

__device__ __forceinline__ float4 load4(const float* shared, int at) {
    return *reinterpret_cast<const float4*>(shared + at);
}
__device__ __forceinline__ float4 scaled4(const float* shared, int at, float by) {
    const float4 x = load4(shared, at);
    return {__fmul_rn(x.x, by), __fmul_rn(x.y, by), __fmul_rn(x.z, by), __fmul_rn(x.w, by)};
}

/// The journal of one sequence's value head.
struct Entries {
    float *k, *u, *g;  // of entry 0
    int k_step, u_step, g_step;
    int committed;
    bool journaling;

    __device__ __forceinline__ Entries(const DeltaStep& d, int sequence, int64_t slot, int key_head, int head)
        : k_step(d.key_heads * kDim), u_step(d.value_heads * kDim), g_step(d.value_heads) {
        const DeltaJournal& j = d.journal;
        const bool any = j.k != nullptr;
        const int64_t first = slot * j.entries;
        committed = any ? j.committed[sequence] : 0;
        journaling = any && j.journals(sequence);
        k = j.k + first * k_step + key_head * kDim;
        u = j.u + first * u_step + head * kDim;
        g = j.g + first * g_step + head;
    }
};

/// The lane's part of kPasses rows of S, two rows apart, since the warp's halves have every other row.
__device__ __forceinline__ int state_place(int i, int h) { return 2 * i * kDim + 64 * h; }

template <int kPasses>
struct StateRows {
    float4 s[kPasses][2];

    /// zero: S is zeros, whatever lies there.
    __device__ __forceinline__ void load(const float* from, bool zero) {
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) s[i][h] = zero ? float4{} : load4(from, state_place(i, h));
    }
    __device__ __forceinline__ void store(float* to) const {
#pragma unroll
        for (int i = 0; i < kPasses; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h) *reinterpret_cast<float4*>(to + state_place(i, h)) = s[i][h];
    }
    /// Applies the committed entries in order.
    __device__ __forceinline__ void commit(const Entries& entries, int first, int l) {
#pragma unroll 1
        for (int e = 0; e < entries.committed; ++e) {
            const float* k = entries.k + e * entries.k_step;
            const float* u = entries.u + e * entries.u_step + first;
            const float decay = decay_of(entries.g[e * entries.g_step]);
            const float4 k0 = load4(k, 4 * l), k1 = load4(k, 64 + 4 * l);
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                s[i][0] = advance4(s[i][0], decay, u[2 * i], k0);
                s[i][1] = advance4(s[i][1], decay, u[2 * i], k1);
            }
        }
    }
};

/// Applies the journal's committed entries to a lane's kPasses rows of S, in memory, before copies of them are asked for: only the first
/// step after drafts has any.
template <int kPasses>
__device__ __forceinline__ void commit_in_memory(const Entries& entries, float* state, int first, int l) {
#pragma unroll 1
    for (int i = 0; i < kPasses; ++i) {
        StateRows<1> row;
        row.load(state + state_place(i, 0), false);
        row.commit(entries, first + 2 * i, l);
        row.store(state + state_place(i, 0));
    }
    __threadfence();
}

}  // namespace quern::cuda::delta
