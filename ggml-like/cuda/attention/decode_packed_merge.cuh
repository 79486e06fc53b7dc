// Attention of answer rows over packed caches: the results of a block's four warps, each over its own keys, become the block's.
//
//   room    [4 warps][8 heads][64 pairs], 16 KB: half of the elements at a time; then a thread adds four warps' pairs, in order
#pragma once

#include "ggml-like/cuda/attention/decode_merge.cuh"
#include "ggml-like/cuda/attention/decode_packed.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

/// The element that WarpPart::o[j] has in lanes 4g to 4g + 3 for row g of its product; the next one is that of row g + 8.
template <class V>
__device__ __forceinline__ constexpr int element(int g, int j) {
    if constexpr (V::kPacking == Packing::fp8) return 16 * j + 2 * g;
    if constexpr (V::kPacking == Packing::nvfp4) return 32 * g + 2 * j;
    return 32 * (j / 2) + 4 * g + 2 * (j % 2);
}

/// What warps leave for each other beside values; the block's maximum and sum of each head.
struct Totals {
    float ceilings[kWarps][kHeads], sums[kWarps][kHeads], middles[kWarps][kHeads];
    float2 of_block[kHeads];
};

/// Stores the block's result as leave_result() does. `room` may be what warps have read until now; a barrier has to follow before
/// it is used again.
template <class V>
__device__ __forceinline__ void leave_result(const WarpPart& part, Totals& shared, char* room, float* values,
                                             int row_floats, float2* totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = 2 * (lane % 4);
    float sums[2], middles[2] = {0, 0}, weights[2];
    const float over_unit = over_power(part.unit);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        sums[h] = over_keys_sum(part.sum[h]);
        if constexpr (V::kPacking == Packing::steps) middles[h] = over_keys_sum(part.middle[h]);
        if (lane < 4) shared.ceilings[warp][head + h] = part.ceiling[h];
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float highest = -INFINITY;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, shared.ceilings[w][head + h]);
        weights[h] = part_weight(part.ceiling[h], highest);
        if (lane < 4) {
            shared.sums[warp][head + h] = sums[h] * weights[h];
            if constexpr (V::kPacking == Packing::steps)
                shared.middles[warp][head + h] = middles[h] * weights[h];
            if (warp == 0) shared.of_block[head + h].x = highest;
        }
        weights[h] *= over_unit;
    }
    constexpr int kPairs = kDim / 4;  // of a head, in the room
    static_assert(kThreads == 2 * kPairs);
    auto* pairs = reinterpret_cast<float2*>(room);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half > 0) __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kDim / 32; ++j) {
                const float(&o)[4] = part.o[half * kDim / 32 + j];
                pairs[(warp * kHeads + head + h) * kPairs + ((j * 8 + lane / 4) ^ head << 1)] = {
                    o[h] * (weights[h] * lift_of_values(V::kPacking, 0)),
                    o[h + 2] * (weights[h] * lift_of_values(V::kPacking, 1))};
            }
        __syncthreads();
        // two heads at once
        const int place = threadIdx.x % kPairs, odd = threadIdx.x / kPairs;
        float* to = values + odd * row_floats + element<V>(place % 8, half * kDim / 32 + place / 8);
#pragma unroll 2
        for (int of = 0; of < kHeads; of += 2) {
            float2 sum{0, 0};
            float middle = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float2 x = pairs[(w * kHeads + of + odd) * kPairs + (place ^ of << 1)];
                sum.x += x.x, sum.y += x.y;
                if constexpr (V::kPacking == Packing::steps) middle += shared.middles[w][of + odd];
            }
            *reinterpret_cast<float2*>(to + of * row_floats) = {sum.x + middle, sum.y + middle};
        }
    }
    if (threadIdx.x < kHeads) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += shared.sums[w][threadIdx.x];
        totals[threadIdx.x] = {shared.of_block[threadIdx.x].x, sum};
    }
}

}  // namespace quern::cuda::attention::decode
