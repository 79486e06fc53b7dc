// Attention of answer rows over packed caches: norm, rotation, packing of K and V, attention and the output gate in one kernel.
// Clusters, chunks and the merging of blocks' results are those of decode.cu, with 30 chunks a row at most, 22 where keys or
// values are fp8, and no chunk without keys.
//
//   slot     a page's K block and V block, as they lie in the cache (decode_packed.cuh); two a block
//   warp     16 keys of each page, all 8 heads and 256 elements: it copies, scores and adds them without waiting for other warps;
//            K of the page after next is on its way before V of this one is read, so lanes meet twice a page
//   run      a block's tiles of a chunk, from the last to the first, so that fresh keys come first; at its end the warps' results
//            become the block's (decode_packed_merge.cuh)
//   fresh    keys and values of this step are packed over the copied block (decode_packed_rows.cuh), by every block that
//            attends to them; the one of the row's own key also puts that one into the cache
//
// Traffic: packed K and V once, 0.26 to 0.5 of BF16's bytes; copies start before the predecessor ends. Bound: after 128K tokens
// bytes with fp8, with codes of 4 bits the ALUs, which take one instruction in two cycles: 16 keys take a warp 440 (fp8), 830
// (nvfp4), 640 (tq4) instructions, of which the ALUs have 250, 450, 440. After few tokens instructions, too: they come from memory
// each time, some five cycles each, so there are loops where registers let them be. To run through the code once before the
// predecessor ends was tried; it takes longer than there is time (H200, 2026-11). A row's bits depend on its position and keys
// alone, as in decode.cu.
// Limits: head_dim 256, at most 8 query heads a KV head, at most max_answer_rows rows.
#include "ggml-like/cuda/attention/decode_packed_merge.cuh"
#include "ggml-like/cuda/attention/decode_packed_rows.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <cmath>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace decode;

/// Registers allow four blocks an SM, shared memory three where a slot is large; a row's clusters fill the card so.
template <class K, class V>
constexpr int kBlocksPerSm = K::kBytes + V::kBytes > 20 * 1024 ? 3 : 4;
template <class K, class V>
constexpr int kMostChunks = kBlocksPerSm<K, V> == 4 ? kMaxPackedChunks : kMaxLargeChunks;
#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

/// The block's row.
__device__ __forceinline__ Row row_of(const AttentionCall& c) {
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t],
              fresh_row = c.start[sequence];
    Row row{t,
            static_cast<int>(blockIdx.x) / kSplitBlocks,
            quotient(c.heads, c.kv_heads),
            position + 1,
            c.positions[fresh_row],
            fresh_row,
            c.pages + sequence * c.page_row,
            0};
    if (c.rope != nullptr) row.shift = c.rope[t] - position;  // as in decode.cu
    return row;
}

/// A place in a block's runs of tiles.
struct Place {
    int begin, tile;  // the run's first tile, and the current one; `tiles` or more: past the end
};
struct Runs {
    int chunks, each, stride, tiles;  // tiles of a run, from one to the next, of the row

    /// As many chunks as have tiles; each block of all of them but the last one's has the same number.
    __device__ __forceinline__ Runs(int position, int most, int clusters) {
        tiles = position / kTileKeys + 1;
        const int blocks = min(position / kChunkKeys + 1, most) * kSplitBlocks;
        each = quotient(tiles + blocks - 1, blocks);
        chunks = quotient(tiles + each * kSplitBlocks - 1, each * kSplitBlocks);
        stride = clusters * kSplitBlocks * each;
    }
    __device__ __forceinline__ Place at(int begin) const {
        return {begin, begin < tiles ? min(begin + each, tiles) - 1 : begin};
    }
    __device__ __forceinline__ Place first(int chunk) const {
        return at((chunk * kSplitBlocks + static_cast<int>(blockIdx.x) % kSplitBlocks) * each);
    }
    __device__ __forceinline__ Place after(const Place& p) const {
        if (p.tile > p.begin) return {p.begin, p.tile - 1};
        return at(p.begin + stride);
    }
    /// Tiles of the run.
    __device__ __forceinline__ int count(const Place& p) const { return max(min(each, tiles - p.begin), 0); }
};

/// What a block copies: K and V of tiles in their order, two ahead of the one it attends to.
template <class K, class V>
struct Feed {
    static constexpr uint32_t kSlot = K::kBytes + V::kBytes;  // slots begin at 0 and there

    const Runs& runs;
    char* ring;
    const int* pages;
    int keys, fresh;             // of the row
    int64_t k_stride, v_stride;  // of a page
    Copier<K> copy_keys;
    Copier<V> copy_values;
    LaneAt<K, V> at;
    Place ahead;
    int page;

    __device__ __forceinline__ Feed(const AttentionCall& c, const Row& r, const Runs& all, const Place& first,
                                    char* shared)
        : runs(all),
          ring(shared),
          pages(r.pages),
          keys(r.keys),
          fresh(r.fresh),
          k_stride(c.kv_heads * K::kBytes),
          v_stride(c.kv_heads * V::kBytes),
          copy_keys(c.k_cache, r.kv_head, shared_address(shared)),
          copy_values(c.v_cache, r.kv_head, shared_address(shared) + K::kBytes),
          at(shared_address(shared)),
          ahead(first) {
        page = page_of_ahead();
    }
    __device__ __forceinline__ int page_of_ahead() const { return pages[min(ahead.tile, runs.tiles - 1)]; }

    /// Starts the warp's rows of a tile; a group of copies, empty after the last tile.
    __device__ __forceinline__ void start_keys(uint32_t slot) const {
        if (ahead.tile < runs.tiles) copy_keys.start(page * k_stride, slot);
        commit_copies();
    }
    /// And goes on to the next tile.
    __device__ __forceinline__ void start_values(uint32_t slot) {
        if (ahead.tile < runs.tiles) copy_values.start(page * v_stride, slot);
        commit_copies();
        ahead = runs.after(ahead);
        page = page_of_ahead();
    }
};

/// Packs the fresh keys and values of the warp's 16 of a tile after the first. The result waits in local memory: registers do not
/// suffice for both, and few blocks come here.
template <class K, class V>
__device__ __forceinline__ void prepare_later(const AttentionCall& c, int key, char* slot, Beside& beside,
                                              WarpPart& part) {
    volatile float kept[kDim / 16][4];
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) kept[j][e] = part.o[j][e];
    const Row row = row_of(c);
    __syncwarp();
    prepare<K, V>(c, row, max(row.fresh, key), min(row.keys, key + kWarpKeys), false, slot, beside);
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = kept[j][e];
}

/// Brings the gate near, which the block multiplies its eighth of the elements by at the end.
__device__ __forceinline__ void prefetch_gate(const AttentionCall& c, const Row& row, int rank) {
    const int pair = rank * row.group * 16 + static_cast<int>(threadIdx.x);
    if (static_cast<int>(threadIdx.x) < row.group * 16)
        prefetch_line(c.gate.at(row.t, row.kv_head * row.group + pair / (kDim / 2)) + pair % (kDim / 2) * 2);
}

/// Tile n of the block, whose keys are there. After a run's last the slot is not filled again yet.
template <class K, class V>
__device__ __forceinline__ void attend_tile(const AttentionCall& c, Feed<K, V>& feed, int tile, bool first,
                                            uint32_t slot, bool last, Beside& beside, WarpPart& part) {
    const int key = tile * kTileKeys + static_cast<int>(threadIdx.x) / 32 * kWarpKeys, left = feed.keys - key;
    if (!first && key + kWarpKeys > feed.fresh && left > 0) {
        wait_copies<2>();  // this tile's
        prepare_later<K, V>(c, key, feed.ring + slot, beside, part);
    }
    float s[4];
    if (left > 0) score_packed<K, V>(feed.at, slot, beside.q, left, s);
    wait_copies<2>();  // its values
    __syncwarp();
    if (!last) feed.start_keys(slot);
    if (left > 0) {
        if (left < kWarpKeys) clear_rows<V>(shared_address(feed.ring) + slot + K::kBytes, left);
        add_values<K, V>(feed.at, slot, s, part);
    }
    if (last) {
        wait_copies<1>();  // the next one's keys
    } else {
        wait_copies<2>();
    }
    __syncwarp();
    if (!last) feed.start_values(slot);
}

/// Of two packings, as numbers.
template <int kKeys, int kValues>
CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<BlockOf<Packing{kKeys}>, BlockOf<Packing{kValues}>>)
    attention_decode_packed_kernel(const __grid_constant__ AttentionCall c) {
    using K = BlockOf<Packing{kKeys}>;
    using V = BlockOf<Packing{kValues}>;
    extern __shared__ __align__(128) char ring[];
    __shared__ Beside beside;
    __shared__ Totals totals;
    allow_successor();
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t];
    const int clusters = gridDim.y, first_chunk = blockIdx.y, rank = blockIdx.x % kSplitBlocks;
    const Runs runs(position, kMostChunks<K, V>, clusters);
    const int chunks = runs.chunks;
    if (sequence < 0 || first_chunk >= chunks) {
        if (first_chunk == 0) wait_for_predecessor();  // as in decode.cu
        return;
    }
    const Row row = row_of(c);
    Place now = runs.first(first_chunk);
    Feed<K, V> feed(c, row, runs, now, ring);
    start_beside(c, row, beside);
#pragma unroll 1
    for (uint32_t slot = 0; slot <= feed.kSlot; slot += feed.kSlot)
        feed.start_keys(slot), feed.start_values(slot);  // with what fresh rows will overwrite
    wait_for_predecessor();
    prefetch_gate(c, row, rank);
    if (now.tile < runs.tiles) {
        const int begin = now.tile * kTileKeys, end = min(row.keys, begin + kTileKeys);
        if (end > row.fresh)
            wait_copies<2>();  // the first tile's
        else
            wait_copies<4>();  // `beside`
        __syncthreads();
        prepare<K, V>(c, row, max(row.fresh, begin), end, true, ring, beside);
        __syncthreads();
    }
    wait_copies<3>();  // the first tile's keys
    __syncwarp();
    WarpPart part;
    clear(part);
    const bool one_chunk = kClusters && first_chunk + clusters >= chunks;
    float* values = reinterpret_cast<float*>(ring);
    float2* block_totals = totals.of_block;
    bool first = true;
    uint32_t slot = 0;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < chunks; chunk += clusters) {
        for (int left = runs.count(now); left > 0; --left) {
            attend_tile<K, V>(c, feed, now.tile, first, slot, left == 1, beside, part);
            if (left > 1) --now.tile;
            first = false, slot = feed.kSlot - slot;
        }
        now = runs.at(now.begin + runs.stride);
        if (!one_chunk) {
            values = part_at<kMostChunks<K, V>>(c, row, chunk, rank);
            block_totals = reinterpret_cast<float2*>(values + kHeads * kDim);
        }
        leave_result<V>(part, totals, ring + (one_chunk ? feed.kSlot : feed.kSlot - slot), values,
                        one_chunk ? kOutRow : kDim, block_totals);
        if (one_chunk) break;
        clear(part);
        __syncthreads();
        feed.start_keys(feed.kSlot - slot), feed.start_values(feed.kSlot - slot);
    }
    const Ending end(c, row, first_chunk, chunks, clusters);
    store_row<kMostChunks<K, V>>(c, row, end, values, block_totals, [] {});
}

/// Clusters that share a row's chunks: as many rounds of clusters as take the least time, of which a tenth of a row's chunks is
/// what each cluster needs beside its chunks.
int clusters_of(int units, int at_once, int most) {
    int best = 1;
    float least = INFINITY;
    for (int n = 1; n <= most; ++n) {
        const int rounds = (units * n + at_once - 1) / at_once;
        const float time = static_cast<float>(rounds) * (1.0f / static_cast<float>(n) + 0.1f);
        if (time < least) least = time, best = n;
    }
    return best;
}

}  // namespace

void attention_decode_packed(const AttentionCall& call, Context& context) {
    if (call.tokens > max_answer_rows(call.kv_heads)) unsupported("gated_attention", "so many answer rows");
    with_keys(call.k_packing, [&](auto k) {
        with_values(call.v_packing, [&](auto v) {
            using K = decltype(k);
            using V = decltype(v);
            // Clusters that run at once; one in sixteen does not fit into the card's groups of SMs.
            const int at_once = kBlocksPerSm<K, V> * (context.sms / kSplitBlocks - 1);
            const int clusters = clusters_of(call.tokens * call.kv_heads, at_once, kMostChunks<K, V>);
            launch(
                context, "gated_attention decode packed",
                attention_decode_packed_kernel<static_cast<int>(K::kPacking), static_cast<int>(V::kPacking)>,
                dim3(kSplitBlocks * call.kv_heads, clusters, call.tokens), dim3(kThreads),
                2 * (K::kBytes + V::kBytes), call);
        });
    });
}

}  // namespace quern::cuda::attention
