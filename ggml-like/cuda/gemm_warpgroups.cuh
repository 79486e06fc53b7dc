// The products of gemm.cuh on sm_90a: warpgroup products, and warps of their own that copy.
//
//               tokens: kTokens per block       A block owns 128 weight rows of one part or one expert and a tile of
//   128 rows  w0..w3 | acc: 16 rows x all       tokens. Eight warps multiply, 16 rows each; the copying warps keep a ring
//             w4..w7 | tokens, per warp         of kStages x kChunks chunks of 64 columns full. With kSplit > 1 the blocks
//                                               of a cluster share the columns; sums meet in the order of the ranks.
//
// Traffic as in gemm.cuh. A from registers (packed weights are in its order, codes are decoded there while the products
// of the chunk before run), B from shared memory. Sums go through shared memory to 32-byte stores.
#pragma once

#include "ggml-like/cuda/gemm.cuh"
#include "ggml-like/cuda/wgmma.cuh"

#if QUERN_WGMMA
#define QUERN_CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define QUERN_CLUSTER(n)
#endif

namespace quern::cuda {

template <int Tokens, int Chunks, int BlocksPerSm, int CopyWarps, int Split>
struct WarpgroupShape {
    static constexpr int kTokens = Tokens;
    static constexpr int kChunks = Chunks;  // of a stage
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static constexpr int kCopyThreads = 32 * CopyWarps;
    static constexpr int kSplit = Split;
    static constexpr int kTiles = 8;
    static constexpr int kSumThreads = 256;
    static constexpr int kThreads = kSumThreads + kCopyThreads;
    static constexpr int kPitch = kTiles * 16 + 4;  // of sums, in floats
    static constexpr int kSumBytes = Tokens * kPitch * 4;
    // A block that has its multiprocessor for itself moves registers from the copying warps to the others.
    static constexpr bool kMoveRegisters = BlocksPerSm == 1 && CopyWarps == 4;
    // Where registers allow it, a warp decodes a chunk while its products of the chunk before run.
    static constexpr bool kAhead = BlocksPerSm == 1 || Tokens <= 96;
};

template <Kind K, class S>
struct Ring {
    static constexpr int kTileBytes = S::kChunks * chunk_bytes(K);
    static constexpr int kWeights = S::kTiles * kTileBytes;
    static constexpr int kTokens = S::kChunks * S::kTokens * 128;
    static constexpr int kLists = S::kTokens * 8;
    static constexpr int kRoom = 227 * 1024 / S::kBlocksPerSm - 2048 - kLists;
    static constexpr int kMost = kRoom / (kWeights + kTokens);
    static constexpr int kStages = kMost < 8 ? kMost : 8;
    static constexpr int kBytes = kStages * (kWeights + kTokens) > S::kSumBytes ? kStages * (kWeights + kTokens) : S::kSumBytes;
    static constexpr int kShared = kBytes + kLists + 1024;  // and what aligns it
    static constexpr bool kBulk = kTileBytes >= 2048;       // smaller ones are faster by cp.async
    static_assert(kStages >= 2 && kBytes <= kRoom);
};

#if QUERN_WGMMA

template <Kind K, class S>
struct WarpgroupBlock {
    using R = Ring<K, S>;
    const GemmTask& task;
    uint8_t* shared;
    uint64_t* full;
    uint64_t* empty;
    GemmPlace place;
    const uint8_t* weights;   // of the block's first tile
    int tiles;                // of the block that exist
    int chunk_begin, chunk_end;

    __device__ __forceinline__ uint8_t* tokens_of(int stage) const { return shared + stage * R::kTokens; }
    __device__ __forceinline__ uint8_t* weights_of(int stage) const {
        return shared + R::kStages * R::kTokens + stage * R::kWeights;
    }
    __device__ __forceinline__ uint32_t* x_rows() const { return reinterpret_cast<uint32_t*>(shared + R::kBytes); }
    __device__ __forceinline__ int* y_rows() const { return reinterpret_cast<int*>(shared + R::kBytes) + S::kTokens; }
    __device__ __forceinline__ int steps() const { return (chunk_end - chunk_begin + S::kChunks - 1) / S::kChunks; }

    __device__ __forceinline__ void find_weights() {
        const int tile = place.row_block * S::kTiles;
        weights = task.data + place.expert * task.expert_bytes + static_cast<int64_t>(tile) * task.chunks * chunk_bytes(K);
        tiles = min(S::kTiles, task.tiles - tile);
        const int rank = S::kSplit == 1 ? 0 : cluster_rank();
        chunk_begin = rank * task.chunks / S::kSplit;
        chunk_end = (rank + 1) * task.chunks / S::kSplit;
    }

    /// Where the tile's rows of x (in 16 bytes) and y are.
    __device__ __forceinline__ void find_rows() const {
        for (int n = threadIdx.x; n < place.count; n += S::kThreads) {
            const GemmRows rows = rows_of(task, place.first + n);
            x_rows()[n] = static_cast<uint32_t>(rows.x) * static_cast<uint32_t>(task.ldx8);
            y_rows()[n] = rows.y;
        }
    }

    __device__ __forceinline__ void copy_weights(int step, int thread) const {
        const int stage = step % R::kStages;
        const int chunk = chunk_begin + step * S::kChunks;
        const int bytes = min(S::kChunks, chunk_end - chunk) * chunk_bytes(K);  // of each tile
        uint8_t* to = weights_of(stage);
        const uint8_t* from = weights + static_cast<int64_t>(chunk) * chunk_bytes(K);
        const int64_t tile_bytes = static_cast<int64_t>(task.chunks) * chunk_bytes(K);
        if constexpr (R::kBulk) {
            if (thread == 0) {
                arrive_and_expect(full + stage, static_cast<uint32_t>(tiles * bytes));
                for (int i = 0; i < tiles; ++i)
                    copy_bulk(to + i * R::kTileBytes, from + i * tile_bytes, static_cast<uint32_t>(bytes), full + stage);
            }
        } else {
            constexpr int kPieces = R::kTileBytes / 16;
#pragma unroll 4
            for (int piece = thread; piece < tiles * kPieces; piece += S::kCopyThreads) {
                const int tile = piece / kPieces;
                const int within = (piece - tile * kPieces) * 16;
                if (within < bytes) copy_async16(to + piece * 16, from + tile * tile_bytes + within);
            }
        }
    }

    __device__ __forceinline__ void copy_tokens(int step, int thread) const {
        constexpr int kRows = S::kCopyThreads / 8;
        const int stage = step % R::kStages;
        const int column = thread % 8;
#pragma unroll
        for (int c = 0; c < S::kChunks; ++c) {
            const int k = (chunk_begin + step * S::kChunks + c) * kChunkCols + column * 8;
            const int bytes = max(0, min(16, (task.cols - k) * 2));
            const bf16* from = task.x + (bytes > 0 ? k : 0);
            uint8_t* to = tokens_of(stage) + c * (S::kTokens * 128);
#pragma unroll 8
            for (int n = thread / 8; n < place.count; n += kRows)
                copy_async_part(to + n * 128 + ((column ^ (n & 7)) << 4), from + static_cast<uint64_t>(x_rows()[n]) * 8, bytes);
        }
        arrive_after_copies(full + stage);
    }

    /// The copying warps. The weights of the first `primed` steps are under way.
    __device__ __forceinline__ void keep_full(int primed, int thread) const {
        const int all = steps();
        for (int step = 0; step < all; ++step) {
            if (step >= R::kStages) wait_phase(empty + step % R::kStages, (step / R::kStages - 1) & 1);
            if (step >= primed) copy_weights(step, thread);
            copy_tokens(step, thread);
        }
    }

    /// The A registers of chunk c (of this block), when it is there.
    __device__ __forceinline__ void load(int c, uint32_t (&a)[4][4]) const {
        const int step = c / S::kChunks, stage = step % R::kStages;
        if (c % S::kChunks == 0) {
            wait_phase(full + stage, (step / R::kStages) & 1);
            fence_shared_for_wgmma();
        }
        WeightChunk<K> chunk;
        chunk.load(weights_of(stage) + static_cast<int>(threadIdx.x) / 32 * R::kTileBytes + c % S::kChunks * chunk_bytes(K),
                   threadIdx.x % 32);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) chunk.fragment(kk, a[kk]);
    }

    /// The multiplying warps: acc = their 16 rows x the first kN tokens.
    template <int kN>
    __device__ __forceinline__ void march(float (&acc)[kN / 8][4]) const {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][r] = 0;
        const int chunks = chunk_end - chunk_begin;
        uint32_t next[4][4];
        if constexpr (S::kAhead) load(0, next);
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
            const int stage = c / S::kChunks % R::kStages;
            const uint64_t rows = wgmma_rows(shared_address(tokens_of(stage)) + c % S::kChunks * (S::kTokens * 128));
            uint32_t a[4][4];
            if constexpr (!S::kAhead) load(c, next);
#pragma unroll
            for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = next[i / 4][i % 4];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) wgmma<kN>(acc, a[kk], rows + kk * 2);
            wgmma_commit();
            if (S::kAhead && c + 1 < chunks) load(c + 1, next);
            wgmma_wait<0>();
            if ((c + 1) % S::kChunks == 0 && threadIdx.x % 32 == 0) arrive(empty + stage);
        }
        hold(acc);
    }

    /// Sums to shared memory, once every warp is done with the ring: [token][row].
    template <int kN>
    __device__ __forceinline__ void put_sums(const float (&acc)[kN / 8][4]) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float* to = reinterpret_cast<float*>(shared) + static_cast<int>(threadIdx.x) / 32 * 16 + g;
        sum_barrier();
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
            if (j * 8 >= place.count) break;
#pragma unroll
            for (int r = 0; r < 4; ++r) to[(j * 8 + 2 * t + r % 2) * S::kPitch + r / 2 * 8] = acc[j][r];
        }
    }

    __device__ __forceinline__ static void sum_barrier() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

    /// Four sums, of all blocks of the cluster.
    __device__ __forceinline__ float4 sums_at(int at) const {
        const float* here = reinterpret_cast<const float*>(shared) + at;
        if constexpr (S::kSplit == 1) return *reinterpret_cast<const float4*>(here);
        float4 sum = load_of_block(shared_address(here), 0);
#pragma unroll
        for (int rank = 1; rank < S::kSplit; ++rank) {
            const float4 v = load_of_block(shared_address(here), rank);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        return sum;
    }

    template <bool kPaired>
    __device__ __forceinline__ void store_sums() const {
        constexpr int kRaw = kPaired ? 16 : 8;  // rows of a thread, for 8 of y
        constexpr int kLanes = S::kTiles * 16 / kRaw;
        constexpr int kEach = S::kSumThreads / kLanes;
        const int raw = static_cast<int>(threadIdx.x) % kLanes * kRaw;
        if (raw >= tiles * 16) return;
        const int row = place.row_block * (S::kTiles * 16 / (kRaw / 8)) + raw / (kRaw / 8);
        const int there = task.rows - row;
        float factor[kRaw];
        const float* f = task.factor + (static_cast<int64_t>(place.expert) * task.tiles + place.row_block * S::kTiles) * 16 + raw;
#pragma unroll
        for (int i = 0; i < kRaw; ++i) factor[i] = f[i] * kRowLift<K>;
        const int rank = S::kSplit == 1 ? 0 : cluster_rank();
        for (int n = static_cast<int>(threadIdx.x) / kLanes * S::kSplit + rank; n < place.count; n += kEach * S::kSplit) {
            float v[kRaw];
#pragma unroll
            for (int i = 0; i < kRaw; i += 4) {
                const float4 s = sums_at(n * S::kPitch + raw + i);
                v[i] = s.x * factor[i], v[i + 1] = s.y * factor[i + 1];
                v[i + 2] = s.z * factor[i + 2], v[i + 3] = s.w * factor[i + 3];
            }
            float out[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) out[i] = kPaired ? silu(v[i]) * v[i + kRaw - 8] : v[i];
            const int64_t y_row = y_rows()[n];
            store_row(task, out, y_row * task.ldy + row, y_row * task.residual_ld + row, there);
        }
    }

    template <int kN>
    __device__ __forceinline__ void multiply() const {
        float acc[kN / 8][4];
        march<kN>(acc);
        put_sums<kN>(acc);
    }

    /// Products of absent tokens cost as much as others: as few as there are, in steps of 16.
    __device__ __forceinline__ void multiply_present() const {
        if constexpr (S::kTokens == 256) return multiply<256>();
        if constexpr (S::kTokens >= 96) {
            if (place.count > 80) return multiply<96>();
            if (place.count > 64) return multiply<80>();
        }
        if constexpr (S::kTokens >= 64) {
            if (place.count > 48) return multiply<64>();
            if (place.count > 32) return multiply<48>();
        }
        if constexpr (S::kTokens >= 32) {
            if (place.count > 16) return multiply<32>();
        }
        multiply<16>();
    }
};

#endif

/// Barriers are static shared memory: a kernel that has none was not compiled for sm_90a.
template <Kind K, class S>
__global__ void QUERN_CLUSTER(S::kSplit) __launch_bounds__(S::kThreads, S::kBlocksPerSm)
    warpgroup_kernel(const __grid_constant__ GemmTask task) {
#if QUERN_WGMMA
    using R = Ring<K, S>;
    extern __shared__ __align__(1024) uint8_t unaligned[];
    __shared__ uint64_t barriers[2 * R::kStages];
    allow_successor();
    uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    WarpgroupBlock<K, S> block{task, shared, barriers, barriers + R::kStages};
    const int thread = threadIdx.x;
    if (thread < R::kStages) {
        init_phases(block.full + thread, S::kCopyThreads + (R::kBulk ? 1 : 0));
        init_phases(block.empty + thread, S::kSumThreads / 32);
    }
    publish_phases();
    const int id = static_cast<int>(blockIdx.x) / S::kSplit;
    if (task.groups == nullptr) {
        block.place = dense_place<S>(task, id);
    } else {
        wait_for_predecessor();
        block.place = grouped_place<S>(task, id);
        if (block.place.count == 0) return;
    }
    block.find_weights();
    __syncthreads();
    const int copy_thread = thread - S::kSumThreads;
    const int primed = min(R::kStages, block.steps());
    if (copy_thread >= 0)
        for (int i = 0; i < primed; ++i) block.copy_weights(i, copy_thread);
    if (task.groups == nullptr) wait_for_predecessor();
    block.find_rows();
    __syncthreads();
    if (copy_thread >= 0) {
        if constexpr (S::kMoveRegisters) shrink_registers<40>();
        block.keep_full(primed, copy_thread);
    } else {
        if constexpr (S::kMoveRegisters) grow_registers<232>();
        block.multiply_present();
        if constexpr (S::kSplit == 1) {
            block.sum_barrier();
            if (task.paired)
                block.template store_sums<true>();
            else
                block.template store_sums<false>();
        }
    }
    if constexpr (S::kSplit > 1) {
        cluster_barrier();
        if (copy_thread < 0) {
            if (task.paired)
                block.template store_sums<true>();
            else
                block.template store_sums<false>();
        }
        cluster_barrier();
    }
#endif
}

/// Whether this binary has code for sm_90a, which takes everything but fp8 (its scales meet the sums of a chunk).
template <Kind K, class S>
bool has_warpgroups() {
    static const bool has = [] {
        cudaFuncAttributes attributes{};
        check_launch(cudaFuncGetAttributes(&attributes, warpgroup_kernel<K, S>), "gemm");
        return attributes.sharedSizeBytes > 0;
    }();
    return has;
}

/// False, and nothing done: no such code, or another GPU. `token_tiles` of S::kTokens.
template <Kind K, class S>
bool launch_warpgroups(Context& context, const char* what, GemmTask task, int64_t token_tiles) {
    if (context.capability != 90 || !has_warpgroups<K, S>()) return false;
    task.row_blocks = (task.tiles + S::kTiles - 1) / S::kTiles;
    const dim3 grid(static_cast<unsigned>(task.row_blocks * token_tiles * S::kSplit));
    launch(context, what, warpgroup_kernel<K, S>, grid, dim3(S::kThreads), Ring<K, S>::kShared, task);
    return true;
}

}  // namespace quern::cuda
