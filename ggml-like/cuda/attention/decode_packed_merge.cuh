// Attention of answer rows over packed caches: the results of a block's four warps, each over its own keys, become the block's.
//
//   room    [8 heads][64 pairs] of each warp, 4 KB, in a slot that it does not need any more: half of the elements at a time; then a
//           thread adds four warps' pairs, in order
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

/// What warps leave for each other beside values: the maximum, the sum and the middle of each head, and where values are; of the
/// block the middle, and the maximum and sum.
struct Totals {
    float ceilings[kWarps][kHeads], sums[kWarps][kHeads], middles[kWarps][kHeads];
    uint32_t rooms[kWarps];
    float middle[kHeads];
    float2 of_block[kHeads];
};

constexpr uint32_t kRoomBytes = kHeads * kDim / 2 * 4;

__device__ __forceinline__ void put_pair(uint32_t at, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

/// Stores the block's result as leave_result() of decode_merge.cuh does. `room`: the warp's kRoomBytes; a barrier has to
/// follow before it is used again.
template <class V>
__device__ __forceinline__ void leave_result(const WarpPart& part, Totals& shared, uint32_t room,
                                             float* values, int row_floats, float2* totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = 2 * (lane % 4);
    const float over_unit = over_power(part.unit);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float sum = over_keys_sum(part.sum[h]);
        float middle = 0;
        if constexpr (V::kPacking == Packing::steps) middle = over_keys_sum(part.middle[h]);
        if (lane < 4) {
            shared.ceilings[warp][head + h] = part.ceiling[h], shared.sums[warp][head + h] = sum;
            if constexpr (V::kPacking == Packing::steps) shared.middles[warp][head + h] = middle;
        }
    }
    if (lane == 0) shared.rooms[warp] = room;
    __syncthreads();
    const auto highest_of = [&](int h) {
        float highest = shared.ceilings[0][h];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) highest = fmaxf(highest, shared.ceilings[w][h]);
        return highest;
    };
    float weights[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) weights[h] = part_weight(part.ceiling[h], highest_of(head + h)) * over_unit;
    if (warp == 0 && lane < kHeads) {
        const float highest = highest_of(lane);
        float sum = 0, middle = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float weight = part_weight(shared.ceilings[w][lane], highest);
            sum = fmaf(shared.sums[w][lane], weight, sum);
            if constexpr (V::kPacking == Packing::steps)
                middle = fmaf(shared.middles[w][lane], weight, middle);
        }
        totals[lane] = {highest, sum};
        if constexpr (V::kPacking == Packing::steps) shared.middle[lane] = middle;
    }
    constexpr int kPairs = kDim / 4;  // of a head, in a room
    static_assert(kThreads == 2 * kPairs);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (half > 0) __syncthreads();
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int j = 0; j < kDim / 32; ++j) {
                const float(&o)[4] = part.o[half * kDim / 32 + j];
                put_pair(room + ((head + h) * kPairs + ((j * 8 + lane / 4) ^ head << 1)) * 8,
                         o[h] * (weights[h] * lift_of_values(V::kPacking, 0)),
                         o[h + 2] * (weights[h] * lift_of_values(V::kPacking, 1)));
            }
        __syncthreads();
        // two heads at once
        const int place = threadIdx.x % kPairs, odd = threadIdx.x / kPairs;
        float* to = values + odd * row_floats + element<V>(place % 8, half * kDim / 32 + place / 8);
#pragma unroll 2
        for (int of = 0; of < kHeads; of += 2) {
            float2 sum{0, 0};
            const uint32_t from = ((of + odd) * kPairs + (place ^ of << 1)) * 8;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float2 x = shared_at<float2>(shared.rooms[w] + from);
                sum.x += x.x, sum.y += x.y;
            }
            if constexpr (V::kPacking == Packing::steps)
                sum.x += shared.middle[of + odd], sum.y += shared.middle[of + odd];
            *reinterpret_cast<float2*>(to + of * row_floats) = sum;
        }
    }
}

}  // namespace quern::cuda::attention::decode
