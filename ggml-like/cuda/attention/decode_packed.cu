// Attention of answer rows over packed caches: norm, rotation, packing of K and V, attention and the output gate in one kernel.
// Clusters, chunks, runs of tiles and the merging of results are those of decode.cu, with 22 chunks a row at most.
//
//   slot     a page's K block and V block, as they lie in the cache (decode_packed.cuh); as many slots as 66 KB hold, 2 to 4
//   fresh    a tile's keys and values of this step are packed over the copied block (decode_packed_rows.cuh), by every block that
//            attends to them; the one of the row's own key also puts that one into the cache
//   tile     S^T[16 keys a warp, 8 heads] = K q^T, O^T[64 of d a warp, 8 heads] += V^T P^T; codes become BF16 in registers
//
// Traffic: packed K and V once, 0.29 to 0.5 of BF16's bytes; copies start before the predecessor ends. Bound: latency, of
// preparation and the first tile, then of a tile's three barriers: 3.75 us a block, whatever the format (H200, 2026-11). A row's bits
// depend on its position and keys alone, as in decode.cu.
// Limits: head_dim 256, at most 8 query heads a KV head, at most max_answer_rows rows.
#include "ggml-like/cuda/attention/decode_merge.cuh"
#include "ggml-like/cuda/attention/decode_packed_rows.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace decode;

constexpr int kBlocksPerSm = 3, kMaxSlots = 4, kRingBytes = 66 * 1024;
/// Slots that fit, at least 2.
constexpr int slots_of(int tile_bytes) {
    return kRingBytes / tile_bytes < kMaxSlots ? kRingBytes / tile_bytes : kMaxSlots;
}

/// Where a block's tiles come from and go to.
struct Feed {
    const AttentionCall& c;
    const Row& row;
    const Pages &k, &v;
    char* ring;
    int slots;

    __device__ __forceinline__ char* slot(int n) const {
        return ring + n % slots * (k.block.bytes + v.block.bytes);
    }
    /// Starts tile share.ahead, the block's number n, and goes on to the next; a group of copies, empty after the last.
    __device__ __forceinline__ void start(Share& share, int n) const {
        if (share.ahead < share.tiles) {
            const int64_t head = static_cast<int64_t>(share.ahead_page) * c.kv_heads + row.kv_head;
            start_block(k, k.of(head), slot(n));
            start_block(v, v.of(head), slot(n) + k.block.bytes);
        }
        commit_copies();
        step_tile(share, share.ahead, share.ahead_left);
        share.ahead_page = page_of(row, share.ahead);
    }
    /// Waits until only the tiles after the current one are on their way.
    __device__ __forceinline__ void wait() const {
        if (slots == 4)
            wait_copies<2>();
        else if (slots == 3)
            wait_copies<1>();
        else
            wait_copies<0>();
        __syncthreads();
    }
};

/// Tile n of the block; before the first, q.
__device__ __forceinline__ void attend_tile(const Feed& feed, Share& share, int n, Query& q, Beside& beside,
                                            Part& part) {
    Exchange& shared = beside.exchange;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = share.tile * kTileKeys;
    feed.wait();  // also for all warps' reads of the tile before
    feed.start(share, n + feed.slots - 1);
    char* slot = feed.slot(n);
    if (n == 0 || first + kTileKeys > feed.row.fresh) {
        prepare(feed.c, feed.row, feed.k, share.tile, n == 0, slot, beside);
        __syncthreads();
        if (n == 0) load_query(beside.q, feed.row.group, feed.k.packing, q);
    }
    float s[4];
    score_packed(feed.k, slot, q, feed.row.keys - first - warp * kWarpKeys, s);
    const float2 highest{over_keys_max(fmaxf(s[0], s[2])), over_keys_max(fmaxf(s[1], s[3]))};
    if (lane < 4) shared.highest[warp][lane] = highest;
    __syncthreads();
    raise_maximum(shared, part);
    const char* values = slot + feed.k.block.bytes;
    share_weights(feed.v, values, feed.row.keys - first - warp * kWarpKeys, s, shared, part);
    __syncthreads();
    add_values_packed(feed.v, values, shared, part);
}

CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    attention_decode_packed_kernel(const __grid_constant__ AttentionCall c, int slots) {
    extern __shared__ __align__(128) char ring[];
    __shared__ Beside beside;
    allow_successor();
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t];
    const int clusters = gridDim.x / kSplitBlocks, rank = blockIdx.x % kSplitBlocks;
    const int first_chunk = blockIdx.x / kSplitBlocks;
    const int chunks = min(position / kChunkKeys + 1, kMaxPackedChunks);
    if (sequence < 0 || first_chunk >= chunks) {
        if (first_chunk == 0) wait_for_predecessor();  // as in decode.cu
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
    if (c.rope != nullptr) row.shift = c.rope[t] - position;  // as in decode.cu
    const Pages k(c.k_packing, c.k_layout, c.k_cache), v(c.v_packing, c.v_layout, c.v_cache);
    Share share = share_of(row, first_chunk, chunks, clusters);
    share.ahead = share.tile, share.ahead_left = share.each, share.ahead_page = page_of(row, share.tile);
    const Feed feed{c, row, k, v, ring, slots};
    start_beside(c, row, beside);
    for (int n = 0; n < slots - 1; ++n) feed.start(share, n);  // with what fresh rows will overwrite
    wait_for_predecessor();
    Query q;
    const Ending end(c, row, first_chunk, chunks);
    Part part;
    clear(part);
    int chunk = first_chunk;
    for (int n = 0; chunk < chunks; chunk += clusters) {
        if (share.tile < share.tiles) {
            const int run = min(share.each, share.tiles - share.tile);
            for (int i = 0; i < run; ++i, ++n) {
                attend_tile(feed, share, n, q, beside, part);
                step_tile(share, share.tile, share.left);
            }
        }
        __syncthreads();  // sums and probabilities of the chunk before may still be read
        if (end.one_chunk) break;
        float* to = part_at<kMaxPackedChunks>(c, row, chunk, rank);
        leave_result<true>(part, beside.exchange, to, kDim, reinterpret_cast<float2*>(to + kHeads * kDim));
        clear(part);
    }
    wait_copies<0>();
    __syncthreads();
    store_row<true>(c, row, end, part, beside.exchange, reinterpret_cast<float*>(ring));
}

}  // namespace

void attention_decode_packed(const AttentionCall& call, Context& context) {
    const int at_once = kBlocksPerSm * (context.sms / kSplitBlocks - 1), units = call.tokens * call.kv_heads;
    const int clusters = std::clamp(at_once / units, 1, kMaxPackedChunks);
    if (call.tokens > max_answer_rows(call.kv_heads)) unsupported("gated_attention", "so many answer rows");
    const int tile = static_cast<int>(call.k_layout.head() + call.v_layout.head());
    const int slots = slots_of(tile);
    launch(context, "gated_attention decode packed", attention_decode_packed_kernel,
           dim3(clusters * kSplitBlocks, call.kv_heads, call.tokens), dim3(kThreads), slots * tile, call,
           slots);
}

}  // namespace quern::cuda::attention
