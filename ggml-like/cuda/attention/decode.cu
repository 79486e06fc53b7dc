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
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t];
    const int clusters = gridDim.x / kSplitBlocks, first_chunk = blockIdx.x / kSplitBlocks;
    const int chunks = min(position / kChunkKeys + 1, kMaxChunks);
    if (sequence < 0 || first_chunk >= chunks) {
        // The grid must not end before its predecessor, so some block has to wait; the others make room at once.
        if (first_chunk == 0) wait_for_predecessor();
        return;
    }
    attend_row(c, t, sequence, position, first_chunk, chunks, clusters, shared);
}

}  // namespace

void attention_decode(const AttentionCall& call, Context& context) {
    // Clusters that run at once, two blocks an SM; one in sixteen does not fit into the card's groups of SMs.
    const int at_once = 2 * (context.sms / kSplitBlocks - 1), units = call.tokens * call.kv_heads;
    const int clusters = std::clamp(at_once / units, 1, kMaxChunks);
    static_assert(kArrivals <= kCounters);
    if (call.tokens > max_answer_rows(call.kv_heads)) unsupported("gated_attention", "so many answer rows");
    launch(context, "gated_attention decode", attention_decode_kernel,
           dim3(clusters * kSplitBlocks, call.kv_heads, call.tokens), dim3(kThreads),
           static_cast<int>(sizeof(Shared)), call);
}

}  // namespace quern::cuda::attention
