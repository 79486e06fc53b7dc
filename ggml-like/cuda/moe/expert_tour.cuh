// Products of chosen experts with rows of prompts on sm_90a, a block an SM that goes from tile to tile.
//
//               tokens of an expert: up to 128
//   256 rows  w0 ..  w3 | sums: 16 rows of the    Sixteen warps multiply, 16 rows of the expert's matrix each; two more keep
//   of its    w4 ..  w7 | matrix x all tokens,    a ring of kStages stages full by the copy engine, each kChunks x 64 columns of
//   matrix    w8 .. w11 | each warp               the rows and the tokens. The ring never empties between tiles: sums leave
//             w12.. w15 |                         registers, turned in a little room beside it, while the next tile's columns arrive.
//
// FP8: 128 rows and eight multiplying warps, with registers for the sums of a stage, which its scales meet.
//
// The shared expert may come along, if its matrix is of the same shape and format.
//
// Tiles: an expert's tokens are cut evenly into as few tiles as hold them; (expert, tile of tokens) slow, rows of the matrix fast,
// so that neighbouring blocks read the same tokens. Block b takes tile b first, then whichever nobody has taken: they differ
// in size. The copying warps write what a tile is into a slot while the one before it is multiplied, so that its tokens are asked
// for as soon as a stage is free. Rows of x lie as groups have them: group_rows.cu lays them out for gate and up, and these leave theirs so
// for moe_down. Only they have to be waited for: lists are made, and the first stages' weights asked for, while the predecessor ends.
// Operands: A from registers, decoded there, a stage at a time, while other warpgroups multiply. B from shared memory, as
// many tokens as there are, in steps of 16.
// Order of sums: columns as they come, as everywhere in prompts of experts (gemm_experts.h).
// Traffic: packed weights once per tile of tokens, activations once per 256 rows of the matrix (FP8: 128), up to 15 rows more of a tile.
// Limits: up to Tour::kMaxExperts experts; weights that warpgroups take.
#pragma once

#include "ggml-like/cuda/linear/gemm_warpgroups.cuh"
#include "ggml-like/cuda/moe/expert_tour_copies.cuh"
#include "ggml-like/cuda/moe/expert_tour_products.cuh"

namespace quern::cuda::moe {

/// Barriers are static shared memory: a kernel that has none was not compiled for sm_90a.
template <Kind K>
__global__ void __launch_bounds__(Tour<K>::kThreads, 1)
    expert_tour(const __grid_constant__ GemmTask task, const __grid_constant__ CUtensorMap w,
                const __grid_constant__ CUtensorMap shared_w, const __grid_constant__ CUtensorMap x,
                const __grid_constant__ CUtensorMap shared_x) {
#if QUERN_WGMMA
    using S = Tour<K>;
    extern __shared__ __align__(1024) uint8_t unaligned[];
    __shared__ uint64_t barriers[2 * S::kStages + S::kSlots];
    uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const TourMemory<K> memory{
        task, w, shared_w, x, shared_x, shared, barriers, barriers + S::kStages, barriers + 2 * S::kStages};
    const TourCopies<K> copies{memory};
    copies.init_barriers();
    if (threadIdx.x < 32 && elected())
        prefetch_map(w), prefetch_map(shared_w), prefetch_map(x), prefetch_map(shared_x);
    allow_successor();
    copies.list_tiles();  // groups are there (moe.h); bring() waits for the predecessor
    if (threadIdx.x >= S::kSumThreads) {
        shrink_registers<S::kCopyRegisters>();
        copies.keep_full();
    } else {
        grow_registers<S::kSumRegisters>();
        TourProducts<K>{memory}.multiply_all();
    }
#endif
}

template <Kind K>
void launch_tour(Context& context, const char* what, GemmTask task) {
    using S = Tour<K>;
    if (task.cols % 8 != 0) unsupported(what, "a width that is not a multiple of 8");
    const int64_t rows = int64_t{task.tokens} * (task.used + 1);  // of y, at most
    if (rows * max(task.ldy, task.shared.ldy) >= int64_t{1} << 32)
        unsupported(what, "results of 2^32 elements or more");
    task.box_tiles = S::kTiles;
    task.row_blocks = (task.tiles + S::kTiles - 1) / S::kTiles;
    // Both may be under way, and so may the delta rule of an answer's next layer, which counts before it waits.
    task.counter = context.counters + kCounters + (task.down ? 1 : 0);
    const int64_t along = (task.shared.tokens + S::kTokens - 1) / S::kTokens,
                  places = task.row_blocks * (along + token_tiles(task, S::kTokens));
    GemmTask of_shared = task;
    if (along > 0) of_shared.data = task.shared.data, of_shared.experts = 1;
    const dim3 grid(static_cast<unsigned>(min(places, int64_t{context.sms})));
    GemmTask pairs = task;  // x has a row for each pair
    pairs.tokens = task.tokens * task.used, pairs.box_tokens = of_shared.box_tokens = S::kBoxTokens;
    if (along > 0) of_shared.x = task.shared.x;
    launch(context, what, expert_tour<K>, grid, dim3(S::kThreads), S::kShared, task, weight_map<K, S>(task),
           weight_map<K, S>(of_shared), token_map(pairs), token_map(of_shared));
}

}  // namespace quern::cuda::moe
