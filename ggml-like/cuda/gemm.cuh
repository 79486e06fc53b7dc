// Products of packed weights with many rows of activations; one kernel template for dense, paired and grouped work.
//
//              tokens: kTokens per block           A block owns kTiles x 16 weight rows of one part or one expert and
//   rows  w0 | acc: kWarpTiles x 16 rows, all  |   a tile of tokens, over all columns. A warp owns kWarpTiles tiles x
//         w1 | tokens of the block, per warp   |   all tokens (no code is decoded twice); in the shape for few tokens
//         .. | chunks of 64 columns march on   |   kWarpsK warps take the chunks of a stage in turn and add up after.
//
// Traffic: packed weights once per token tile and activations once per row block, both by 16-byte cp.async through a
// ring of stages in shared memory; weights in fragment order (no ldmatrix), activations as rows of 128 bytes whose
// 16-byte columns are XORed with the row. Outputs leave through shared memory as 16-byte stores.
// Limits: ld and rows of x in multiples of 16 bytes, tokens * ldx < 2^34, at most 8192 tiles of tokens times rows / 32.
#pragma once

#include "ggml-like/cuda/decode.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda {

struct GemmTask {
    const uint8_t* data;  // of the part, or of expert 0
    const float* factor;
    int tiles;
    int chunks;
    int cols;
    int rows;        // of y that are stored: a paired part's are half of its own
    int row_blocks;
    bool paired;
    bool f32;
    const bf16* x;
    int ldx8;  // in 16 bytes
    int tokens;
    void* y;
    int64_t ldy;
    const float* residual;
    int64_t residual_ld;
    // Grouped only:
    const int* groups;  // or null
    int64_t expert_bytes;
    int experts;
    int used;
    bool down;  // x rows and y rows by pair (y with a free row after each token's), else x by token and y by pair
    int stages;
};

template <int Tiles, int Tokens, int WarpTiles, int WarpsK, int BlocksPerSm, bool Skip>
struct GemmShape {
    static constexpr int kTiles = Tiles;
    static constexpr int kTokens = Tokens;
    static constexpr int kWarpTiles = WarpTiles;
    static constexpr int kWarpsM = Tiles / WarpTiles;
    static constexpr int kWarpsK = WarpsK;  // also chunks of a stage
    static constexpr int kThreads = 32 * kWarpsM * kWarpsK;
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static constexpr bool kSkip = Skip;  // leave out the products of absent tokens, by 32
    static constexpr int kLoadRows = kThreads / 8;
    static constexpr int kLoads = Tokens / kLoadRows;
    static_assert(Tokens % kLoadRows == 0 && Tokens % 32 == 0);
};

template <class S>
constexpr int kTokenStage = S::kTokens * 128 * S::kWarpsK;
template <Kind K, class S>
constexpr int kWeightStage = S::kTiles * chunk_bytes(K) * S::kWarpsK;
template <Kind K, class S>
constexpr int kStage = kTokenStage<S> + kWeightStage<K, S>;
/// Besides the stages: the rows of y of the block's tokens.
template <class S>
constexpr int kRowListBytes = S::kTokens * 4;
template <Kind K, class S>
constexpr int gemm_shared(int stages) {
    return stages * kStage<K, S> + kRowListBytes<S>;
}

/// What the BF16 registers of A are short of after their scales: the row factors hold kSumLift instead.
template <Kind K>
constexpr float kRowLift = K == Kind::nvfp4 ? 0x1p8f / kSumLift<K> : 1.0f / kSumLift<K>;

/// Copies the first `bytes` of 16 and writes zeros for the rest.
__device__ __forceinline__ void copy_async_part(void* to_shared, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from), "r"(bytes));
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    const __nv_bfloat162 v = __hmul2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
    return reinterpret_cast<const uint32_t&>(v);
}

/// One tile's chunk as a lane holds it, and the A fragments of its four k16 blocks.
template <Kind K>
struct WeightChunk;

template <>
struct WeightChunk<Kind::bf16> {
    const uint8_t* lane_data;
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) { lane_data = chunk + lane * 16; }
    __device__ __forceinline__ void fragment(int kk, uint32_t (&a)[4]) const {
        const uint4 v = *reinterpret_cast<const uint4*>(lane_data + kk * 512);
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    }
};

template <>
struct WeightChunk<Kind::fp8> {
    const uint8_t* lane_data;
    float scale[2];
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        lane_data = chunk + lane * 16;
        const float2 s = *reinterpret_cast<const float2*>(chunk + 1024);
        scale[0] = s.x, scale[1] = s.y;
    }
    __device__ __forceinline__ void fragment(int kk, uint32_t (&a)[4]) const {
        const uint2 v = *reinterpret_cast<const uint2*>(lane_data + kk / 2 * 512 + kk % 2 * 8);
        decode_fp8(v.x, v.y, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = times(a[i], 0x7b807b80u);  // 2^120
    }
};

template <>
struct WeightChunk<Kind::nvfp4> {
    uint4 codes;
    uint32_t scale[2][2];  // of row g + 8r, blocks i and i + 2, times 2^118
    __device__ __forceinline__ void load(const uint8_t* chunk, int lane) {
        codes = *reinterpret_cast<const uint4*>(chunk + lane * 16);
        const uint2 s = *reinterpret_cast<const uint2*>(chunk + 512 + lane / 4 * 8);
        const uint32_t bytes[2] = {s.x, s.y};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            // E4M3's bits, moved to BF16's place, are too small by 2^120; twice 2^119 lift them, subnormals too.
            scale[r][0] = times(times((bytes[r] << 4) & 0x07f007f0u, 0x7b007b00u), 0x7b007b00u);
            scale[r][1] = times(times((bytes[r] >> 4) & 0x07f007f0u, 0x7b007b00u), 0x7b007b00u);
        }
    }
    /// Weight * scale * 2^-8: 2 x 4 significant bits, exact.
    __device__ __forceinline__ void fragment(int kk, uint32_t (&a)[4]) const {
        decode_nvfp4(kk < 2 ? codes.x : codes.z, kk < 2 ? codes.y : codes.w, kk & 1, a);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t s = scale[i & 1][kk & 1];
            a[i] = times(a[i], __byte_perm(s, s, kk < 2 ? 0x1010 : 0x3232));
        }
    }
};

/// Where a block works. Everything but `expert` and `pairs` is also known for dense work.
struct GemmPlace {
    int expert;
    int row_block;
    int first;  // token, or index into the expert's pairs
    int count;  // tokens of this tile; 0: nothing to do
};

/// Blocks that run at the same time share weights (up to 16 token tiles) and activations.
template <class S>
__device__ __forceinline__ GemmPlace dense_place(const GemmTask& task, int id) {
    constexpr int kGroup = 16;
    const int token_tiles = (task.tokens + S::kTokens - 1) / S::kTokens;
    const int group = id / (kGroup * task.row_blocks);
    const int within = id - group * kGroup * task.row_blocks;
    const int width = min(kGroup, token_tiles - group * kGroup);
    GemmPlace place{};
    place.row_block = within / width;
    place.first = (group * kGroup + within % width) * S::kTokens;
    place.count = min(S::kTokens, task.tokens - place.first);
    return place;
}

/// The expert that owns tile `wanted` of the list of all experts' token tiles; whole warps only, same answer in each.
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
    return task.down ? GemmRows{pair, pair + token} : GemmRows{token, pair};
}

template <Kind K, class S>
struct GemmBlock {
    const GemmTask& task;
    uint8_t* shared;
    GemmPlace place;
    const uint8_t* weights;  // of the block's first tile
    int tiles;               // of the block that exist
    uint32_t x_row[S::kLoads];  // in 16 bytes; of the rows of x that this thread copies
    int wanted_loads;           // of them that exist

    __device__ __forceinline__ uint8_t* token_stage(int stage) const { return shared + stage * kTokenStage<S>; }
    __device__ __forceinline__ uint8_t* weight_stage(int stage) const {
        return shared + task.stages * kTokenStage<S> + stage * kWeightStage<K, S>;
    }
    __device__ __forceinline__ int* y_rows() const {
        return reinterpret_cast<int*>(shared + task.stages * kStage<K, S>);
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
            x_row[i] = static_cast<uint32_t>(rows_of(task, place.first + n).x) * static_cast<uint32_t>(task.ldx8);
        }
        for (int n = threadIdx.x; n < place.count; n += S::kThreads) y_rows()[n] = rows_of(task, place.first + n).y;
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
                             weights + (static_cast<int64_t>(tile) * task.chunks + chunk) * chunk_bytes(K) + within * 16);
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

/// acc += the warp's tiles x the first kN16 * 16 tokens, over one chunk. A stage holds kTileChunks chunks of each tile.
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
                        acc[i][2 * j + n][r] = fmaf(chunk[i].scale[r / 2], sum[i][n][r], acc[i][2 * j + n][r]);
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
__device__ __forceinline__ void march(const GemmBlock<K, S>& block, float (&acc)[S::kWarpTiles][S::kTokens / 8][4]) {
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

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

/// Adds the residual and stores 8 neighbours of a row, of which `there` exist; by 16 bytes where the place allows it.
__device__ __forceinline__ void store_row(const GemmTask& task, float (&v)[8], int64_t at, int64_t residual_at,
                                          int there) {
    if (task.residual != nullptr) {
        const float* residual = task.residual + residual_at;
        if (there >= 8 && reinterpret_cast<uintptr_t>(residual) % 16 == 0) {
            const float4 r[2] = {reinterpret_cast<const float4*>(residual)[0], reinterpret_cast<const float4*>(residual)[1]};
            v[0] += r[0].x, v[1] += r[0].y, v[2] += r[0].z, v[3] += r[0].w;
            v[4] += r[1].x, v[5] += r[1].y, v[6] += r[1].z, v[7] += r[1].w;
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] += i < there ? residual[i] : 0.0f;
        }
    }
    if (task.f32) {
        float* y = static_cast<float*>(task.y) + at;
        if (there >= 8 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
            reinterpret_cast<float4*>(y)[0] = make_float4(v[0], v[1], v[2], v[3]);
            reinterpret_cast<float4*>(y)[1] = make_float4(v[4], v[5], v[6], v[7]);
        } else {
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (i < there) y[i] = v[i];
        }
        return;
    }
    bf16* y = static_cast<bf16*>(task.y) + at;
    if (there >= 8 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
        *reinterpret_cast<uint4*>(y) =
            make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            if (i < there) y[i] = __float2bfloat16_rn(v[i]);
    }
}

/// Factors, silu and stores. The warp turns 16 tokens at a time through its own piece of shared memory: a lane holds
/// neighbouring tokens, memory wants neighbouring rows.
template <Kind K, class S>
__device__ __forceinline__ void store_tile(const GemmBlock<K, S>& block, float (&acc)[S::kWarpTiles][S::kTokens / 8][4],
                                           int warp_m) {
    const GemmTask& task = block.task;
    const int lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int tile0 = block.place.row_block * S::kTiles + warp_m * S::kWarpTiles;
    if (tile0 >= task.tiles) return;
    constexpr int kPitch = S::kWarpTiles * 16 + 4;
    float* turn = reinterpret_cast<float*>(block.shared) + warp_m * 16 * kPitch;
    float factor[S::kWarpTiles][2];
#pragma unroll
    for (int i = 0; i < S::kWarpTiles; ++i) {
        const int tile = min(tile0 + i, task.tiles - 1);
        const float* f = task.factor + (static_cast<int64_t>(block.place.expert) * task.tiles + tile) * 16 + g;
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
                    float* to = turn + (n * 8 + 2 * t + r) * kPitch + i * tile_rows + g;
                    const float low = acc[i][2 * j + n][r] * factor[i][0];
                    const float high = acc[i][2 * j + n][r + 2] * factor[i][1];
                    if (task.paired) {
                        to[0] = silu(low) * high;
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
            const int64_t y_row = block.y_rows()[token];
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                const float4 s = *reinterpret_cast<const float4*>(turn + n * kPitch + row + i);
                v[i] = s.x, v[i + 1] = s.y, v[i + 2] = s.z, v[i + 3] = s.w;
            }
            store_row(task, v, y_row * task.ldy + row0 + row, y_row * task.residual_ld + row0 + row, there);
        }
    }
}

/// Sums of the warps along K, in their order, into the first.
template <class S>
__device__ __forceinline__ void add_up(uint8_t* shared, float (&acc)[S::kWarpTiles][S::kTokens / 8][4], int warp_m,
                                       int warp_k) {
    constexpr int kEach = S::kWarpTiles * S::kTokens / 8;
    float4* sums = reinterpret_cast<float4*>(shared);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const float(&v)[4] = acc[i / (S::kTokens / 8)][i % (S::kTokens / 8)];
        if (warp_k > 0)
            sums[(((warp_k - 1) * S::kWarpsM + warp_m) * kEach + i) * 32 + lane] = make_float4(v[0], v[1], v[2], v[3]);
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
__global__ void __launch_bounds__(S::kThreads, S::kBlocksPerSm) gemm_kernel(const __grid_constant__ GemmTask task) {
    extern __shared__ __align__(1024) uint8_t shared[];
    allow_successor();
    GemmBlock<K, S> block{task, shared};
    const int steps = (task.chunks + S::kWarpsK - 1) / S::kWarpsK;
    const int primed = min(task.stages - 1, steps);
    if (task.groups == nullptr) {
        block.place = dense_place<S>(task, static_cast<int>(blockIdx.x));
        block.find_weights();
        for (int i = 0; i < primed; ++i) block.copy_weights(i, i);
        wait_for_predecessor();
    } else {
        wait_for_predecessor();
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

/// `blocks` of shape S, `token_tiles` of them per row block.
template <Kind K, class S>
void launch_gemm(Context& context, const char* what, GemmTask task, int64_t token_tiles) {
    const int room = context.shared_bytes / S::kBlocksPerSm;
    const int limit = room > 99 * 1024 && S::kBlocksPerSm == 1 ? room : 99 * 1024;
    task.stages = 4;
    while (task.stages > 2 && gemm_shared<K, S>(task.stages) > limit) --task.stages;
    task.row_blocks = (task.tiles + S::kTiles - 1) / S::kTiles;
    const dim3 grid(static_cast<unsigned>(task.row_blocks * token_tiles));
    launch(context, what, gemm_kernel<K, S>, grid, dim3(S::kThreads), gemm_shared<K, S>(task.stages), task);
}

template <class S>
void launch_gemm(Context& context, Kind kind, const char* what, const GemmTask& task, int64_t token_tiles) {
    if (kind == Kind::bf16)
        launch_gemm<Kind::bf16, S>(context, what, task, token_tiles);
    else if (kind == Kind::fp8)
        launch_gemm<Kind::fp8, S>(context, what, task, token_tiles);
    else
        launch_gemm<Kind::nvfp4, S>(context, what, task, token_tiles);
}

}  // namespace quern::cuda
