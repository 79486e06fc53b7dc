// Causal attention of prompt rows, after attention_prepare, on cards without products of warpgroups (prefill_warpgroups.cu).
//
//   tile      16 query rows x 8 heads of one KV head: 128 rows of M; all keys they may see, 32 a step. Fewer heads a KV
//             head: more query rows
//   warp      16 rows of M: q (64 registers), O [16, 256] (128) and S [16, 32]; its softmax needs no other warp
//   segment   2,048 keys from a multiple of 2,048 on, with a softmax and sums of its own, which are added to those of
//             the segments before it
//
//   many tiles   a block has a tile, and its sums of the segments so far lie in shared memory:
//
//                  block 0: tile 0 |0 1 2 3 4 5 6 7 8|     block 1: tile 1 |0 1 2 3 4 5 6 7 8|     ...
//
//   few tiles    a block has a segment; as many segments of a tile as run at once are a round. At the end of a round
//                each of its blocks adds the round's segments in order, from work space, for its part of the elements:
//
//                  tile 0 |0|1|2|  |3|4|5|  |6|7|8|        tile 1 |0|1|2|  |3|4|5|  |6|7|8|        ...
//
// Both add the same numbers in the same order, and no row's arithmetic looks at another row: a row's bits depend on its
// keys alone.
//
// Shared memory: a ring of three stages (96 KB), each K and V of 32 keys; while step j is computed, step j + 2 is
// copied. q, then the gates, pass through the same memory. With 227 KB the sums so far (130 KB) follow the ring; with
// less they lie in work space, and a launch has no more tiles than that holds.
//
// Traffic: q, gate and y once; K and V once a tile, mostly from L2: 2 KB a key for 128 rows. Bound: traffic of shared
// memory, since each warp reads all keys of a tile. Tiles with the most keys of a sequence start first. Measured for
// 2,048 rows: 465 us in a prompt of 8K, 1,651 us in one of 32K, about 330 TFLOP/s (H200, 2026-11).
// Limits: head_dim 256, at most 8 query heads a KV head.
#include "ggml-like/cuda/attention/prefill_packed.cuh"
#include "ggml-like/cuda/attention/prefill_segments.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

using namespace prefill;

/// The warp's rows of y: divided by the sum, gated and rounded in place of the gates in shared memory, then stored as
/// whole rows.
__device__ __forceinline__ void store_rows(const AttentionCall& c, const WarpRows& rows, const Output& o,
                                           const Softmax& state, int lane, char* gates) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        char* row = gates + (lane / 4 + 8 * h) * kDim * 2 + lane % 4 * 4;
        const float over_sum = 1.0f / state.sum[h];
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            auto* at = reinterpret_cast<uint32_t*>(row + ((n ^ (lane / 4)) << 4));
            *at = gated(o[n][2 * h], o[n][2 * h + 1], over_sum, *at);
        }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; ++r) {
        const int row = __shfl_sync(0xffffffffu, rows.row, r), head = __shfl_sync(0xffffffffu, rows.head, r);
        const uint4 y = *reinterpret_cast<const uint4*>(gates + r * kDim * 2 + ((lane ^ (r & 7)) << 4));
        if (__shfl_sync(0xffffffffu, rows.own, r))
            *reinterpret_cast<uint4*>(c.y + (static_cast<int64_t>(row) * c.heads + head) * kDim + lane * 8) =
                y;
    }
}

/// A step of 32 keys that lie in a stage.
__device__ __forceinline__ void add_step(int step, char* stage, const uint32_t (&q)[kSteps][4],
                                         int first_position, const int (&last)[2], Softmax& state,
                                         Output& o) {
    const int lane = threadIdx.x % 32;
    const float scale = score_scale(kDim);
    const uint32_t k_tile = shared_address(stage);
    Scores s;
    score(k_tile, q, lane, s);
    if ((step + 1) * kKeys - 1 > first_position) mask(s, step * kKeys + 2 * (lane % 4), last[0], last[1]);
    apply(move_maxima(s, scale, state), o);
    weigh(s, scale, state);
    add_values(k_tile + kTileBytes, s, lane, o);
}

/// Before a step that begins a segment: keeps the sums of the segments before it.
__device__ __forceinline__ void end_segment(int step, const Held& held, Softmax& state, Output& o) {
    if (step == 0 || step % kSegmentSteps != 0) return;
    add_lanes(state);
    if (step > kSegmentSteps) add_held<false>(held, state, o);
    keep(held, state, o);
    clear(state, o);
}

/// The tile's sums over the keys of steps begin .. end-1. kHolds: the steps are of several segments, and `held` keeps
/// the sums of those before. The ring must be free; afterwards it is free again.
template <bool kHolds>
__device__ __forceinline__ void attend(const AttentionCall& c, const Tile& tile, int keys, int begin, int end,
                                       const Held& held, Softmax& state, Output& o, char* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Stages 0 and 1 take q first, so the first keys go to stage 2.
    const WarpRows rows = warp_rows(c, tile, threadIdx.x);
    char* own_rows = shared + warp * 16 * kDim * 2;
    start_rows({c.rotated, static_cast<int64_t>(c.heads) * kDim, kDim}, rows, lane, own_rows);
    commit_copies();
    const int first_position = c.positions[tile.first];
    const int* pages = c.pages + tile.sequence * c.page_row;
    const auto page_of = [&](int step) { return pages[min(step, end - 1) * kKeys / kKeysPerPage]; };
    int page = page_of(begin), stage = kStages - 1;
    start_tile(c, tile, page, begin, keys, shared + stage * kStageBytes);
    commit_copies();
    page = page_of(begin + 1);
    int last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) last[h] = c.positions[__shfl_sync(0xffffffffu, rows.row, lane / 4 + 8 * h)];
    wait_copies<1>();
    __syncwarp();
    uint32_t q[kSteps][4];
    load_queries(shared_address(own_rows), lane, q);
    __syncthreads();
    if (begin + 1 < end) start_tile(c, tile, page, begin + 1, keys, shared);
    commit_copies();
    page = page_of(begin + kStages - 1);

    clear(state, o);
    for (int step = begin; step < end; ++step) {
        wait_copies<kStages - 2>();
        __syncthreads();
        const int ahead = step + kStages - 1, free_stage = stage == 0 ? kStages - 1 : stage - 1;
        if (ahead < end) start_tile(c, tile, page, ahead, keys, shared + free_stage * kStageBytes);
        commit_copies();
        page = page_of(ahead + 1);

        if (kHolds) end_segment(step, held, state, o);
        add_step(step, shared + stage * kStageBytes, q, first_position, last, state, o);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    add_lanes(state);
    if (kHolds && end > kSegmentSteps) add_held<false>(held, state, o);
    __syncthreads();  // the ring is free
}

/// The same over packed caches (prefill_packed.cuh).
template <bool kHolds>
__device__ __forceinline__ void attend_packed(const AttentionCall& c, const Tile& tile, int keys, int begin,
                                              int end, const Held& held, Softmax& state, Output& o,
                                              char* shared) {
    const int lane = threadIdx.x % 32;
    const WarpRows rows = warp_rows(c, tile, threadIdx.x);
    char* own_rows = shared + threadIdx.x / 32 * 16 * kDim * 2;  // in the stages
    start_rows({c.rotated, static_cast<int64_t>(c.heads) * kDim, kDim}, rows, lane, own_rows);
    commit_copies();
    Staging staging(c, tile, keys, begin, end, shared);
    staging.start(begin), staging.start(begin + 1);
    int last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) last[h] = c.positions[__shfl_sync(0xffffffffu, rows.row, lane / 4 + 8 * h)];
    wait_copies<2>();
    __syncwarp();
    uint32_t q[kSteps][4];
    load_queries(shared_address(own_rows), lane, q);
    wait_copies<1>();
    __syncthreads();
    staging.expand(begin);
    staging.start(begin + 2);
    const int first_position = c.positions[tile.first];
    clear(state, o);
#pragma unroll 1
    for (int step = begin; step < end; ++step) {
        wait_copies<1>();
        __syncthreads();
        staging.expand(step + 1);
        staging.start(step + 3);
        if (kHolds) end_segment(step, held, state, o);
        add_step(step, shared + step % 2 * kStageBytes, q, first_position, last, state, o);
    }
    add_lanes(state);
    if (kHolds && end > kSegmentSteps) add_held<false>(held, state, o);
    wait_copies<0>();
    __syncthreads();  // the ring is free
}

/// y of the tile. The ring must be free.
__device__ __forceinline__ void store_tile(const AttentionCall& c, const Tile& tile, const Softmax& state,
                                           const Output& o, char* shared) {
    const int lane = threadIdx.x % 32;
    const WarpRows rows = warp_rows(c, tile, threadIdx.x);
    char* own_rows = shared + threadIdx.x / 32 * 16 * kDim * 2;
    start_rows(c.gate, rows, lane, own_rows);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    store_rows(c, rows, o, state, lane, own_rows);
}

/// The block's tile; returns how many keys its last row sees, 0 if there is no such tile.
__device__ __forceinline__ int find_block(const AttentionCall& c, int block, Tile& tile) {
    tile.kv_head = block % c.kv_heads;
    if (!find_tile(c, block / c.kv_heads, kRows / (c.heads / c.kv_heads), tile)) return 0;
    return c.positions[tile.first + tile.rows - 1] + 1;
}

__device__ __forceinline__ int steps_of(int keys) { return (keys + kKeys - 1) / kKeys; }

/// Many tiles: one a block. kInShared: the sums of the segments before lie in shared memory, else in work space.
template <bool kInShared, bool kPacked>
__global__ void __launch_bounds__(kThreads, 1)
    attention_tiles_kernel(const __grid_constant__ AttentionCall c, int first_block) {
    extern __shared__ __align__(1024) char shared[];
    allow_successor();
    Tile tile;
    const int keys = find_block(c, first_block + static_cast<int>(blockIdx.x), tile);
    wait_for_predecessor();
    if (keys == 0) return;
    const Held held(kInShared ? shared + kSharedBytes : static_cast<char*>(c.work) + blockIdx.x * kHeldBytes);
    Output o;
    Softmax state;
    if constexpr (kPacked)
        attend_packed<true>(c, tile, keys, 0, steps_of(keys), held, state, o, shared);
    else
        attend<true>(c, tile, keys, 0, steps_of(keys), held, state, o, shared);
    store_tile(c, tile, state, o, shared);
}

/// Few tiles: a block a segment; the `together` blocks of a round wait for each other. Blocks start in the order of the
/// grid, round after round, and a round of all tiles fits onto the card; blocks without a segment leave at once.
template <bool kPacked>
__global__ void __launch_bounds__(kThreads, 1)
    attention_shared_tiles_kernel(const __grid_constant__ AttentionCall c, int together) {
    extern __shared__ __align__(1024) char shared[];
    allow_successor();
    Tile tile;
    const int keys = find_block(c, blockIdx.x, tile), segments = (keys + kSegmentKeys - 1) / kSegmentKeys;
    const int segment = blockIdx.y, begin = segment * kSegmentSteps;
    if (segment == 0) wait_for_predecessor();
    if (segment >= segments) return;
    if (segment > 0) wait_for_predecessor();
    char* slots = static_cast<char*>(c.work) + blockIdx.x * (together + 1) * kHeldBytes;
    const Sharing sharing{.slots = slots,
                          .apart = kHeldBytes,
                          .sums_so_far = slots + together * kHeldBytes,
                          .done = c.counters + blockIdx.x,
                          .blocks = together,
                          .segment = segment,
                          .segments = segments};
    const Held own = sharing.held(sharing.own());
    Output o;
    Softmax state;
    const int end = min(begin + kSegmentSteps, steps_of(keys));
    if constexpr (kPacked)
        attend_packed<false>(c, tile, keys, begin, end, own, state, o, shared);
    else
        attend<false>(c, tile, keys, begin, end, own, state, o, shared);
    if (segments == 1) return store_tile(c, tile, state, o, shared);
    add_in_rounds<false>(c, tile, sharing, state, o);
}

}  // namespace

void attention_prefill(const AttentionCall& call, Context& context) {
    static_assert(kSharingBlocks <= kCounters);
    constexpr const char* kName = "gated_attention prefill";
    const int blocks =
        call.kv_heads * static_cast<int>(prompt_tiles(call.rows, call.sequences, call.heads / call.kv_heads));
    // Blocks of a tile that wait for each other must run at once.
    const int together = std::min(context.sms, kSharingBlocks) / blocks;
    const int segments = (call.max_keys + kSegmentKeys - 1) / kSegmentKeys;
    const bool packed = call.k_packing != kv::Packing::plain;
    const int bytes = packed ? kPackedSharedBytes : kSharedBytes;
    if (together > 1 && segments > 1)
        return launch(context, kName,
                      packed ? attention_shared_tiles_kernel<true> : attention_shared_tiles_kernel<false>,
                      dim3(blocks, segments), dim3(kThreads), bytes, call, std::min(together, segments));
    if (!packed && context.shared_bytes >= kHeldSharedBytes)
        return launch(context, kName, attention_tiles_kernel<true, false>, dim3(blocks), dim3(kThreads),
                      kHeldSharedBytes, call, 0);
    for (int first = 0; first < blocks; first += kHeldSlots)
        launch(context, kName,
               packed ? attention_tiles_kernel<false, true> : attention_tiles_kernel<false, false>,
               dim3(std::min(kHeldSlots, blocks - first)), dim3(kThreads), bytes, call, first);
}

}  // namespace quern::cuda::attention
