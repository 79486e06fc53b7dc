// Products of chosen experts with rows of prompts on sm_90a, a block an SM that goes from tile to tile.
//
//               tokens of an expert: up to 128
//   256 rows  w0 ..  w3 | sums: 16 rows of the    Sixteen warps multiply, 16 rows of the expert's matrix each; two more keep
//   of its    w4 ..  w7 | matrix x all tokens,    a ring of kStages stages full by the copy engine, each kChunks x 64 columns of
//   matrix    w8 .. w11 | each warp               the rows and the tokens. The ring never empties between tiles: sums leave
//             w12.. w15 |                         registers, turned in a little room beside it, while the next tile's columns arrive.
//
// The shared expert may come along, if its matrix is of the same shape and format.
//
// Tiles: an expert's tokens are cut evenly into as few tiles as hold them; (expert, tile of tokens) slow, 256 rows fast,
// so that neighbouring blocks read the same tokens. Block b takes tile b first, then whichever nobody has taken: they differ
// in size. The copying warps write what a tile is into a slot while the one before it is multiplied, so that its tokens are asked
// for as soon as a stage is free. Rows of x lie as groups have them: group_rows.cu lays them out for gate and up, and these leave theirs so
// for moe_down. Only they have to be waited for: lists are made, and the first stages' weights asked for, while the predecessor ends.
// Operands: A from registers, decoded there, a stage at a time, while other warpgroups multiply. B from shared memory, as
// many tokens as there are, in steps of 16.
// Order of sums: columns as they come, as everywhere in prompts of experts (gemm_experts.h).
// Traffic: packed weights once per tile of tokens, activations once per 256 rows of the matrix, up to 15 rows more of a tile.
// Limits: up to Tour::kMaxExperts experts; weights that warpgroups take.
#pragma once

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
        shrink_registers<32>();
        copies.keep_full();
    } else {
        grow_registers<112>();
        TourProducts<K>{memory}.multiply_all();
    }
#endif
}

}  // namespace quern::cuda::moe
