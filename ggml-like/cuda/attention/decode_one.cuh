// Attention of one answer row by a cluster of eight blocks, as decode.cu describes it.
#pragma once

#include "ggml-like/cuda/attention/decode_merge.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

/// Tile n of the block. Its copies are under way, and so are those of the next tile's K; starts the copies of the next
/// tile's V and of the K after that.
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
    if (lane < 4) shared.exchange.highest[warp][lane] = highest;
    __syncwarp();
    start_ahead(c, row, share, true, k_slot);  // over the rows of K that this warp alone has read
    step_tile(share, share.ahead, share.ahead_left);
    share.ahead_page = page_of(row, share.ahead);
    wait_copies<2>();
    if (fresh) finish_fresh(c, row, k_norm, angles, share.tile, true, v_slot);
    __syncthreads();
    raise_maximum(shared.exchange, part);
    share_probabilities(s, shared.exchange, part);
    __syncthreads();
    add_values(v_slot, shared.exchange, part);
}

/// y of row t. This cluster attends chunks first_chunk, first_chunk + clusters, ... of its `chunks`. As in decode.cu, line by line.
__device__ __forceinline__ void attend_row(const AttentionCall& c, int t, int sequence, int position,
                                           int first_chunk, int chunks, int clusters, Shared& shared) {
    const int lane = threadIdx.x % 32, rank = blockIdx.x % kSplitBlocks;
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
    const int kept = threadIdx.x < 32 ? kQueryRows : 0;  // these rows of the slot take q first
    start_old(c, row, share.ahead, share.ahead_page, false, shared.ring[kSpare], kept, kWarpKeys);
    // rows of answers are text, whose three axes are equal, and as far behind as the sequence's other rows of the step
    if (c.rope != nullptr) row.shift = c.rope[t] - position;
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
        wait_copies<0>();  // its fresh keys came with the third group of copies

    const Ending end(c, row, first_chunk, chunks, clusters);
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
            __syncthreads();  // the sums of the chunk before may still be read
        }
        if (end.one_chunk) break;
        float* to = part_at<kMaxChunks>(c, row, chunk, rank);
        leave_result(part, shared.exchange, to, kDim, reinterpret_cast<float2*>(to + kHeads * kDim));
        clear(part);
    }
    float* values = reinterpret_cast<float*>(shared.ring[kSpare]);
    store_row<kMaxChunks>(c, row, end, values, shared.exchange.totals, [&] {
        leave_result(part, shared.exchange, values, kOutRow, shared.exchange.totals);
    });
}

}  // namespace quern::cuda::attention::decode
