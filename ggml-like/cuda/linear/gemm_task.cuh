// What a product of packed weights with many rows is given, and which part of it a block takes.
#pragma once

#include "ggml-like/cuda/comm/peers.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/gemm_shapes.h"
#include "ggml-like/cuda/linear/step_product.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

struct GemmTask {
    const uint8_t* data;  // of the part, or of expert 0
    const float* factor;
    int tiles;
    int chunks;
    int cols;
    int rows;  // of y that are stored: a paired part's are half of its own
    int row_blocks;
    int together;  // dense: token tiles that come before the next rows (tiles_together)
    bool stays;    // of a prompt, with products of warpgroups: blocks go from place to place
    bool paired;
    bool f32;
    bool chunk_scales;  // Part::chunk_scales of a dense matrix; products of experts always read their scales
    const bf16* x;
    int ldx8;  // in 16 bytes
    int tokens;
    int box_tiles;  // of a block's box of weights, with products of warpgroups; of prompts also from a block to the next
    int box_tokens;  // that the copy engine brings at a time, with products of warpgroups; of prompts also from a tile to the next
    void* y;
    int64_t ldy;
    const float* residual;
    int64_t residual_ld;
    RowScale scale;  // of rows of x
    Defer defer;     // of rows of y, which are F32, from its column defer_begin on; h null: nothing
    int defer_begin;
    // Answers only: instead of what is said of y, residual and scale
    StepOutput answer;
    // Grouped only:
    const int* groups;  // or null
    int64_t expert_bytes;
    int experts;
    int used;
    /// x by place in groups, y by pair, with a free row after each token's. Else y by place in groups; x by token, of the tour by place.
    bool down;
    int stages;
    struct {         // the shared expert's product beside those of chosen ones: row n of x makes row n of y
        int tokens;  // 0: not here
        const uint8_t* data;
        const float* factor;
        const bf16* x;
        void* y;
        int64_t ldy;
    } shared;
    unsigned* counter;  // of blocks that take tile after tile: zero, and again in the end
};

/// Of answers whose sums are over ranks.
struct RankTask : GemmTask {
    comm::Peers peers;
};

/// What any product of one part of a matrix is given. ldx: between rows of x, in elements.
inline GemmTask part_task(const Packed& w, const Part& part, const bf16* x, int64_t ldx, int tokens) {
    GemmTask task{};
    task.data = part.data;
    task.factor = part.factor;
    task.tiles = part.tiles;
    task.chunks = w.chunks;
    task.cols = w.cols;
    task.rows = part.rows;
    task.chunk_scales = part.chunk_scales;
    task.x = x;
    task.ldx8 = static_cast<int>(ldx / 8);
    task.tokens = tokens;
    return task;
}

/// Tiles of `size` tokens. Grouped, an upper bound: the sum of ceil(pairs of expert e / size).
inline int64_t token_tiles(const GemmTask& task, int size) {
    if (task.groups == nullptr) return (task.tokens + size - 1) / size;
    const int64_t pairs = static_cast<int64_t>(task.tokens) * task.used;
    const int64_t owners = pairs < task.experts ? pairs : task.experts;
    return (pairs + owners * (size - 1)) / size;
}

/// Where a block works. Everything but `expert` and `pairs` is also known for dense work.
struct GemmPlace {
    int expert;
    int row_block;
    int first;  // token, or index into the expert's pairs
    int count;  // tokens of this tile; 0: nothing to do
};

/// How many token tiles of `step` tokens come before the matrix's next rows: as many as L2 has room for, from 2 to 16, since blocks of
/// each few rows read them anew.
inline int tiles_together(const GemmTask& task, int step) {
    constexpr int64_t kRoom = 12 << 20;  // elements: half of an H200's L2
    int tiles = 16;
    while (tiles > 2 && int64_t{tiles} * step * task.cols > kRoom) tiles /= 2;
    return tiles;
}

/// Blocks that run at the same time share weights and activations. `step`: tokens from a tile to the next.
__device__ __forceinline__ GemmPlace dense_place(const GemmTask& task, int id, int step) {
    const int token_tiles = (task.tokens + step - 1) / step, together = task.together;
    const int group = id / (together * task.row_blocks);
    const int within = id - group * together * task.row_blocks;
    const int width = min(together, token_tiles - group * together);
    GemmPlace place{};
    place.row_block = within / width;
    place.first = (group * together + within % width) * step;
    place.count = min(step, task.tokens - place.first);
    return place;
}

/// The expert that owns tile `wanted` of the list of all experts' token tiles; whole warps only, same answer
/// in each.
template <class S>
__device__ __forceinline__ GemmPlace grouped_place(const GemmTask& task, int id) {
    const int wanted = id / task.row_blocks;
    const int lane = threadIdx.x % 32;
    GemmPlace place{};
    place.row_block = id % task.row_blocks;
    int before = 0;
    for (int e0 = 0; e0 < task.experts; e0 += 256) {
        // A lane takes 8 neighbours.
        const int mine = e0 + lane * 8;
        int offset[9];
#pragma unroll
        for (int i = 0; i < 9; ++i) offset[i] = task.groups[min(mine + i, task.experts)];
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += (offset[i + 1] - offset[i] + S::kTokens - 1) / S::kTokens;
        int end = sum;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            const int other = __shfl_up_sync(0xffffffffu, end, d);
            if (lane >= d) end += other;
        }
        end += before;
        const unsigned past = __ballot_sync(0xffffffffu, end > wanted);
        if (past != 0) {
            int begin = end - sum;
            int count = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int n = offset[i + 1] - offset[i];
                const int tiles = (n + S::kTokens - 1) / S::kTokens;
                if (wanted >= begin && wanted < begin + tiles) {
                    const int skipped = (wanted - begin) * S::kTokens;
                    place.expert = mine + i;
                    place.first = offset[i] + skipped;
                    count = min(S::kTokens, n - skipped);
                }
                begin += tiles;
            }
            const int owner = __ffs(static_cast<int>(past)) - 1;
            place.expert = __shfl_sync(0xffffffffu, place.expert, owner);
            place.first = __shfl_sync(0xffffffffu, place.first, owner);
            place.count = __shfl_sync(0xffffffffu, count, owner);
            return place;
        }
        before = __shfl_sync(0xffffffffu, end, 31);
    }
    return place;
}

/// Rows of x and y of token `n`, or of entry `n` of the experts' pairs.
struct GemmRows {
    int x, y;
};
__device__ __forceinline__ GemmRows rows_of(const GemmTask& task, int n) {
    if (task.groups == nullptr) return {n, n};
    const int pair = task.groups[task.experts + 1 + n];
    const int token = pair / task.used;
    return task.down ? GemmRows{n, pair + token} : GemmRows{token, n};
}

}  // namespace quern::cuda::linear
