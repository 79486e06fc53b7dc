// Attention of answer rows: norm, rotary embedding, KV write, split keys, combine and gate in one kernel.
//
//   cluster = one chunk of the keys of one (row, KV head):  block 0 | block 1 | ... | block 7
//   block   = a run of 64-key tiles:  K0 V0 K1 V1 ... through a ring of three 32 KB slots
//   warp    = 16 keys of a tile, S^T[16, 8 heads] = K q^T; then 64 elements, O^T[64, 8 heads] += V^T P^T
//
// Memory: K and V of old keys once from the cache, started before the predecessor ends; keys of this step
// from the inputs. Blocks of a cluster exchange results through shared memory, those of several chunks
// through `work`. How keys are split depends on the row's position alone; how many clusters share the chunks
// depends on the number of rows, and does not show in the result.
// Limits: head_dim 256, 64 rotary dims, at most 8 query heads a KV head, 98 KB of shared memory.
#include "ggml-like/cuda/attention/decode_math.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace decode;

/// One tile, number n of the block: its copies are under way, as are those of the next tile's K; starts the
/// next V and the K after that.
__device__ __forceinline__ void attend_tile(const AttentionCall& c, const Row& row, Share& share, int n,
                                            const Query& q, const float (&k_norm)[8], const Angles& angles,
                                            Shared& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int key = share.tile * kTileKeys + warp * kWarpKeys;
    const bool fresh = key + kWarpKeys > row.fresh;
    char *k_slot = slot_of(shared, 2 * n), *v_slot = slot_of(shared, 2 * n + 1);
    if (n > 0) {
        __syncthreads();  // the last tile's V has been read
        start_ahead(c, row, share, false, slot_of(shared, 2 * n + 2));
    }
    wait_copies<2>();
    __syncwarp();
    if (fresh) finish_fresh(c, row, k_norm, angles, share.tile, false, k_slot);
    float s[4];
    score(k_slot + warp * kWarpKeys * kRowBytes, q, row.keys - key, s);
    const float2 highest{over_keys_max(fmaxf(s[0], s[2])), over_keys_max(fmaxf(s[1], s[3]))};
    if (lane < 4) shared.highest[warp][lane] = highest;
    __syncwarp();
    start_ahead(c, row, share, true, k_slot);  // over the warp's own rows of K
    step_tile(share, share.ahead, share.ahead_left);
    share.ahead_page = page_of(row, share.ahead);
    wait_copies<2>();
    if (fresh) finish_fresh(c, row, k_norm, angles, share.tile, true, v_slot);
    __syncthreads();
    raise_maximum(shared, part);
    share_probabilities(s, shared, part);
    __syncthreads();
    add_values(v_slot, shared, part);
}

/// Adds up the warps' sums: the block's maximum and sum of two heads, in threads 0 .. 3.
__device__ __forceinline__ void total(const Part& part, Shared& shared, float2 (&totals)[2]) {
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

/// The block's result: head h at values + h * row_floats, its maximum and sum at totals + h. Its barrier also
/// says that all warps are through with the ring.
__device__ __forceinline__ void leave_result(const Part& part, Shared& shared, float* values, int row_floats,
                                             float2* totals) {
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

/// Work space: every block's result of every chunk [T, G, kMaxChunks, 8].
__device__ __forceinline__ float* part_at(const AttentionCall& c, const Row& row, int chunk, int rank) {
    const int64_t unit = static_cast<int64_t>(row.t) * c.kv_heads + row.kv_head;
    return static_cast<float*>(c.work) + ((unit * kMaxChunks + chunk) * kSplitBlocks + rank) * kPartFloats;
}

/// A chunk's result of one pair of elements from its blocks' values, and maxima and sums.
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

/// The same from work space.
__device__ __forceinline__ float4 merge_parts(const AttentionCall& c, const Row& row, int chunk, int pair) {
    float2 values[kSplitBlocks], totals[kSplitBlocks];
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        const float2* from = reinterpret_cast<const float2*>(part_at(c, row, chunk, b));
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

/// A chunk's result of one pair takes the place of two blocks' values of it, which nobody else reads.
__device__ __forceinline__ void store_chunk(const AttentionCall& c, const Row& row, int chunk, int pair,
                                            float4 result) {
    reinterpret_cast<float2*>(part_at(c, row, chunk, 0))[pair] = {result.x, result.y};
    reinterpret_cast<float2*>(part_at(c, row, chunk, 1))[pair] = {result.z, result.w};
}
__device__ __forceinline__ float4 load_chunk(const AttentionCall& c, const Row& row, int chunk, int pair) {
    const float2 xy = __ldcg(reinterpret_cast<const float2*>(part_at(c, row, chunk, 0)) + pair);
    const float2 zw = __ldcg(reinterpret_cast<const float2*>(part_at(c, row, chunk, 1)) + pair);
    return {xy.x, xy.y, zw.x, zw.y};
}

/// Merges the results of chunks in order, but loads them together.
__device__ __forceinline__ float4 merge_chunks(const AttentionCall& c, const Row& row, int pair, int chunks) {
    float4 parts[kMaxChunks], all{0, 0, -INFINITY, 0};
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i)
        parts[i] = i < chunks ? load_chunk(c, row, i, pair) : float4{0, 0, -INFINITY, 0};
#pragma unroll
    for (int i = 0; i < kMaxChunks; ++i) all = merge(all, parts[i]);
    return all;
}

/// The cluster's result for one pair of elements.
__device__ __forceinline__ float4 merge_cluster(const Shared& shared, int pair) {
    float2 values[kSplitBlocks], totals[kSplitBlocks];
    const uint32_t value_at =
        shared_address(shared.ring[kSpare]) + (pair / (kDim / 2) * kOutRow + pair % (kDim / 2) * 2) * 4;
    const uint32_t total_at = shared_address(&shared.totals[pair / (kDim / 2)]);
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        totals[b] = peer_value(total_at, b);
        values[b] = peer_value(value_at, b);
    }
    return merge_blocks(values, totals);
}

#endif

CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, 2)
    attention_decode_kernel(const __grid_constant__ AttentionCall c) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    allow_successor();
    const int lane = threadIdx.x % 32;
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t];
    const int clusters = gridDim.x / kSplitBlocks, rank = blockIdx.x % kSplitBlocks;
    const int first_chunk = blockIdx.x / kSplitBlocks;
    const int chunks = min(position / kChunkKeys + 1, kMaxChunks);
    if (sequence < 0 || first_chunk >= chunks) {
        // Some block of the grid has to wait; the others make room for the successor at once.
        if (first_chunk == 0) wait_for_predecessor();
        return;
    }
    const int fresh_row = c.start[sequence];
    Row row{t,
            static_cast<int>(blockIdx.y),
            c.heads / c.kv_heads,
            position + 1,
            c.positions[fresh_row],
            fresh_row,
            c.pages + sequence * c.page_row,
            0};
    Share share = share_of(row, first_chunk, chunks, clusters);
    const int page = page_of(row, share.tile);
    start_old(c, row, share.tile, page, false, shared.ring[0], 0, kWarpKeys);
    commit_copies();
    start_old(c, row, share.tile, page, true, shared.ring[1], 0, kWarpKeys);
    commit_copies();
    const int kept = threadIdx.x < 32 ? kQueryRows : 0;  // q goes there first
    start_old(c, row, share.ahead, share.ahead_page, false, shared.ring[kSpare], kept, kWarpKeys);
    row.own_place = cache_place(c, row, page_of(row, position / kTileKeys), position);
    float q_norm[8], k_norm[8];
    Angles angles;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        q_norm[i] = c.q_norm[lane * 8 + i];
        k_norm[i] = c.k_norm[lane * 8 + i];
        angles.turns[i] = c.turns[lane % 4 * 8 + i];
    }
    wait_for_predecessor();
    start_fresh(c, row, share.tile, false, shared.ring[0]);
    start_fresh(c, row, share.tile, true, shared.ring[1]);
    Query q;
    load_query(c, row, q_norm, angles, shared, q);
    if (kept > 0) start_old(c, row, share.ahead, share.ahead_page, false, shared.ring[kSpare], 0, kept);
    start_fresh(c, row, share.ahead, false, shared.ring[kSpare]);
    commit_copies();
    if ((share.tile + 1) * kTileKeys > row.fresh)
        wait_copies<0>();  // its fresh keys came with the third group

#if __CUDA_ARCH__ >= 900
    // Each block of the cluster ends with its eighth of the output: one pair of elements a thread.
    const bool has_pair = static_cast<int>(threadIdx.x) < row.group * 16;
    const int pair = rank * row.group * 16 + (has_pair ? threadIdx.x : 0);
    const uint32_t gate = gate_pair(c, row, pair);
    const bool one_chunk = first_chunk + clusters >= chunks;
#else
    const bool one_chunk = false;
#endif
    int chunk = first_chunk;
    Part part;
    clear(part);
    for (int n = 0; chunk < chunks; chunk += clusters) {
        if (share.tile < share.tiles) {
            const int run = min(share.each, share.tiles - share.tile);
            for (int i = 0; i < run; ++i, ++n) {
                attend_tile(c, row, share, n, q, k_norm, angles, shared, part);
                step_tile(share, share.tile, share.left);
            }
        } else {
            __syncthreads();  // the last chunk's sums may still be read
        }
        if (one_chunk) break;
        float* to = part_at(c, row, chunk, rank);
        leave_result(part, shared, to, kDim, reinterpret_cast<float2*>(to + kHeads * kDim));
        clear(part);
    }

#if __CUDA_ARCH__ >= 900
    const int counted = min(clusters, chunks);
    float4 all{0, 0, -INFINITY, 0};
    if (one_chunk)
        leave_result(part, shared, reinterpret_cast<float*>(shared.ring[kSpare]), kOutRow, shared.totals);
    cluster_arrive();
    cluster_wait();
    for (chunk = first_chunk; chunk < chunks; chunk += clusters) {
        const float4 mine = one_chunk ? merge_cluster(shared, pair) : merge_parts(c, row, chunk, pair);
        if (counted == 1)
            all = merge(all, mine);
        else if (has_pair)
            store_chunk(c, row, chunk, pair, mine);
    }
    cluster_arrive();
    bool last = true;
    if (counted > 1) {
        last = last_block(c.counters + (t * c.kv_heads + row.kv_head) * kSplitBlocks + rank, counted);
        if (last) all = merge_chunks(c, row, pair, chunks);
    }
    if (last && has_pair) store_pair(c, row, pair, all, gate);
    cluster_wait();  // peers may still read this block's shared memory
#else
    unsigned* counter = c.counters + (t * c.kv_heads + row.kv_head) * kSplitBlocks;
    if (last_block(counter, min(clusters, chunks) * kSplitBlocks))
        for (int p = threadIdx.x; p < row.group * kDim / 2; p += kThreads) {
            float4 all{0, 0, -INFINITY, 0};
            for (chunk = 0; chunk < chunks; ++chunk) all = merge(all, merge_parts(c, row, chunk, p));
            store_pair(c, row, p, all, gate_pair(c, row, p));
        }
#endif
}

}  // namespace

void attention_decode(const AttentionCall& call, Context& context) {
    // Clusters that run at once, two blocks on a multiprocessor; one in sixteen does not fit the card's
    // groups.
    const int at_once = 2 * (context.sms / kSplitBlocks - 1), units = call.tokens * call.kv_heads;
    const int clusters = std::clamp(at_once / units, 1, kMaxChunks);
    static_assert(kArrivals <= kCounters);
    if (call.tokens > max_answer_rows(call.kv_heads)) unsupported("gated_attention", "so many answer rows");
    launch(context, "gated_attention decode", attention_decode_kernel,
           dim3(clusters * kSplitBlocks, call.kv_heads, call.tokens), dim3(kThreads),
           static_cast<int>(sizeof(Shared)), call);
}

}  // namespace quern::cuda::attention
