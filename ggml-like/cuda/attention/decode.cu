// Attention of answer rows: norm, rotation, KV write, attention over split keys, and the output gate, in one kernel.
//
//   grid      clusters of 8 blocks: (cluster, KV head, row)
//
//     cluster   a chunk of a row's keys    | block 0 | block 1 | ... | block 7 |    and further chunks, if the row has
//     block     a run of 64-key tiles      K0 V0 K1 V1 ...                          more than the grid has clusters
//     warp      16 keys of a tile          S^T[16 keys, 8 heads] = K q^T
//               then 64 of d               O^T[64, 8 heads] += V^T P^T
//
//   end       a block of the cluster has an eighth of the heads' elements: it reads all eight blocks' results of these,
//             merges them, and, after the results of all chunks, gates and stores them
//
// Shared memory (decode_keys.cuh, 98 KB, so two blocks an SM): a ring of three slots, each a tile of K or of V (32 KB);
// probabilities. The third slot first takes q, at the end the block's result. Blocks of a cluster read each other's
// results from shared memory; results of several chunks go through `work`, and the last block to come merges them.
//
// A row's bits depend on its position and keys alone: chunks follow from the position; how many clusters share the
// chunks follows from the number of rows, and does not change the order of merging.
//
// K and V are read once; the copies of keys of earlier steps start before the predecessor ends. Bound: latency, at a
// few thousand keys. Measured: 7.2 us for 8 rows with launch gap, where the bytes take 0.4 us (H200, 2026-11).
// Limits: head_dim 256, 64 rotary dims, at most 8 query heads a KV head.
#include "ggml-like/cuda/attention/decode_one.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace decode;

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
        // The grid must not end before its predecessor, so some block has to wait; the others make room at once.
        if (first_chunk == 0) wait_for_predecessor();
        return;
    }
    // From here on attend_row (decode_one.cuh), written out: as a function it gets other registers, and a step of one row is 0.5 %
    // slower (H200).
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

}  // namespace

void attention_decode(const AttentionCall& call, Context& context) {
    // Clusters that run at once, two blocks an SM; one in sixteen does not fit into the card's groups of SMs.
    const int at_once = 2 * (context.sms / kSplitBlocks - 1), units = call.tokens * call.kv_heads;
    // Of units that cannot have two at once, clusters come one after the other: the shorter their work, the less the last leave idle.
    constexpr int kInTurn = 4;
    const int clusters = 2 * units > at_once ? kInTurn : std::min(at_once / units, kMaxChunks);
    static_assert(kArrivals <= kCounters);
    if (call.tokens > max_answer_rows(call.kv_heads)) unsupported("gated_attention", "so many answer rows");
    launch(context, "gated_attention decode", attention_decode_kernel,
           dim3(clusters * kSplitBlocks, call.kv_heads, call.tokens), dim3(kThreads),
           static_cast<int>(sizeof(Shared)), call);
}

}  // namespace quern::cuda::attention
