// Products of packed weights with many rows of activations; one kernel template for dense, paired and grouped
// work.
//
//              tokens: kTokens per block           A block owns kTiles x 16 weight rows of one part or one
//              expert and
//   rows  w0 | acc: kWarpTiles x 16 rows, all  |   a tile of tokens, over all columns. A warp owns kWarpTiles
//   tiles x
//         w1 | tokens of the block, per warp   |   all tokens (no code is decoded twice); in the shape for
//         few tokens
//         .. | chunks of 64 columns march on   |   kWarpsK warps take the chunks of a stage in turn and add
//         up after.
//
// Traffic: packed weights once per token tile and activations once per row block, both by 16-byte cp.async
// through a ring of stages in shared memory; weights in fragment order (no ldmatrix), activations as rows of
// 128 bytes whose 16-byte columns are XORed with the row. Outputs leave through shared memory as 16-byte
// stores. Limits: ld and rows of x in multiples of 16 bytes, tokens * ldx < 2^34, at most 8192 tiles of
// tokens times rows / 32.
#pragma once

#include "ggml-like/cuda/linear/gemm_store.cuh"
#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/pack/weight_chunk.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// Copies the first `bytes` of 16 and writes zeros for the rest.
__device__ __forceinline__ void copy_async_part(void* to_shared, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from),
                 "r"(bytes));
}

template <Kind K, class S>
struct GemmBlock {
    const GemmTask& task;
    uint8_t* shared;
    GemmPlace place;
    const uint8_t* weights;     // of the block's first tile
    int tiles;                  // of the block that exist
    uint32_t x_row[S::kLoads];  // in 16 bytes; of the rows of x that this thread copies
    int wanted_loads;           // of them that exist

    __device__ __forceinline__ uint8_t* token_stage(int stage) const {
        return shared + stage * kTokenStage<S>;
    }
    __device__ __forceinline__ uint8_t* weight_stage(int stage) const {
        return shared + task.stages * kTokenStage<S> + stage * kWeightStage<K, S>;
    }
    __device__ __forceinline__ int* y_rows() const {
        return reinterpret_cast<int*>(shared + task.stages * kStage<K, S>);
    }

    /// Factors of the tile's rows.
    __device__ __forceinline__ float* scales() const {
        return reinterpret_cast<float*>(y_rows() + S::kTokens);
    }

    __device__ __forceinline__ void find_weights() {
        const int tile = place.row_block * S::kTiles;
        weights = task.data + place.expert * task.expert_bytes +
                  static_cast<int64_t>(tile) * task.chunks * chunk_bytes(K);
        tiles = min(S::kTiles, task.tiles - tile);
    }

    /// Which rows of x this thread copies, and where the tile's rows of y go.
    __device__ __forceinline__ void find_rows() {
        const int row0 = static_cast<int>(threadIdx.x) / 8;
        wanted_loads = 0;
#pragma unroll
        for (int i = 0; i < S::kLoads; ++i) {
            const int n = row0 + i * S::kLoadRows;
            if (n >= place.count) break;
            ++wanted_loads;
            x_row[i] =
                static_cast<uint32_t>(rows_of(task, place.first + n).x) * static_cast<uint32_t>(task.ldx8);
        }
        for (int n = threadIdx.x; n < place.count; n += S::kThreads) {
            const GemmRows rows = rows_of(task, place.first + n);
            y_rows()[n] = rows.y;
            scales()[n] = task.scale.squares != nullptr ? prompt_factor(task.scale, rows.x) : 1.0f;
        }
    }

    __device__ __forceinline__ void copy_weights(int stage, int step) const {
        constexpr int kPieces = chunk_bytes(K) / 16;  // of a chunk; the chunks of a stage are neighbours
        uint8_t* to = weight_stage(stage);
        const int chunk = step * S::kWarpsK;
        const int there = min(S::kWarpsK, task.chunks - chunk) * kPieces;
        constexpr int kAll = S::kTiles * S::kWarpsK * kPieces;
#pragma unroll
        for (int i = 0; i < (kAll + S::kThreads - 1) / S::kThreads; ++i) {
            const int piece = i * S::kThreads + static_cast<int>(threadIdx.x);
            const int tile = piece / (S::kWarpsK * kPieces);
            const int within = piece - tile * (S::kWarpsK * kPieces);
            if (tile < tiles && within < there)
                copy_async16(to + piece * 16,
                             weights + (static_cast<int64_t>(tile) * task.chunks + chunk) * chunk_bytes(K) +
                                 within * 16);
        }
    }

    __device__ __forceinline__ void copy_tokens(int stage, int step) const {
        const int column = threadIdx.x % 8;
        const int row0 = static_cast<int>(threadIdx.x) / 8;
        uint8_t* to = token_stage(stage) + row0 * 128 + ((column ^ (row0 & 7)) << 4);
#pragma unroll
        for (int c = 0; c < S::kWarpsK; ++c) {
            const int k = (step * S::kWarpsK + c) * kChunkCols + column * 8;
            const int bytes = max(0, min(16, (task.cols - k) * 2));
            const bf16* from = task.x + (bytes > 0 ? k : 0);
#pragma unroll
            for (int i = 0; i < S::kLoads; ++i)
                if (i < wanted_loads)
                    copy_async_part(to + c * (S::kTokens * 128) + i * (S::kLoadRows * 128),
                                    from + static_cast<uint64_t>(x_row[i]) * 8, bytes);
        }
    }
};

/// acc += the warp's tiles x the first kN16 * 16 tokens, over one chunk. A stage holds kTileChunks chunks of
/// each tile.
template <Kind K, int kWarpTiles, int kN16, int kTileChunks, int kAccN>
__device__ __forceinline__ void multiply_chunk(float (&acc)[kWarpTiles][kAccN][4], const uint8_t* weights,
                                               uint32_t tokens) {
    const int lane = threadIdx.x % 32;
    // ldmatrix: k halves in matrices 0/1 and 2/3, tokens 0..7 in 0 and 1, 8..15 in 2 and 3.
    const int row = (lane & 7) + ((lane >> 4) << 3);
    const uint32_t place = static_cast<uint32_t>(row * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4));
    WeightChunk<K> chunk[kWarpTiles];
#pragma unroll
    for (int i = 0; i < kWarpTiles; ++i) chunk[i].load(weights + i * kTileChunks * chunk_bytes(K), lane);
    if constexpr (K != Kind::fp8) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            uint32_t a[kWarpTiles][4];
#pragma unroll
            for (int i = 0; i < kWarpTiles; ++i) chunk[i].fragment(kk, a[i]);
            const uint32_t from = tokens + (place ^ static_cast<uint32_t>(kk * 32));
#pragma unroll
            for (int j = 0; j < kN16; ++j) {
                uint32_t b[4];
                load_matrices(b, from + j * 2048);
#pragma unroll
                for (int i = 0; i < kWarpTiles; ++i) {
                    mma(acc[i][2 * j], a[i], b[0], b[1]);
                    mma(acc[i][2 * j + 1], a[i], b[2], b[3]);
                }
            }
        }
    } else {
        // The chunk's scale is FP32: it meets the chunk's sum, not the weights.
        uint32_t a[4][kWarpTiles][4];
#pragma unroll
        for (int kk = 0; kk < 4; ++kk)
#pragma unroll
            for (int i = 0; i < kWarpTiles; ++i) chunk[i].fragment(kk, a[kk][i]);
#pragma unroll
        for (int j = 0; j < kN16; ++j) {
            float sum[kWarpTiles][2][4] = {};
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) {
                uint32_t b[4];
                load_matrices(b, tokens + (place ^ static_cast<uint32_t>(kk * 32)) + j * 2048);
#pragma unroll
                for (int i = 0; i < kWarpTiles; ++i) {
                    mma(sum[i][0], a[kk][i], b[0], b[1]);
                    mma(sum[i][1], a[kk][i], b[2], b[3]);
                }
            }
#pragma unroll
            for (int i = 0; i < kWarpTiles; ++i)
#pragma unroll
                for (int n = 0; n < 2; ++n)
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        acc[i][2 * j + n][r] =
                            fmaf(chunk[i].scale[r / 2], sum[i][n][r], acc[i][2 * j + n][r]);
        }
    }
}

__device__ __forceinline__ void wait_stage(int stages) {
    if (stages == 2)
        wait_copies<0>();
    else if (stages == 3)
        wait_copies<1>();
    else
        wait_copies<2>();
}

/// The march over the columns. Weights of the first stages are already under way, uncommitted.
template <Kind K, class S, int kN16>
__device__ __forceinline__ void march(const GemmBlock<K, S>& block,
                                      float (&acc)[S::kWarpTiles][S::kTokens / 8][4]) {
    const int stages = block.task.stages;
    const int steps = (block.task.chunks + S::kWarpsK - 1) / S::kWarpsK;
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % S::kWarpsM, warp_k = warp / S::kWarpsM;
    const int weights_at = (warp_m * S::kWarpTiles * S::kWarpsK + warp_k) * chunk_bytes(K);
    int stage = 0;
    for (int step = 0; step < steps; ++step) {
        wait_stage(stages);
        __syncthreads();
        const int ahead = step + stages - 1;
        if (ahead < steps) {
            const int to = stage == 0 ? stages - 1 : stage - 1;
            block.copy_weights(to, ahead);
            block.copy_tokens(to, ahead);
        }
        commit_copies();
        if (S::kWarpsK == 1 || step * S::kWarpsK + warp_k < block.task.chunks)
            multiply_chunk<K, S::kWarpTiles, kN16, S::kWarpsK>(
                acc, block.weight_stage(stage) + weights_at,
                shared_address(block.token_stage(stage) + warp_k * S::kTokens * 128));
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    wait_copies<0>();
    __syncthreads();
}

/// Factors, silu and stores. The warp turns 16 tokens at a time through its own piece of shared memory: a
/// lane holds neighbouring tokens, memory wants neighbouring rows.
template <Kind K, class S>
__device__ __forceinline__ void store_tile(const GemmBlock<K, S>& block,
                                           float (&acc)[S::kWarpTiles][S::kTokens / 8][4], int warp_m) {
    const GemmTask& task = block.task;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int tile0 = block.place.row_block * S::kTiles + warp_m * S::kWarpTiles;
    if (tile0 >= task.tiles) return;
    constexpr int kPitch = S::kWarpTiles * 16 + 4;
    float* transposed = reinterpret_cast<float*>(block.shared) + warp_m * 16 * kPitch;
    float factor[S::kWarpTiles][2];
#pragma unroll
    for (int i = 0; i < S::kWarpTiles; ++i) {
        const int tile = min(tile0 + i, task.tiles - 1);
        const float* f =
            task.factor + (static_cast<int64_t>(block.place.expert) * task.tiles + tile) * 16 + g;
        factor[i][0] = f[0] * kRowLift<K>;
        factor[i][1] = f[8] * kRowLift<K>;
    }
    const int tile_rows = task.paired ? 8 : 16;
    const int row0 = tile0 * tile_rows;
    const int warp_rows = S::kWarpTiles * tile_rows;
    const int lanes = warp_rows / 8;  // of one token: a power of two
#pragma unroll
    for (int j = 0; j < S::kTokens / 16; ++j) {
        if (j * 16 >= block.place.count) break;
        __syncwarp();
#pragma unroll
        for (int i = 0; i < S::kWarpTiles; ++i)
#pragma unroll
            for (int n = 0; n < 2; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    float* to = transposed + (n * 8 + 2 * t + r) * kPitch + i * tile_rows + g;
                    const float scale =
                        block.scales()[min(j * 16 + n * 8 + 2 * t + r, block.place.count - 1)];
                    const float low = acc[i][2 * j + n][r] * factor[i][0] * scale;
                    const float high = acc[i][2 * j + n][r + 2] * factor[i][1] * scale;
                    if (task.paired) {
                        to[0] = gated_prompt(low, high);
                    } else {
                        to[0] = low;
                        to[8] = high;
                    }
                }
        __syncwarp();
        for (int at = lane; at < 16 * lanes; at += 32) {
            const int n = at / lanes, row = at % lanes * 8;
            const int token = j * 16 + n;
            const int there = task.rows - row0 - row;
            if (token >= block.place.count || there <= 0) continue;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 s = *reinterpret_cast<const float4*>(transposed + n * kPitch + row + i);
                v[i] = s.x, v[i + 1] = s.y, v[i + 2] = s.z, v[i + 3] = s.w;
            }
            store_row(task, v, block.y_rows()[token], row0 + row, there, NormOfEight(task, row0 + row));
        }
    }
}

/// Sums of the warps along K, in their order, into the first.
template <class S>
__device__ __forceinline__ void add_up(uint8_t* shared, float (&acc)[S::kWarpTiles][S::kTokens / 8][4],
                                       int warp_m, int warp_k) {
    constexpr int kEach = S::kWarpTiles * S::kTokens / 8;
    float4* sums = reinterpret_cast<float4*>(shared);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const float(&v)[4] = acc[i / (S::kTokens / 8)][i % (S::kTokens / 8)];
        if (warp_k > 0)
            sums[(((warp_k - 1) * S::kWarpsM + warp_m) * kEach + i) * 32 + lane] =
                make_float4(v[0], v[1], v[2], v[3]);
    }
    __syncthreads();
    if (warp_k == 0) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            float(&v)[4] = acc[i / (S::kTokens / 8)][i % (S::kTokens / 8)];
            for (int k = 0; k < S::kWarpsK - 1; ++k) {
                const float4 other = sums[((k * S::kWarpsM + warp_m) * kEach + i) * 32 + lane];
                v[0] += other.x, v[1] += other.y, v[2] += other.z, v[3] += other.w;
            }
        }
    }
    __syncthreads();
}

template <Kind K, class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    gemm_kernel(const __grid_constant__ GemmTask task) {
    extern __shared__ __align__(1024) uint8_t shared[];
    GemmBlock<K, S> block{task, shared};
    const int steps = (task.chunks + S::kWarpsK - 1) / S::kWarpsK;
    const int primed = min(task.stages - 1, steps);
    if (task.groups == nullptr) {
        allow_successor();
        block.place = dense_place(task, static_cast<int>(blockIdx.x), S::kTokens);
        block.find_weights();
        for (int i = 0; i < primed; ++i) block.copy_weights(i, i);
        wait_for_predecessor();
    } else {
        wait_for_predecessor();
        allow_successor();  // only now, as moe.h wants it
        block.place = grouped_place<S>(task, static_cast<int>(blockIdx.x));
        if (block.place.count == 0) return;
        block.find_weights();
        for (int i = 0; i < primed; ++i) block.copy_weights(i, i);
    }
    block.find_rows();
    for (int i = 0; i < task.stages - 1; ++i) {
        if (i < primed) block.copy_tokens(i, i);
        commit_copies();
    }
    float acc[S::kWarpTiles][S::kTokens / 8][4] = {};
    if constexpr (S::kSkip) {
        constexpr int kN16 = S::kTokens / 16;
        const int quarter = (block.place.count + S::kTokens / 4 - 1) / (S::kTokens / 4);
        if (quarter <= 1)
            march<K, S, kN16 / 4>(block, acc);
        else if (quarter == 2)
            march<K, S, kN16 / 2>(block, acc);
        else if (quarter == 3)
            march<K, S, kN16 / 4 * 3>(block, acc);
        else
            march<K, S, kN16>(block, acc);
    } else {
        march<K, S, S::kTokens / 16>(block, acc);
    }
    const int warp = threadIdx.x / 32;
    const int warp_m = warp % S::kWarpsM, warp_k = warp / S::kWarpsM;
    if constexpr (S::kWarpsK > 1) {
        add_up<S>(shared, acc, warp_m, warp_k);
        if (warp_k > 0) return;
    }
    store_tile<K, S>(block, acc, warp_m);
}

template <Kind K, class S>
void launch_gemm(Context& context, const char* what, GemmTask task) {
    const int room = context.shared_bytes / S::kBlocksPerSm;
    const int limit = room > 99 * 1024 && S::kBlocksPerSm == 1 ? room : 99 * 1024;
    task.stages = 4;
    while (task.stages > 2 && gemm_shared<K, S>(task.stages) > limit) --task.stages;
    task.row_blocks = (task.tiles + S::kTiles - 1) / S::kTiles;
    task.together = tiles_together(task, S::kTokens);
    const dim3 grid(static_cast<unsigned>(task.row_blocks * token_tiles(task, S::kTokens)));
    launch(context, what, gemm_kernel<K, S>, grid, dim3(S::kThreads), gemm_shared<K, S>(task.stages), task);
}

}  // namespace quern::cuda::linear
