// Attention of answer rows: the results of warps, blocks and chunks become y.
//
// A result is, for each pair of elements, values not yet divided by the sum, and for each head the maximum of its
// scores and the sum of its exponentials. Merging runs in the order of blocks, then of chunks.
#pragma once

#include "ggml-like/cuda/attention/decode_math.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

/// The block's maximum and sum of the lane's two heads: the warps' sums, added in order.
__device__ __forceinline__ void total(const Part& part, Exchange& shared, float2 (&totals)[2]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float2 own{over_keys_sum(part.sum[0]), over_keys_sum(part.sum[1])};
    if (lane < 4) shared.sums[warp][lane] = own;
    __syncthreads();
    float2 sum{0, 0};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum.x += shared.sums[w][lane % 4].x, sum.y += shared.sums[w][lane % 4].y;
    totals[0] = {part.maximum[0], sum.x};
    totals[1] = {part.maximum[1], sum.y};
}

/// Stores the block's result: head h at values + h * row_floats, its maximum and sum at totals + h. `values` may lie in
/// the ring: a barrier inside comes after all warps' reads of it.
__device__ __forceinline__ void leave_result(const Part& part, Exchange& shared, float* values,
                                             int row_floats, float2* totals) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = 2 * (lane % 4);
    float2 own[2];
    total(part, shared, own);
    float* to = values + head * row_floats + warp * kWarpDims + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < kWarpDims / 16; ++j) {
            to[h * row_floats + 16 * j] = part.o[j][h];
            to[h * row_floats + 16 * j + 8] = part.o[j][h + 2];
        }
    if (threadIdx.x < 4) totals[head] = own[0], totals[head + 1] = own[1];
}

/// Work space: [T, G, kChunks, 8] block results.
template <int kChunks>
__device__ __forceinline__ float* part_at(const AttentionCall& c, const Row& row, int chunk, int rank) {
    const int64_t unit = static_cast<int64_t>(row.t) * c.kv_heads + row.kv_head;
    return static_cast<float*>(c.work) + ((unit * kChunks + chunk) * kSplitBlocks + rank) * kPartFloats;
}

/// A chunk's result for one pair of elements; of each of its blocks: values, {maximum, sum}.
__device__ __forceinline__ float4 merge_blocks(const float2 (&values)[kSplitBlocks],
                                               const float2 (&totals)[kSplitBlocks]) {
    float4 all{0, 0, -INFINITY, 0};
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) all.z = fmaxf(all.z, totals[b].x);
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        const float f = part_weight(totals[b].x, all.z);
        all.x = fmaf(values[b].x, f, all.x);
        all.y = fmaf(values[b].y, f, all.y);
        all.w = fmaf(totals[b].y, f, all.w);
    }
    return all;
}

/// The same, read from work space.
template <int kChunks>
__device__ __forceinline__ float4 merge_parts(const AttentionCall& c, const Row& row, int chunk, int pair) {
    float2 values[kSplitBlocks], totals[kSplitBlocks];
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        const float2* from = reinterpret_cast<const float2*>(part_at<kChunks>(c, row, chunk, b));
        values[b] = __ldcg(from + pair);
        totals[b] = __ldcg(from + kHeads * kDim / 2 + pair / (kDim / 2));
    }
    return merge_blocks(values, totals);
}

__device__ __forceinline__ uint32_t gate_pair(const AttentionCall& c, const Row& row, int pair) {
    const bf16* from = c.gate.at(row.t, row.kv_head * row.group + pair / (kDim / 2)) + pair % (kDim / 2) * 2;
    return *reinterpret_cast<const uint32_t*>(from);
}

__device__ __forceinline__ void store_pair(const AttentionCall& c, const Row& row, int pair, float4 part,
                                           uint32_t gate) {
    bf16* y = c.y + (static_cast<int64_t>(row.t) * c.heads + row.kv_head * row.group) * kDim + 2 * pair;
    *reinterpret_cast<uint32_t*>(y) = gated_pair(part, gate);
}

#if __CUDA_ARCH__ >= 900

/// A chunk's result for a pair: overwrites two blocks' values of the same pair, which only this thread reads.
template <int kChunks>
__device__ __forceinline__ void store_chunk(const AttentionCall& c, const Row& row, int chunk, int pair,
                                            float4 result) {
    reinterpret_cast<float2*>(part_at<kChunks>(c, row, chunk, 0))[pair] = {result.x, result.y};
    reinterpret_cast<float2*>(part_at<kChunks>(c, row, chunk, 1))[pair] = {result.z, result.w};
}
template <int kChunks>
__device__ __forceinline__ float4 load_chunk(const AttentionCall& c, const Row& row, int chunk, int pair) {
    const float2 xy = __ldcg(reinterpret_cast<const float2*>(part_at<kChunks>(c, row, chunk, 0)) + pair);
    const float2 zw = __ldcg(reinterpret_cast<const float2*>(part_at<kChunks>(c, row, chunk, 1)) + pair);
    return {xy.x, xy.y, zw.x, zw.y};
}

/// Merges the chunks' results in order. kMaxChunks are loaded at once: all 21 of packed caches take so much code that it is slower.
template <int kChunks>
__device__ __forceinline__ float4 merge_chunks(const AttentionCall& c, const Row& row, int pair, int chunks) {
    float4 parts[kMaxChunks], all{0, 0, -INFINITY, 0};
#pragma unroll 1
    for (int first = 0; first < kChunks && (kChunks == kMaxChunks || first < chunks); first += kMaxChunks) {
#pragma unroll
        for (int i = 0; i < kMaxChunks; ++i)
            parts[i] = first + i < chunks ? load_chunk<kChunks>(c, row, first + i, pair)
                                          : float4{0, 0, -INFINITY, 0};
#pragma unroll
        for (int i = 0; i < kMaxChunks; ++i) all = merge(all, parts[i]);
    }
    return all;
}

/// The cluster's result for one pair of elements, from the shared memory of its blocks.
__device__ __forceinline__ float4 merge_cluster(const float* values_of, const float2* totals_of, int pair) {
    float2 values[kSplitBlocks], totals[kSplitBlocks];
    const uint32_t value_at =
        shared_address(values_of) + (pair / (kDim / 2) * kOutRow + pair % (kDim / 2) * 2) * 4;
    const uint32_t total_at = shared_address(totals_of + pair / (kDim / 2));
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        totals[b] = peer_value(total_at, b);
        values[b] = peer_value(value_at, b);
    }
    return merge_blocks(values, totals);
}

#endif

/// How a row's chunks are shared, and what a thread stores of it: a pair of elements of the block's eighth.
struct Ending {
    int first_chunk, clusters, chunks, rank;
    bool one_chunk;  // of this cluster; its result then lies in shared memory
    bool has_pair = false;
    int pair = 0;
    uint32_t gate = 0;

    __device__ __forceinline__ Ending(const AttentionCall& c, const Row& row, int first, int count,
                                      int sharing)
        : first_chunk(first),
          clusters(sharing),
          chunks(count),
          rank(blockIdx.x % kSplitBlocks),
          one_chunk(false) {
#if __CUDA_ARCH__ >= 900
        has_pair = static_cast<int>(threadIdx.x) < row.group * 16;
        pair = rank * row.group * 16 + (has_pair ? threadIdx.x : 0);
        gate = gate_pair(c, row, pair);
        one_chunk = first_chunk + clusters >= chunks;
#endif
    }
};

/// y of the row, once all blocks have left their results: in work space, or where one_chunk in shared memory, by `leave` if not
/// before.
template <int kChunks, class F>
__device__ __forceinline__ void store_row(const AttentionCall& c, const Row& row, const Ending& end,
                                          const float* values, const float2* totals, const F& leave) {
    const int unit = row.t * c.kv_heads + row.kv_head;
#if __CUDA_ARCH__ >= 900
    const int counted = min(end.clusters, end.chunks);
    float4 all{0, 0, -INFINITY, 0};
    if (end.one_chunk) leave();
    cluster_arrive();
    cluster_wait();
    for (int chunk = end.first_chunk; chunk < end.chunks; chunk += end.clusters) {
        const float4 mine = end.one_chunk ? merge_cluster(values, totals, end.pair)
                                          : merge_parts<kChunks>(c, row, chunk, end.pair);
        if (counted == 1)
            all = merge(all, mine);
        else if (end.has_pair)
            store_chunk<kChunks>(c, row, chunk, end.pair, mine);
    }
    cluster_arrive();
    bool last = true;
    if (counted > 1) {
        last = last_block(c.counters + unit * kSplitBlocks + end.rank, counted);
        if (last) all = merge_chunks<kChunks>(c, row, end.pair, end.chunks);
    }
    if (last && end.has_pair) store_pair(c, row, end.pair, all, end.gate);
    cluster_wait();  // peers may still read this block's shared memory
#else
    if (last_block(c.counters + unit * kSplitBlocks, min(end.clusters, end.chunks) * kSplitBlocks))
        for (int p = threadIdx.x; p < row.group * kDim / 2; p += kThreads) {
            float4 all{0, 0, -INFINITY, 0};
            for (int chunk = 0; chunk < end.chunks; ++chunk)
                all = merge(all, merge_parts<kChunks>(c, row, chunk, p));
            store_pair(c, row, p, all, gate_pair(c, row, p));
        }
#endif
}

}  // namespace quern::cuda::attention::decode
