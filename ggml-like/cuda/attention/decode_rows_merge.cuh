// Attention of several answer rows of a sequence: the results of blocks and chunks become y, as in decode_merge.cuh, with the
// same bits; a thread has four elements of a head for one or two rows, so that a block's threads have an eighth of all rows.
#pragma once

#include "ggml-like/cuda/attention/decode_merge.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

/// A result for four elements of a head, not yet divided by the sum.
struct Quad {
    float4 value{0, 0, 0, 0};
    float maximum = -INFINITY, sum = 0;
};
constexpr int kHeadQuads = kDim / 4;

/// v f + sum
__device__ __forceinline__ float4 scaled_onto(float4 v, float f, float4 sum) {
    return {fmaf(v.x, f, sum.x), fmaf(v.y, f, sum.y), fmaf(v.z, f, sum.z), fmaf(v.w, f, sum.w)};
}

/// merge() of two results.
__device__ __forceinline__ void merge(Quad& all, const Quad& part) {
    const float highest = fmaxf(all.maximum, part.maximum);
    const float wa = part_weight(all.maximum, highest), wb = part_weight(part.maximum, highest);
    const float4 v = all.value;
    all.value = scaled_onto(part.value, wb,
                            {__fmul_rn(v.x, wa), __fmul_rn(v.y, wa), __fmul_rn(v.z, wa), __fmul_rn(v.w, wa)});
    all.maximum = highest;
    all.sum = fmaf(part.sum, wb, __fmul_rn(all.sum, wa));
}

/// merge_blocks() of what `values` and `totals` return for a block: values; {maximum, sum}.
template <class V, class T>
__device__ __forceinline__ Quad merge_quads(const V& values, const T& totals) {
    float2 total[kSplitBlocks];
    float4 value[kSplitBlocks];
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) total[b] = totals(b), value[b] = values(b);
    Quad all;
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) all.maximum = fmaxf(all.maximum, total[b].x);
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        const float f = part_weight(total[b].x, all.maximum);
        all.value = scaled_onto(value[b], f, all.value);
        all.sum = fmaf(total[b].y, f, all.sum);
    }
    return all;
}

/// A chunk's blocks, from work space.
__device__ __forceinline__ Quad quad_of_parts(const AttentionCall& c, const Row& row, int chunk, int quad) {
    const float* from = part_at<kMaxChunks>(c, row, chunk, 0);
    return merge_quads(
        [&](int b) { return __ldcg(reinterpret_cast<const float4*>(from + b * kPartFloats) + quad); },
        [&](int b) {
            const float* totals = from + b * kPartFloats + kHeads * kDim;
            return __ldcg(reinterpret_cast<const float2*>(totals) + quad / kHeadQuads);
        });
}

__device__ __forceinline__ uint2 gate_quad(const AttentionCall& c, const Row& row, int quad) {
    return *reinterpret_cast<const uint2*>(c.gate.at(row.t, row.kv_head * row.group + quad / kHeadQuads) +
                                           quad % kHeadQuads * 4);
}

__device__ __forceinline__ void store_quad(const AttentionCall& c, const Row& row, int quad, const Quad& all,
                                           const uint2& gate) {
    bf16* y = c.y + (static_cast<int64_t>(row.t) * c.heads + row.kv_head * row.group) * kDim + 4 * quad;
    *reinterpret_cast<uint2*>(y) = {gated_pair({all.value.x, all.value.y, all.maximum, all.sum}, gate.x),
                                    gated_pair({all.value.z, all.value.w, all.maximum, all.sum}, gate.y)};
}

#if __CUDA_ARCH__ >= 900

/// The cluster's chunk, from the shared memory of its blocks.
__device__ __forceinline__ Quad quad_of_cluster(const float* values_of, const float2* totals_of, int quad) {
    const int head = quad / kHeadQuads;
    const uint32_t values = shared_address(values_of + head * kOutRow + quad % kHeadQuads * 4);
    const uint32_t totals = shared_address(totals_of + head);
    return merge_quads([&](int b) { return load_of_block(values, b); },
                       [&](int b) { return peer_value(totals, b); });
}

/// A chunk's result: overwrites two blocks' values of the same elements, which only this thread reads.
__device__ __forceinline__ void leave_chunk(const AttentionCall& c, const Row& row, int chunk, int quad,
                                            const Quad& all) {
    float* to = part_at<kMaxChunks>(c, row, chunk, 0) + 4 * quad;
    *reinterpret_cast<float4*>(to) = all.value;
    *reinterpret_cast<float2*>(to + kPartFloats) = {all.maximum, all.sum};
}

/// The chunks' results, merged in order.
__device__ __forceinline__ Quad quad_of_chunks(const AttentionCall& c, const Row& row, int quad, int chunks) {
    const float* from = part_at<kMaxChunks>(c, row, 0, 0) + 4 * quad;
    Quad parts[kMaxChunks], all;
#pragma unroll
    for (int k = 0; k < kMaxChunks; ++k, from += kSplitBlocks * kPartFloats) {
        if (k >= chunks) continue;
        parts[k].value = __ldcg(reinterpret_cast<const float4*>(from));
        const float2 total = __ldcg(reinterpret_cast<const float2*>(from + kPartFloats));
        parts[k].maximum = total.x, parts[k].sum = total.y;
    }
#pragma unroll
    for (int k = 0; k < kMaxChunks; ++k) merge(all, parts[k]);
    return all;
}

#endif

}  // namespace quern::cuda::attention::decode
