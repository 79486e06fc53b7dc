// A block of gemm_warpgroups.cuh until its sums are complete: what its warps copy, and what they multiply.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/linear/warpgroup_shapes.h"
#include "ggml-like/cuda/pack/weight_chunk.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"
#include "ggml-like/cuda/ptx/wgmma.cuh"

#if QUERN_WGMMA

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

template <Kind K, class S>
struct WarpgroupBlock {
    using R = StageRing<K, S>;
    const GemmTask& task;
    const CUtensorMap& w;
    const CUtensorMap& x;
    uint8_t* shared;
    uint64_t* full;
    uint64_t* empty;
    uint64_t* arrived;  // of answers by a cluster: counts the sums that its blocks send each other
    GemmPlace place;
    int tiles;  // of the block that exist
    int chunk_begin, chunk_end;
    int round_begin = 0;  // steps of the block's places before this one

    __device__ __forceinline__ uint8_t* tokens_of(int stage) const { return shared + stage * R::kTokens; }
    __device__ __forceinline__ uint8_t* weights_of(int stage) const {
        return shared + R::kStages * R::kTokens + stage * R::kWeights;
    }
    __device__ __forceinline__ int* y_rows() const { return reinterpret_cast<int*>(shared + R::kBytes); }
    __device__ __forceinline__ float* scales() const {
        return reinterpret_cast<float*>(y_rows() + S::kTokens);
    }
    __device__ __forceinline__ static int rank_of() { return S::kCluster == 1 ? 0 : cluster_rank(); }
    /// Of answers: token n * kCluster + rank is stored by the block of that rank, as its number n.
    __device__ __forceinline__ int tokens_of_rank(int rank) const {
        return (place.count - rank + S::kCluster - 1) / S::kCluster;
    }
    /// Of answers: of each thread its sums over whole fours.
    __device__ __forceinline__ float4* totals() const {
        return reinterpret_cast<float4*>(scales() + S::kTokens) + threadIdx.x;
    }
    /// The chunk that comes at place `at`.
    __device__ __forceinline__ int chunk_at(int at) const {
        if constexpr (!S::kAnswer) return at;
        const int piece = at / S::kChunks, each = pieces() / kAnswerSplits, more = pieces() % kAnswerSplits;
        const int in_longer = more * (each + 1), rest = piece - in_longer;
        const int split = rest < 0 ? quotient(piece, each + 1) : more + (each > 0 ? quotient(rest, each) : 0);
        const int step = piece - pieces_before(split);
        return (split + step * kAnswerSplits) * S::kChunks + at % S::kChunks;
    }
    /// Of answers: pieces of all splits, and of those before one. The first splits may have one piece more.
    __device__ __forceinline__ int pieces() const { return task.chunks / S::kChunks; }
    __device__ __forceinline__ int pieces_before(int split) const {
        return split * (pieces() / kAnswerSplits) + min(split, pieces() % kAnswerSplits);
    }
    __device__ __forceinline__ int steps() const {
        return (chunk_end - chunk_begin + S::kChunks - 1) / S::kChunks;
    }

    __device__ __forceinline__ void init_barriers() const {
        if (threadIdx.x < R::kStages) {
            init_phases(full + threadIdx.x, 1);
            init_phases(empty + threadIdx.x, S::kSumThreads / 32);
        }
        if (S::kSendsSums && threadIdx.x == 0) init_phases(arrived, 1);
        publish_phases();
    }

    /// Tiles from a block's first to the next block's.
    __device__ __forceinline__ int row_step() const { return S::kAnswer ? S::kTiles : task.box_tiles; }
    __device__ __forceinline__ void find_extent() {
        tiles = min(row_step(), task.tiles - place.row_block * row_step());
        const int rank = rank_of();
        if constexpr (S::kAnswer) {
            constexpr int kEach = kAnswerSplits / S::kCluster;
            chunk_begin = pieces_before(rank * kEach) * S::kChunks;
            chunk_end = pieces_before((rank + 1) * kEach) * S::kChunks;
        } else if constexpr (K == Kind::fp8) {
            // Whole pairs, of which the last may have a chunk that is not there: zeros.
            const int pairs = (task.chunks + 1) / 2;
            chunk_begin = rank * pairs / S::kCluster * 2;
            chunk_end = (rank + 1) * pairs / S::kCluster * 2;
        } else {
            chunk_begin = rank * task.chunks / S::kCluster;
            chunk_end = (rank + 1) * task.chunks / S::kCluster;
        }
    }

    __device__ __forceinline__ void wait_empty(int step) const {
        const int at = round_begin + step;
        if (at >= R::kStages) wait_phase(empty + at % R::kStages, (at / R::kStages - 1) & 1);
    }

    /// One thread. Announces the stage's bytes, those of tokens that the copy engine brings included; boxes are whole, also
    /// where the matrix ends.
    __device__ __forceinline__ void copy_weights(int step) const {
        const int stage = (round_begin + step) % R::kStages;
        arrive_and_expect(full + stage, row_step() * R::kTileBytes + S::kChunks * 128 * task.box_tokens);
        copy_chunks(weights_of(stage), w, chunk_at(chunk_begin + step * S::kChunks),
                    place.row_block * row_step(), place.expert, full + stage);
    }

    /// One thread. The weights of the first `primed` steps are under way.
    __device__ __forceinline__ void keep_full(int primed) const {
        const int all = steps();
#pragma unroll 1
        for (int step = 0; step < all; ++step) {
            const int stage = (round_begin + step) % R::kStages, first = chunk_begin + step * S::kChunks;
            wait_empty(step);
            if (step >= primed) copy_weights(step);
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c)
                copy_box(tokens_of(stage) + c * (S::kTokens * 128), x, chunk_at(first + c) * kChunkCols,
                         place.first, full + stage);
        }
    }

    __device__ __forceinline__ void find_y_rows() const {
        for (int n = threadIdx.x; n < place.count; n += S::kSumThreads) {
            const GemmRows rows = rows_of(task, place.first + n);
            y_rows()[n] = rows.y;
            if constexpr (!S::kAnswer)
                scales()[n] = task.scale.squares != nullptr ? prompt_factor(task.scale, rows.x) : 1.0f;
        }
        if constexpr (S::kAnswer)
            if (task.answer.scale.squares != nullptr) {
                const int rank = rank_of();
                norm_factors(task.answer.scale, place.first + rank, S::kCluster, tokens_of_rank(rank),
                             S::kSumThreads / 32, scales());
            }
    }

    /// Of a multiplying warp: its tile, its side, and tokens of that.
    __device__ __forceinline__ static int tile_of_warp() {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        return S::kSides == 1 ? warp : warp % S::kTiles;
    }
    __device__ __forceinline__ static int side_of_warp() {
        return S::kSides == 1 ? 0 : static_cast<int>(threadIdx.x) / (32 * S::kTiles);
    }
    __device__ __forceinline__ int count_of_side() const {
        return S::kSides == 1 ? place.count : place.count - side_of_warp() * S::kSideTokens;
    }

    /// The multiplying warps: acc = their 16 rows x the first kN tokens, over the columns of one part. While the products
    /// of a prompt's chunk run, its successor's A registers are made; answers have no registers for that.
    struct March {
        int stage = 0, chunk = 0;  // of the stage
        int left;                  // chunks; answers: of the block, never fewer
        uint32_t phase = 0;
        uint32_t next[4][4];  // A of the chunk that comes
        float2 scale;         // of it, FP8: of rows 0..7 and 8..15
    };
    __device__ __forceinline__ void load(March& m) const {
        WeightChunk<K> chunk;
        chunk.load(weights_of(m.stage) + tile_of_warp() * R::kTileBytes + m.chunk * chunk_bytes(K),
                   threadIdx.x % 32);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) chunk.fragment(kk, m.next[kk]);
        if constexpr (K == Kind::fp8) m.scale = {chunk.scale[0], chunk.scale[1]};
    }
    /// Of the chunk that comes, where its tokens lie.
    __device__ __forceinline__ uint64_t rows_of_chunk(const March& m) const {
        return wgmma_rows(shared_address(tokens_of(m.stage)) + m.chunk * (S::kTokens * 128) +
                          side_of_warp() * (S::kSideTokens * 128));
    }
    __device__ __forceinline__ static void go_on(March& m) {
        if (++m.chunk < S::kChunks) return;
        m.chunk = 0;
        if (++m.stage == R::kStages) m.stage = 0, m.phase ^= 1;
    }
    __device__ __forceinline__ void load_next(March& m) const {
        if (--m.left <= 0) return;
        if (m.chunk == 0) wait_phase(full + m.stage, m.phase);
        load(m);
    }
    /// rows_of_chunk, the same in all lanes, which the compiler is told if it does not know: descriptors are made in registers that lanes
    /// share.
    template <bool kGoesOn>
    __device__ __forceinline__ uint64_t shared_rows(const March& m) const {
        const uint64_t rows = rows_of_chunk(m);
        if constexpr (!kGoesOn) return rows;
        return rows >> 32 << 32 | __shfl_sync(0xffffffffu, static_cast<uint32_t>(rows), 0);
    }
    /// acc += the chunk's products; kFresh: acc = them.
    template <int kN, bool kGoesOn = false, bool kFresh = false>
    __device__ __forceinline__ void add_chunk(March& m, float (&acc)[kN / 8][4]) const {
        const int done = m.stage;
        const uint64_t rows = shared_rows<kGoesOn>(m);
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = m.next[i / 4][i % 4];
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            if constexpr (kFresh) {
                if (kk == 0) {
                    wgmma_fresh<kN>(acc, a[kk], rows);
                    continue;
                }
            }
            wgmma<kN>(acc, a[kk], rows + kk * 2);
        }
        wgmma_commit();
        go_on(m);
        if constexpr (!S::kAnswer) load_next(m);
        wgmma_wait<0>();
        hold(a, m.left < 0);
        release(m, done);
    }
    /// After the last chunk of stage `done`.
    __device__ __forceinline__ void release(const March& m, int done) const {
        if (m.chunk == 0 && threadIdx.x % 32 == 0) arrive(empty + done);
    }
    template <int kN>
    __device__ __forceinline__ static void clear(float (&acc)[kN / 8][4]) {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][r] = 0;
        hold(acc);  // the zeros are there before the fence
    }
    /// FP8 with scales of 128 columns, two chunks: they meet the sums of these.
    template <int kN, bool kGoesOn>
    __device__ __forceinline__ void march_scaled(March& m, float (&acc)[kN / 8][4]) const {
        clear<kN>(acc);
#pragma unroll 1
        for (int pairs = m.left / 2; pairs > 0; --pairs) {
            const float2 scale = m.scale;
            float sum[kN / 8][4];
            add_chunk<kN, kGoesOn, true>(m, sum);
            add_chunk<kN, kGoesOn>(m, sum);
            hold(sum);
            add_scaled(acc, sum, scale);
        }
    }
    /// Answers: x of a stage as few_rows.cuh has it, all multiplying warps together. (Lifted codes would make the same
    /// products, but subnormal codes would then be rounded with other exponents inside the tensor cores.)
    __device__ __forceinline__ void lift_tokens(int stage) const {
        auto* x = reinterpret_cast<uint4*>(tokens_of(stage)) + threadIdx.x;
        constexpr int kEach = R::kTokens / (16 * S::kSumThreads);
        static_assert(kActivationLift<K> == 0x1p60f && R::kTokens % (16 * S::kSumThreads) == 0);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            uint4 v = x[i * S::kSumThreads];
            for (uint32_t* word : {&v.x, &v.y, &v.z, &v.w}) *word = times(*word, 0x5d805d80u);  // 2^60
            x[i * S::kSumThreads] = v;
        }
        fence_async_proxy();
        sum_barrier();
    }
    __device__ __forceinline__ static void sum_barrier() {
        asm volatile("bar.sync 1, %0;" ::"n"(S::kSumThreads) : "memory");
    }

    /// Answers, NVFP4: block scales meet the sums of 16 products, as in few_rows.cuh.
    template <int kN>
    __device__ __forceinline__ void add_fp4_chunk(March& m, float (&acc)[kN / 8][4]) const {
        const uint8_t* chunk =
            weights_of(m.stage) + tile_of_warp() * R::kTileBytes + m.chunk * chunk_bytes(K);
        const uint64_t rows = rows_of_chunk(m);
        const int lane = threadIdx.x % 32;
        const uint4 codes = *reinterpret_cast<const uint4*>(chunk + 16 * lane);
        const uint2 bytes = *reinterpret_cast<const uint2*>(chunk + 512 + 8 * (lane >> 2));
        float low[4], high[4];
        scales_of(bytes.x, low);
        scales_of(bytes.y, high);
        go_on(m);
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // two of the chunk's four blocks of columns
            uint32_t a[2][4];
            float d[2][kN / 8][4];
#pragma unroll
            for (int i = 0; i < 2; ++i)
                decode_nvfp4(half ? codes.z : codes.x, half ? codes.w : codes.y, i, a[i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; ++i) wgmma_fresh<kN>(d[i], a[i], rows + (2 * half + i) * 2);
            wgmma_commit();
            wgmma_wait<0>();
            hold(a, m.left < 0);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                hold(d[i]);
#pragma unroll
                for (int j = 0; j < kN / 8; ++j)
#pragma unroll
                    for (int r = 0; r < 4; ++r)
                        acc[j][r] =
                            __fmaf_rn(r < 2 ? low[2 * half + i] : high[2 * half + i], d[i][j][r], acc[j][r]);
            }
        }
    }
    /// Answers, FP8: a chunk's scales meet the sum of its products, as in few_rows.cuh.
    template <int kN>
    __device__ __forceinline__ void add_fp8_chunk(March& m, float (&acc)[kN / 8][4]) const {
        const uint8_t* chunk =
            weights_of(m.stage) + tile_of_warp() * R::kTileBytes + m.chunk * chunk_bytes(K);
        const uint64_t rows = rows_of_chunk(m);
        const float2 scale = *reinterpret_cast<const float2*>(chunk + 1024);
        uint32_t a[4][4];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 codes = *reinterpret_cast<const uint4*>(chunk + 512 * i + 16 * (threadIdx.x % 32));
            decode_fp8(codes.x, codes.y, a[2 * i]);
            decode_fp8(codes.z, codes.w, a[2 * i + 1]);
        }
        go_on(m);
        float sum[kN / 8][4];
        wgmma_fence();
        wgmma_fresh<kN>(sum, a[0], rows);
#pragma unroll
        for (int kk = 1; kk < 4; ++kk) wgmma<kN>(sum, a[kk], rows + kk * 2);
        wgmma_commit();
        wgmma_wait<0>();
        hold(a, m.left < 0);
        hold(sum);
        add_scaled(acc, sum, scale);
    }
    template <int kN, bool kGoesOn = false>
    __device__ __forceinline__ void march_split(March& m, int chunks, float (&acc)[kN / 8][4]) const {
        clear<kN>(acc);
#pragma unroll 1
        for (; chunks > 0; --chunks) {
            if constexpr (S::kAnswer) {
                if (m.chunk == 0) {
                    wait_phase(full + m.stage, m.phase);
                    if constexpr (K != Kind::bf16) lift_tokens(m.stage);
                }
            }
            if constexpr (S::kAnswer && K != Kind::bf16) {
                const int done = m.stage;
                if constexpr (K == Kind::fp8)
                    add_fp8_chunk<kN>(m, acc);
                else
                    add_fp4_chunk<kN>(m, acc);
                release(m, done);
            } else {
                if constexpr (S::kAnswer) load(m);
                add_chunk<kN, kGoesOn>(m, acc);
            }
        }
        hold(acc);
    }
    /// The same over all columns of the block. kGoesOn: of a prompt's place that may not be the block's first. kScaled: chunks
    /// have scales.
    template <int kN, bool kGoesOn = false, bool kScaled = false>
    __device__ __forceinline__ void march(float (&acc)[kN / 8][4]) const {
        March m;
        m.left = chunk_end - chunk_begin;
        if constexpr (kGoesOn || (S::kStays && S::kAnswer))
            m.stage = round_begin % R::kStages, m.phase = (round_begin / R::kStages) & 1;
        if constexpr (S::kAnswer) {
            march_fours<kN>(m, acc);
        } else {
            wait_phase(full + m.stage, m.phase);
            load(m);
            if constexpr (kScaled)
                march_scaled<kN, kGoesOn>(m, acc);
            else
                march_split<kN, kGoesOn>(m, m.left, acc);
        }
    }

    /// acc = the block's fours, each of four splits.
    template <int kN>
    __device__ __forceinline__ void march_fours(March& m, float (&acc)[kN / 8][4]) const {
        constexpr int kFours = kAnswerFours / S::kCluster;
        int split = rank_of() * kFours * (kAnswerSplits / kAnswerFours);
        const auto next = [&] {  // chunks of the split that comes
            const int before = pieces_before(split++);
            return (pieces_before(split) - before) * S::kChunks;
        };
#pragma unroll 1
        for (int four = 0; four < kFours; ++four) {
            march_split<kN>(m, next(), acc);
#pragma unroll 1
            for (int part = 1; part < kAnswerSplits / kAnswerFours; ++part) {
                float own[kN / 8][4];
                march_split<kN>(m, next(), own);
#pragma unroll
                for (int i = 0; i < kN / 8; ++i)
#pragma unroll
                    for (int r = 0; r < 4; ++r) acc[i][r] += own[i][r];
            }
            if constexpr (kFours > 1) {
#pragma unroll
                for (int i = 0; i < kN / 8; ++i) {
                    float4& total = totals()[i * S::kSumThreads];
                    if (four > 0) {
                        acc[i][0] = total.x + acc[i][0], acc[i][1] = total.y + acc[i][1];
                        acc[i][2] = total.z + acc[i][2], acc[i][3] = total.w + acc[i][3];
                    }
                    if (four + 1 < kFours) total = make_float4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
                }
            }
        }
    }
};

}  // namespace quern::cuda::linear

#endif
