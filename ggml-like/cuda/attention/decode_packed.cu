// Attention of answer rows over packed caches: norm, rotation, packing of K and V, attention and the output gate in one kernel.
// Clusters and the merging of their results are those of decode.cu; chunks are in decode_packed_runs.cuh.
//
//   slot     a unit of 16 keys' K and V, as they lie in a page (decode_packed.cuh); two a warp
//   warp     attends to its units without waiting for other warps: all 8 heads and 256 elements; K of the unit after next is on its
//            way before V of this one is read, so lanes meet twice a unit
//   run      a block's units of a chunk; at its end the warps' results become the block's (decode_packed_merge.cuh)
//   fresh    keys and values of this step are packed over the copied ones (decode_packed_rows.cuh), by every block that attends
//            to them; the one of the row's own key also puts that one into the cache
//
// Traffic: packed K and V once, 0.26 to 0.5 of BF16's bytes. Bound: after 128K tokens bytes with fp8; with codes of 4 bits warps that
// wait, for 16 keys take one of them 830 (nvfp4) or 640 (tq4) instructions after another, with fp8 440, and fewer warps are slower
// though all SMs have as much to do. After few tokens instructions: they come from memory each time, some five cycles each, so there
// are loops where registers let them be, and little is computed before copies start. A row's bits depend on its position and keys
// alone, as in decode.cu.
// Limits: head_dim 256, at most 8 query heads a KV head, at most max_answer_rows rows.
#include "ggml-like/cuda/attention/decode_packed_merge.cuh"
#include "ggml-like/cuda/attention/decode_packed_rows.cuh"
#include "ggml-like/cuda/attention/decode_packed_runs.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <algorithm>
#include <cmath>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace decode;

constexpr int kBlocksPerSm = 3;  // what registers and, in fp8, shared memory allow on an H100
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

/// Packs the fresh keys and values of a unit after the warp's first. The result waits in local memory: registers do not
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
    prepare<K, V>(
        c, row, max(row.fresh, key), min(row.keys, key + kWarpKeys), false, [&](int) { return slot; },
        beside);
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

/// The warp's next unit, whose keys are there. After a run's last the slot is not filled again yet.
template <class K, class V>
__device__ __forceinline__ void attend_unit(const AttentionCall& c, Feed<K, V>& feed, int unit, bool first,
                                            uint32_t slot, bool last, Beside& beside, WarpPart& part) {
    const int key = unit * kWarpKeys, left = feed.keys - key;
    if (!first && key + kWarpKeys > feed.fresh) {
        wait_copies<2>();  // this unit's
        prepare_later<K, V>(c, key, feed.own + slot, beside, part);
    }
    float s[4];
    score_packed<K, V>(feed.at, slot, beside.q, left, s);
    wait_copies<2>();  // its values
    __syncwarp();
    if (!last) feed.start_keys(slot);
    if (left < kWarpKeys) clear_rows<V>(shared_address(feed.own) + slot + K::kUnitBytes, left);
    add_values<K, V>(feed.at, slot, s, part);
    if (last) {
        wait_copies<1>();  // the next one's keys
    } else {
        wait_copies<2>();
    }
    __syncwarp();
    if (!last) feed.start_values(slot);
}

/// q, and the keys and values of this step among the warps' first units; by all warps. Leaves the first unit's keys there.
template <class K, class V>
__device__ __forceinline__ void prepare_first(const AttentionCall& c, const Row& row, const Runs& runs,
                                              const Place& now, char* slots, Beside& beside) {
    const int newest = runs.units - 1 - now.begin, end = min(row.keys, (newest + 1) * kWarpKeys);
    const int begin = max(row.fresh, (runs.units - min(now.begin + kWarps, now.end)) * kWarpKeys);
    if (end > begin)
        wait_copies<2>();  // the first unit's
    else
        wait_copies<4>();  // `beside`
    __syncthreads();
    const auto slot_of = [&](int key) { return slots + (newest - key / kWarpKeys) * Feed<K, V>::kUnit; };
    prepare<K, V>(c, row, begin, end, true, slot_of, beside);
    __syncthreads();
    wait_copies<3>();
    __syncwarp();
}

/// Of two packings, as numbers.
template <int kKeys, int kValues>
CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    attention_decode_packed_kernel(const __grid_constant__ AttentionCall c) {
    using K = BlockOf<Packing{kKeys}>;
    using V = BlockOf<Packing{kValues}>;
    extern __shared__ __align__(128) char slots[];
    __shared__ Beside beside;
    __shared__ Totals totals;
    allow_successor();
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t];
    const int clusters = gridDim.y, first_chunk = blockIdx.y, rank = blockIdx.x % kSplitBlocks;
    const Runs runs(position + 1, kChunkKeysOf<K, V>, clusters);
    if (sequence < 0 || first_chunk >= runs.chunks) {
        if (first_chunk == 0) wait_for_predecessor();  // as in decode.cu
        return;
    }
    const Row row = row_of(c);
    Place now(runs, runs.begin(first_chunk));
    Feed<K, V> feed(c, row, runs, now, slots);
    constexpr uint32_t kSlot = Feed<K, V>::kSlot;
    static_assert(kRoomBytes <= Feed<K, V>::kUnit && kHeads * kOutRow * 4 <= kSlot);
    start_beside(c, row, beside);
#pragma unroll 1
    for (uint32_t slot = 0; slot <= kSlot; slot += kSlot)
        feed.start_keys(slot), feed.start_values(slot);  // with what fresh rows will overwrite
    wait_for_predecessor();
    prepare_first<K, V>(c, row, runs, now, slots, beside);
    prefetch_gate(c, row, rank);  // not sooner: the end needs it, and q is waited for
    WarpPart part;
    clear(part);
    const bool one_chunk = kClusters && first_chunk + clusters >= runs.chunks;
    float* values = reinterpret_cast<float*>(slots);
    float2* block_totals = totals.of_block;
    bool first = true;
    uint32_t slot = 0;
#pragma unroll 1
    for (int chunk = first_chunk; chunk < runs.chunks; chunk += clusters) {
#pragma unroll 1
        for (; now.valid(); now.unit += kWarps) {
            const bool last = now.unit + kWarps >= now.end;
            attend_unit<K, V>(c, feed, feed.from_oldest(now.unit), first, slot, last, beside, part);
            first = false, slot = kSlot - slot;
        }
        if (!one_chunk) {
            values = part_at<kMaxPackedChunks>(c, row, chunk, rank);
            block_totals = reinterpret_cast<float2*>(values + kHeads * kDim);
        }
        // of one chunk: nothing is being copied, and first slots take the block's values; else: the last unit's, as the other one waits
        // for the next run
        const uint32_t room = one_chunk ? kSlot : kSlot - slot;
        leave_result<V>(part, totals, shared_address(feed.own) + room, values, one_chunk ? kOutRow : kDim,
                        block_totals);
        if (one_chunk) break;
        now.next_run(runs);
        clear(part);
        __syncthreads();
        feed.start_keys(room), feed.start_values(room);
    }
    const Ending end(c, row, first_chunk, runs.chunks, clusters);
    store_row<kMaxPackedChunks>(c, row, end, values, block_totals, [] {});
}

/// Clusters that share a row's chunks: as many rounds of clusters as take the least time, of which a tenth of a row's chunks is
/// what each cluster needs beside its chunks.
int clusters_of(int units, int at_once, int most) {
    int best = 1;
    float least = INFINITY;
    for (int n = 1; n <= most; ++n) {
        const int rounds = (units * n + at_once - 1) / at_once, chunks = (most + n - 1) / n;
        const float time =
            static_cast<float>(rounds) * (static_cast<float>(chunks) + 0.1f * static_cast<float>(most));
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
            const int at_once = kBlocksPerSm * std::max(1, context.sms / kSplitBlocks - 1);
            const int clusters = clusters_of(call.tokens * call.kv_heads, at_once, kMaxPackedChunks);
            launch(
                context, "gated_attention decode packed",
                attention_decode_packed_kernel<static_cast<int>(K::kPacking), static_cast<int>(V::kPacking)>,
                dim3(kSplitBlocks * call.kv_heads, clusters, call.tokens), dim3(kThreads),
                2 * Feed<K, V>::kSlot, call);
        });
    });
}

}  // namespace quern::cuda::attention
