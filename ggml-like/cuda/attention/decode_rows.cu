// Attention of answer steps with several rows of a sequence, as where drafts are verified: the work of decode.cu, where after
// some thousand keys up to four rows share what is read of them.
//
//   grid      clusters of 8 blocks: (cluster, KV head, group of rows)
//
//     few keys       the group's clusters are dealt out to its rows, each of which is attended as in decode.cu (decode_one.cuh);
//                    likewise rows whose chunks have different tiles
//     more keys      chunks and runs of 64-key tiles, the same that each of the rows would have on its own; two warps have one
//                    or two of the rows (decode_rows.cuh); the work of norming fresh keys is divided among all warps
//
//   end       as in decode.cu, two rows side by side (decode_rows_merge.cuh)
//
// Shared memory (RowsShared, 101 KB of four rows, 99 KB of two; on sm_90 two blocks an SM): a ring of three slots of K or V; the
// third first takes q of all rows; at the end the rows' results take the place of the first two. Registers: 255, so that two
// blocks leave none for the next kernel's.
//
// A row has the bits that it has alone (decode.cu): its tiles, their order, and the order of sums in a tile are the same. Values
// have to be finite: in a tile that rows share, those of later rows are multiplied by zero.
//
// K and V are read once a group. Bound: latency; the steps of a tile follow each other and take 2.3 us, its bytes half of that.
// Measured, with launch gap and a small kernel before: 4 rows after 4,096 and 32,768 keys 16.7 and 40 us, by decode.cu 19.4 and
// 57; 8 rows 22.8 and 56, by decode.cu 25.8 and 116 (H200, 2026-11).
// Limits: as of decode.cu.
#include "ggml-like/cuda/attention/decode_one.cuh"
#include "ggml-like/cuda/attention/decode_rows.cuh"
#include "ggml-like/cuda/attention/decode_rows_merge.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace decode;

#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;  // a cluster's only chunk is merged from shared memory
#else
constexpr bool kClusters = false;
#endif
constexpr int kRowFloats = kHeads * kOutRow;  // of a row's result in shared memory
constexpr int kStatic = 128;                  // bytes of shared memory that the kernel has besides
static_assert(kStatic + sizeof(RowsShared<1>) <= 99 * 1024 && sizeof(Shared) <= sizeof(RowsShared<1>));
constexpr int kMostRows = 2 * kPairs;
static_assert(kMostRows * (kRowFloats + kHeads * 2) * 4 <= 2 * kSlotBytes && kMostRows * kHeads <= kTileKeys);

/// Tile n of the block, as attend_tile (decode_one.cuh). `row` has t of the group's first row and the keys of its last; the first
/// one's position is `position`.
template <int kOwn>
__device__ __forceinline__ void attend_rows(const AttentionCall& c, const Row& row, const OwnRows& own,
                                            int position, Share& share, int n, const Query (&q)[kOwn],
                                            const float (&k_norm)[8], RowsShared<kOwn>& shared,
                                            RowPart (&part)[kOwn]) {
    const int begin = share.tile * kTileKeys;
    const int keys_left = position + own.first + 1 - begin;  // of the pair's first row
    const bool fresh = begin + kTileKeys > row.fresh;
    char *k_slot = shared.ring[2 * n % kRing], *v_slot = shared.ring[(2 * n + 1) % kRing];
    if (n == 0)
        wait_copies<2>();
    else
        wait_copies<1>();
    __syncthreads();  // K is there, and the last tile's V has been read
    if (n > 0) start_ahead(c, row, share, false, shared.ring[(2 * n + 2) % kRing]);
    if (fresh) {
        finish_group(c, row, position, k_norm, share.tile, false, k_slot);
        __syncthreads();
    }
    Scores<kOwn> s;
    if (own.count > 0) score_rows(k_slot, q, keys_left, own, shared.rows, s);
    wait_copies<1>();
    __syncthreads();  // V is there, and K has been read
    start_ahead(c, row, share, true, k_slot);
    if (fresh) finish_group(c, row, position, k_norm, share.tile, true, v_slot);
    step_tile(share, share.ahead, share.ahead_left);
    share.ahead_page = page_of(row, share.ahead);
    if (own.count <= 0) return;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        probabilities(s[i], i < own.count && keys_left + i * kPairs > 0, shared.rows[own.at(i)], part[i]);
    meet_pair();
    add_values(v_slot, own, shared.rows, part);
}

/// y of the group's rows, once all blocks have left their results in work space or, of a cluster's only chunk, in shared memory.
template <int kOwn>
__device__ __forceinline__ void store_rows(const AttentionCall& c, const Row& first, int count,
                                           int first_chunk, int chunks, int clusters, const float* values,
                                           const float2* totals) {
    const int unit = first.t * c.kv_heads + first.kv_head, counted = min(clusters, chunks);
    const auto row_of = [&](int r) {
        Row row = first;
        row.t += r;
        return row;
    };
#if __CUDA_ARCH__ >= 900
    const int rank = blockIdx.x % kSplitBlocks, thread = threadIdx.x;
    const bool one_chunk = first_chunk + clusters >= chunks;
    const int quads = first.group * kHeadQuads / kSplitBlocks;               // of the block's eighth of a row
    const int r = thread / quads, quad = rank * quads + thread - r * quads;  // of rows r, r + kPairs, ...
    const int own = r < kPairs ? (count - r + kPairs - 1) / kPairs : 0;
    uint2 gate[kOwn];
    Quad all[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (i < own) gate[i] = gate_quad(c, row_of(r + i * kPairs), quad);
    cluster_barrier();
#pragma unroll 1
    for (int chunk = first_chunk; chunk < chunks; chunk += clusters) {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (i >= own) break;
            const int at = r + i * kPairs;
            const Quad mine = one_chunk
                                  ? quad_of_cluster(values + at * kRowFloats, totals + at * kHeads, quad)
                                  : quad_of_parts(c, row_of(at), chunk, quad);
            if (counted == 1)
                merge(all[i], mine);
            else
                leave_chunk(c, row_of(at), chunk, quad, mine);
        }
    }
    cluster_arrive();
    if (counted == 1 || last_block(c.counters + unit * kSplitBlocks + rank, counted))
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            if (i >= own) break;
            const Row row = row_of(r + i * kPairs);
            if (counted > 1) all[i] = quad_of_chunks(c, row, quad, chunks);
            store_quad(c, row, quad, all[i], gate[i]);
        }
    cluster_wait();  // peers may still read this block's shared memory
#else
    if (!last_block(c.counters + unit * kSplitBlocks, counted * kSplitBlocks)) return;
    const int quads = first.group * kHeadQuads;
    for (int i = threadIdx.x; i < count * quads; i += kThreads) {
        const Row row = row_of(i / quads);
        const int quad = i % quads;
        Quad all;
        for (int chunk = 0; chunk < chunks; ++chunk) merge(all, quad_of_parts(c, row, chunk, quad));
        store_quad(c, row, quad, all, gate_quad(c, row, quad));
    }
#endif
}

/// The group's rows, together, as attend_row (decode_one.cuh) one.
template <int kOwn>
__device__ __forceinline__ void attend_group(const AttentionCall& c, const RowGroup& group, int first_chunk,
                                             int chunks, int clusters, RowsShared<kOwn>& shared) {
    const int lane = threadIdx.x % 32, rank = blockIdx.x % kSplitBlocks;
    const int fresh_row = c.start[group.sequence];
    Row row{group.t,
            static_cast<int>(blockIdx.y),
            c.heads / c.kv_heads,
            group.position + group.count,
            c.positions[fresh_row],
            fresh_row,
            c.pages + group.sequence * c.page_row,
            0};
    Share share = share_of(row, first_chunk, chunks, clusters);
    const int page = page_of(row, share.tile);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        start_old(c, row, share.tile, page, i == 1, shared.ring[i], 0, kWarpKeys);
        commit_copies();
    }
    // rows of answers are text, whose three axes are equal, and as far behind as the sequence's other rows of the step
    if (c.rope != nullptr) row.shift = c.rope[group.t] - group.position;
    const OwnRows own(group.count);
    float q_norm[8], k_norm[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) q_norm[i] = c.q_norm[lane * 8 + i], k_norm[i] = c.k_norm[lane * 8 + i];
    wait_for_predecessor();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) start_fresh(c, row, share.tile, i == 1, shared.ring[i]);
    Query q[kOwn];
    load_queries(c, row, own, group.position, q_norm, shared.ring[kSpare], q);
    start_ahead(c, row, share, false, shared.ring[kSpare]);
    if ((share.tile + 1) * kTileKeys > row.fresh)
        wait_copies<0>();  // its fresh keys came with the third group of copies

    const bool one_chunk = kClusters && first_chunk + clusters >= chunks;
    float* values = reinterpret_cast<float*>(shared.ring[0]);
    float2* totals = reinterpret_cast<float2*>(values + kPairs * kOwn * kRowFloats);
    RowPart part[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) clear(part[i]);
#pragma unroll 1
    for (int n = 0, chunk = first_chunk; chunk < chunks; chunk += clusters) {
        const int run = min(share.each, share.tiles - share.tile);
        for (int i = 0; i < run; ++i, ++n) {
            attend_rows(c, row, own, group.position, share, n, q, k_norm, shared, part);
            step_tile(share, share.tile, share.left);
        }
        if (one_chunk) __syncthreads();  // the ring has been read
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const int r = own.at(i);
            Row of = row;
            of.t += r;
            float* to = one_chunk ? values + r * kRowFloats : part_at<kMaxChunks>(c, of, chunk, rank);
            if (i < own.count)
                leave_row(part[i], shared.rows[r], to, one_chunk ? kOutRow : kDim,
                          one_chunk ? totals + r * kHeads : reinterpret_cast<float2*>(to + kHeads * kDim));
            clear(part[i]);
        }
    }
    store_rows<kOwn>(c, row, group.count, first_chunk, chunks, clusters, values, totals);
}

template <int kOwn>
CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, 2)
    attention_decode_rows_kernel(const __grid_constant__ AttentionCall c) {
    extern __shared__ __align__(128) char rows_memory[];
    allow_successor();
    const RowGroup group = find_group<kPairs * kOwn>(c, blockIdx.z);
    const bool together = group.position >= kSharedFrom<kOwn> && group.alike();
    const int given = gridDim.x / kSplitBlocks, cluster = blockIdx.x / kSplitBlocks;
    const int sharing = together ? 1 : max(group.count, 1);  // rows among which the clusters are dealt out
    const int r = cluster % sharing, first_chunk = cluster / sharing;
    const int clusters = (given - r + sharing - 1) / sharing, position = group.position + r;
    const int chunks = min(position / kChunkKeys + 1, kMaxChunks);
    if (group.count == 0 || first_chunk >= chunks) {
        if (first_chunk == 0) wait_for_predecessor();  // see decode.cu
        return;
    }
    if (together)
        attend_group<kOwn>(c, group, first_chunk, chunks, clusters,
                           *reinterpret_cast<RowsShared<kOwn>*>(rows_memory));
    else
        attend_row(c, group.t + r, group.sequence, position, first_chunk, chunks, clusters,
                   *reinterpret_cast<Shared*>(rows_memory));
}

/// Groups, if the rows are shared out evenly over sequences.
template <int kRows>
int even_groups(const AttentionCall& call) {
    return call.sequences * groups_of<kRows>((call.tokens + call.sequences - 1) / call.sequences);
}

template <int kOwn>
void launch_rows(const AttentionCall& call, Context& context, int at_once) {
    constexpr int kRows = kPairs * kOwn;
    // As in decode.cu, but at least a cluster for each row.
    const int clusters = std::clamp(at_once / (even_groups<kRows>(call) * call.kv_heads), kRows, kMaxChunks);
    const int groups = (call.tokens + (kRows - 1) * call.sequences) / kRows;  // at most
    launch(context, "gated_attention decode rows", attention_decode_rows_kernel<kOwn>,
           dim3(clusters * kSplitBlocks, call.kv_heads, groups), dim3(kThreads),
           static_cast<int>(sizeof(RowsShared<kOwn>)), call);
}

}  // namespace

void attention_decode_rows(const AttentionCall& call, Context& context) {
    if (call.tokens > max_answer_rows(call.kv_heads)) unsupported("gated_attention", "so many answer rows");
    const int at_once = 2 * (context.sms / kSplitBlocks - 1);  // clusters, as in decode.cu
    // Groups of two rows are faster as long as all of their chunks run at once.
    const bool few = even_groups<kPairs>(call) * call.kv_heads * kMaxChunks <= at_once;
    if (few || kStatic + static_cast<int>(sizeof(RowsShared<2>)) > context.shared_bytes)
        launch_rows<1>(call, context, at_once);
    else
        launch_rows<2>(call, context, at_once);
}

}  // namespace quern::cuda::attention
