// The products of gemm.cuh on sm_90a: warpgroup products, and warps of their own that copy.
//
//               tokens: up to kTokens a block; of prompts as many in each tile, but for the last
//   128 rows  w0..w3 | sums: 16 rows      A block owns up to 128 weight rows (or 64) of one part, and a tile of
//             w4..w7 | x all tokens,      tokens. Eight warps (or four) multiply, 16 rows each. One more keeps a ring of
//                      each warp          kStages stages full, each kChunks chunks of 64 columns. With kCluster > 1 the blocks
//                                         of a cluster share the columns; their sums meet in the order of the ranks. With
//                                         kSides = 2, sixteen warps multiply. A block may take place after place (kStays).
//
// Traffic: as in gemm.cuh. A stage's weights come by the copy engine as one box, and so do its tokens.
// Operands: A from registers: packed weights are in its order, and codes are decoded there; for prompts while the products of
// the chunk before run. B from shared memory.
// FP8 with scales of chunks: fewer tokens a block (kScaledTokens), as the products of 128 columns need sums of their own.
// Files: warpgroup_shapes.h, shapes and shared memory; warpgroup_block.cuh, copies and products; warpgroup_store.cuh, from
// the sums to y.
#pragma once

#include "ggml-like/cuda/linear/warpgroup_store.cuh"
#include "ggml-like/cuda/ptx/tensor_map.cuh"
#include "ggml-like/cuda/variants.h"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// Barriers are static shared memory: a kernel that has none was not compiled for sm_90a.
template <Kind K, class S>
__global__ void CLUSTER_OF(S::kCluster) __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    warpgroup_kernel(const __grid_constant__ typename S::Task task, const __grid_constant__ CUtensorMap w,
                     const __grid_constant__ CUtensorMap x) {
#if QUERN_WGMMA
    using R = StageRing<K, S>;
    extern __shared__ __align__(1024) uint8_t unaligned[];
    __shared__ uint64_t barriers[2 * R::kStages + 1];
    uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    WarpgroupSums<K, S> block{
        {task, w, x, shared, barriers, barriers + R::kStages, barriers + 2 * R::kStages}};
    block.init_barriers();
    const int id = static_cast<int>(blockIdx.x) / S::kCluster;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    block.place = dense_place(task, id, block.token_step());
    block.find_extent();
    if (warp == 0 && elected()) prefetch_map(w), prefetch_map(x);
    __syncthreads();
    const int primed = min(R::kStages, block.steps());
    constexpr int kSumWarps = S::kSumThreads / 32;
    if (warp == kSumWarps && elected())
        for (int i = 0; i < primed; ++i) block.copy_weights(i);
    __syncwarp();
    bring_near(task);
    wait_for_predecessor();
    constexpr bool kReadsSums = S::kCluster > 1 && !S::kSendsSums;  // of other blocks, where they lie
    // Each kind of warp to its end by itself: code for both would be compiled for the fewer registers.
    if (warp >= kSumWarps) {
        if constexpr (S::kMoveRegisters) shrink_registers<40>();
        if (warp == kSumWarps && elected()) {
            if (block.stays())
                block.copy_rounds(primed);
            else
                block.keep_full(primed);
            allow_successor();  // only now: what that asks for early would delay these weights
        }
        __syncwarp();
        if constexpr (S::kSendsSums) cluster_arrive_only();
        if constexpr (kReadsSums)
            cluster_barrier(), cluster_barrier();  // before and after others' sums are read
        return;
    }
    if constexpr (S::kMoveRegisters) grow_registers<232>();
    if constexpr (S::kStays)
        if (block.stays()) return block.sum_rounds();
    block.find_y_rows();
    block.multiply_all();
    if constexpr (kReadsSums) cluster_barrier();
    if constexpr (S::kCluster == 1) block.sum_barrier();
    if constexpr (S::kAnswer)
        block.store_answer();
    else if (task.paired)
        block.template store_sums<true>();
    else
        block.template store_sums<false>();
    if constexpr (kReadsSums) cluster_barrier();
#endif
}

/// The dense x as boxes of box_tokens rows and 64 columns, in the order of products.
inline CUtensorMap token_map(const GemmTask& task) {
    return make_map(task.x,
                    {.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                     .dimensions = 2,
                     .size = {static_cast<cuuint64_t>(task.cols), static_cast<cuuint64_t>(task.tokens)},
                     .stride = {static_cast<cuuint64_t>(task.ldx8) * 16},
                     .box = {kChunkCols, static_cast<cuuint32_t>(task.box_tokens)},
                     .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
}
/// Packed weights as boxes of box_tiles tiles and a stage's chunks.
template <Kind K, class S>
CUtensorMap weight_map(const GemmTask& task) {
    constexpr int kBytes = chunk_bytes(K);
    const auto chunks = static_cast<cuuint64_t>(task.chunks), tiles = static_cast<cuuint64_t>(task.tiles);
    const bool grouped = task.experts > 0;
    const cuuint64_t experts = grouped ? task.experts : 1,
                     expert_bytes = grouped ? task.expert_bytes : tiles * chunks * kBytes;
    return make_map(task.data, {.type = CU_TENSOR_MAP_DATA_TYPE_UINT64,
                                .dimensions = 4,
                                .size = {kBytes / 8, chunks, tiles, experts},
                                .stride = {kBytes, chunks * kBytes, expert_bytes},
                                .box = {kBytes / 8, S::kChunks, static_cast<cuuint32_t>(task.box_tiles), 1},
                                .swizzle = CU_TENSOR_MAP_SWIZZLE_NONE});
}

/// Whether all that is stored is a BF16 number a row of the matrix, whole tiles of them, at multiples of 16 bytes.
inline bool has_plain_lines(const GemmTask& task) {
    const uintptr_t places = reinterpret_cast<uintptr_t>(task.y) | static_cast<uintptr_t>(task.ldy * 2);
    return !task.f32 && !task.paired && task.residual == nullptr && task.rows % kTileRows == 0 &&
           places % 16 == 0;
}

template <Kind K, class S>
void launch_warpgroups(Context& context, const char* what, typename S::Task task) {
    // Tokens that are not there would cost the copy engine as much as others. Products that read beyond make sums that nobody stores.
    if constexpr (S::kAnswer) {
        task.box_tiles = S::kTiles, task.box_tokens = min(S::kTokens, (task.tokens + 15) / 16 * 16);
    } else {
        const PromptCut cut = cut_prompt<S>(context.sms, task.tiles, task.tokens, task.chunk_scales);
        task.box_tiles = cut.tiles, task.box_tokens = cut.tokens;
    }
    task.row_blocks = (task.tiles + task.box_tiles - 1) / task.box_tiles;
    const int step = S::kAnswer ? S::kTokens : task.box_tokens;
    task.together = tiles_together(task, step);
    const int64_t blocks = int64_t{task.row_blocks} * token_tiles(task, step) * S::kCluster;
    task.stays = S::kTurns && blocks > context.sms && has_plain_lines(task);
    const bool few = task.stays || (S::kStays && S::kAnswer);
    const dim3 grid(static_cast<unsigned>(few ? min(blocks, int64_t{context.sms}) : blocks));
    launch(context, what, warpgroup_kernel<K, S>, grid, dim3(S::kThreads), StageRing<K, S>::kShared, task,
           weight_map<K, S>(task), token_map(task));
}

/// A prompt's product.
template <Kind K>
void launch_prompt(Context& context, PromptProduct product, const GemmTask& task) {
    const char* what = name_of(product);
    if (product == PromptProduct::wide) return launch_warpgroups<K, Wide>(context, what, task);
    if (product == PromptProduct::tall) return launch_warpgroups<K, Tall>(context, what, task);
    if (product == PromptProduct::halves) return launch_warpgroups<K, Halves>(context, what, task);
    if constexpr (K == Kind::bf16)
        if (product == PromptProduct::low_halves) return launch_warpgroups<K, LowHalves>(context, what, task);
    launch_warpgroups<K, ShortHalves<K>>(context, what, task);
}

}  // namespace quern::cuda::linear
