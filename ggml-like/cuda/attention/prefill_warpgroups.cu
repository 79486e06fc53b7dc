// Causal attention of prompt rows by products of warpgroups (sm_90a), after attention_prepare. Tiles of 128 rows of M,
// segments of 2,048 keys and the order of sums are those of prefill.cu.
//
//   block   one an SM; eight warps multiply, 16 rows of M each (prefill_warpgroups.cuh), one more copies (prefill_ring.cuh)
//   step    one page of 64 keys: S = Q K^T, softmax, O += P V
//
//   block 0   tile 0 | tile 7 | tile 8: segments 0 2 4 6      Every other round goes backwards: whoever had the longest tile
//   block 1   tile 1 | tile 6 | tile 9: segments 0 2 4 6      gets the shortest next. Tiles that are left after the last
//   block 2   tile 2 | tile 5 | tile 8: segments 1 3 5        whole round are shared: a block has every n-th segment of one,
//   block 3   tile 3 | tile 4 | tile 9: segments 1 3 5        and their sums are added in the order of segments
//                                                             (prefill_segments.cuh).
//
// A row's bits depend on its keys alone: pages are walked in the same order from the same places, a page that a row does not
// see leaves its sums as they are (weights of zero, factors of one), and no product mixes rows.
//
// Packed caches: pages are unpacked before (unpacked.cuh), or, where there are too many, by four warps in place of the one that
// copies, anew for each tile (prefill_packed_ring.cuh).
//
// Shared memory: 225 KB. Registers: 240 (packed 224) of a thread that multiplies, 176 of them O, S and P. Traffic: q, gate and y once; K and V
// once a tile, mostly from L2: 1 KB a key for 128 rows. Bound: the card's power; a step takes 1.4 us, 750 TFLOP/s, and a tile
// some 4 us more (q, first scores, gates). Measured for 2,048 rows: see PERFORMANCE.md.
// Limits: head_dim 256, at most 8 query heads a KV head; other cards take prefill.cu.
#include "ggml-like/cuda/attention/prefill_packed_ring.cuh"
#include "ggml-like/cuda/attention/prefill_warpgroups.cuh"
#include "ggml-like/cuda/ptx/tensor_map.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace prefill;

constexpr int kBlockThreads = kThreads + 128;  // the copying warp is in a warpgroup of its own

#if QUERN_WGMMA

constexpr int kFewSharers =
    3;  // blocks of a tile that add their sums one after another: more would wait for long

/// Which spans a block has: rounds of whole tiles, one for each block. Tiles that are left over are shared if there are two
/// blocks or more for each; a block then has every n-th segment of one.
struct Schedule {
    const AttentionCall& c;
    int blocks, tile_rows, whole, left, sharers;

    __device__ __forceinline__ explicit Schedule(const AttentionCall& call)
        : c(call), blocks(gridDim.x), tile_rows(kRows / (c.heads / c.kv_heads)) {
        int tiles = 0;
        for (int s = 0; s < c.sequences; ++s)
            tiles += (c.start[s + 1] - c.from[s] + tile_rows - 1) / tile_rows;
        tiles *= c.kv_heads;
        left = tiles % blocks, sharers = left > 0 ? blocks / left : 1;
        whole = sharers > 1 ? tiles - left : tiles;
    }
    __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) / left; }

    __device__ __forceinline__ bool find_tile_of(int index, Span& span) const {
        span.tile.kv_head = index % c.kv_heads;
        if (!find_tile(c, index / c.kv_heads, tile_rows, span.tile)) return false;
        span.keys = c.positions[span.tile.first + span.tile.rows - 1] + 1;
        span.begin = 0, span.end = (span.keys + kKeysPerPage - 1) / kKeysPerPage;
        return true;
    }
    /// The block's span in this round; false: there are no more.
    __device__ __forceinline__ bool find(int round, Span& span) const {
        const int block = blockIdx.x, index = round * blocks + (round % 2 == 0 ? block : blocks - 1 - block);
        span.sharers = 1;
        if (index < whole) return find_tile_of(index, span);
        if (sharers < 2 || rank() >= sharers) return false;
        span.sharers = sharers, span.number = block % left, span.shared = left;
        if (!find_tile_of(whole + span.number, span)) return false;
        span.begin = (rank() + (round - whole / blocks) * sharers) * kSegmentPages;
        const bool there = span.begin < span.end;
        span.end = min(span.end, span.begin + kSegmentPages);
        return there;
    }
};

/// Finds the block's next span and tells it; one lane. False: there are no more.
template <int kSlots>
__device__ __forceinline__ bool tell_span(const Schedule& schedule, const Ring<kSlots>& ring, int round,
                                          Span& span) {
    const bool more = schedule.find(round, span);
    if (!more) span.end = 0;
    ring.tell(round, span);
    return more;
}

/// One lane: finds, tells and copies all spans.
__device__ __forceinline__ void copy_spans(const AttentionCall& c, const Ring<kPlainSlots>& ring,
                                           const CUtensorMap& k, const CUtensorMap& v) {
    const Schedule schedule(c);
    Place<kPlainSlots> at;
    Span span;
    bool more = true;
#pragma unroll 1
    for (int round = 0; more; ++round) {
        more = tell_span(schedule, ring, round, span);
        if (round == 0) wait_for_predecessor();
        if (more) ring.copy_span(c, at, k, v, span);
    }
}

/// Four warps, of which the first has the lane that finds spans, one ahead of what is expanded.
__device__ __forceinline__ void expand_spans(const Expander& expander) {
    const Ring<kPackedSlots>& ring = expander.ring;
    const auto tell = [&](int round) {
        Span span;
        if (expander.thread == 0) tell_span(Schedule(expander.c), ring, round, span);
    };
    Staged from;
    Place<kPackedSlots> to;
    tell(0);
    wait_for_predecessor();
#pragma unroll 1
    for (int round = 0;; ++round) {
        const Span& span = ring.told(round);
        if (span.end == 0) return;
        tell(round + 1);
        __syncwarp();
        expander.expand_span(from, to, span);
    }
}

__device__ __forceinline__ Sharing sharing_of(const AttentionCall& c, const Span& span) {
    char* slots = static_cast<char*>(c.work);  // one for each block, then one for each shared tile
    return {.slots = slots + span.number * kHeldBytes,
            .apart = span.shared * kHeldBytes,
            .sums_so_far = slots + (static_cast<int>(gridDim.x) + span.number) * kHeldBytes,
            .done = c.counters + span.number,
            .blocks = span.sharers,
            .segment = span.begin / kSegmentPages,
            .segments = (span.keys + kSegmentKeys - 1) / kSegmentKeys};
}

template <int kSlots>
__device__ __forceinline__ void multiply_spans(const AttentionCall& c, const Ring<kSlots>& ring) {
    Warpgroup<kSlots> group{c, ring};
    const Held held(static_cast<char*>(c.work) + blockIdx.x * kHeldBytes);
    if (warpgroup() == 1) pass_turn();  // the first begins
    wait_for_predecessor();
#pragma unroll 1
    for (int round = 0;; ++round) {
        const Span& span = ring.told(round);
        if (span.end == 0) return;
        const bool shared = span.sharers > 1 && span.keys > kSegmentKeys,
                   in_turn = span.sharers <= kFewSharers;
        const bool stores = !shared || (in_turn && span.end * kKeysPerPage >= span.keys);
        Output o;
        Softmax state;
        group.add_span(span, held, stores, state, o);
        if (shared && in_turn) add_in_turn(sharing_of(c, span), state, o);
        if (shared && !in_turn) add_in_rounds<true>(c, span.tile, sharing_of(c, span), state, o);
        if (stores) group.store_rows(span, state, o);
    }
}

#endif

__global__ void __launch_bounds__(kBlockThreads, 1)
    attention_warpgroups_kernel(const __grid_constant__ AttentionCall c,
                                const __grid_constant__ CUtensorMap k,
                                const __grid_constant__ CUtensorMap v) {
#if QUERN_WGMMA
    extern __shared__ __align__(1024) char shared[];
    __shared__ Barriers barriers;
    allow_successor();
    if (c.unpacked && !fits_unpacked(c)) return wait_for_predecessor();
    const Ring<kPlainSlots> ring(shared, &barriers);
    ring.init(1);
    __syncthreads();
    if (threadIdx.x >= kThreads) {
        shrink_registers<24>();
        if (threadIdx.x / 32 == kWarps && elected()) copy_spans(c, ring, k, v);
    } else {
        grow_registers<240>();
        multiply_spans(c, ring);
    }
#endif
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    attention_warpgroups_packed_kernel(const __grid_constant__ AttentionCall c) {
#if QUERN_WGMMA
    extern __shared__ __align__(1024) char shared[];
    __shared__ Barriers barriers;
    __shared__ UnitBarriers unit_barriers;
    allow_successor();
    if (fits_unpacked(c)) return wait_for_predecessor();
    const Ring<kPackedSlots> ring(shared, &barriers);
    const Expander expander(c, ring, &unit_barriers);
    expander.init();
    ring.init(kExpanders);
    __syncthreads();
    if (threadIdx.x >= kThreads) {
        shrink_registers<56>();
        expand_spans(expander);
    } else {
        grow_registers<224>();
        multiply_spans(c, ring);
    }
#endif
}

/// Boxes are 64 columns of a page's K or V of one head.
CUtensorMap page_map(const AttentionCall& call, const bf16* cache) {
    const auto rows = static_cast<cuuint64_t>(call.cache_pages * call.kv_heads * kKeysPerPage);
    return make_map(cache, {.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                            .dimensions = 2,
                            .size = {kDim, rows},
                            .stride = {kDim * 2},
                            .box = {kDim / 4, kKeysPerPage},
                            .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
}

}  // namespace

void attention_prefill_warpgroups(const AttentionCall& call, Context& context) {
    const int64_t tiles = call.kv_heads * prompt_tiles(call.rows, call.sequences, call.heads / call.kv_heads);
    const int64_t segments = (call.max_keys + kSegmentKeys - 1) / kSegmentKeys;
    // Blocks wait for each other, so all must run at once.
    const int64_t blocks = std::min<int64_t>({context.sms, kSharingBlocks, tiles * segments});
    const dim3 grid(static_cast<unsigned>(blocks));
    const bool packed = call.k_packing != kv::Packing::plain;
    if (packed) {  // with room to unpack, one of the two that follow does all, the other nothing
        if (call.unpacked_room > 0) attention_unpack(call, context);
        launch(context, "gated_attention prefill warpgroups packed", attention_warpgroups_packed_kernel, grid,
               dim3(kBlockThreads), kPackedWarpgroupShared, call);
        if (call.unpacked_room == 0) return;
    }
    const AttentionCall plain = packed ? over_unpacked(call) : call;
    launch(context, "gated_attention prefill warpgroups", attention_warpgroups_kernel, grid,
           dim3(kBlockThreads), kWarpgroupShared, plain, page_map(plain, plain.k_cache),
           page_map(plain, plain.v_cache));
}

}  // namespace quern::cuda::attention
