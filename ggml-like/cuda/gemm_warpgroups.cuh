// The products of gemm.cuh on sm_90a: warpgroup products, and warps of their own that copy.
//
//               tokens: kTokens per block       A block owns 128 weight rows of one part or one expert and a
//               tile of
//   128 rows  w0..w3 | acc: 16 rows x all       tokens. Eight warps multiply, 16 rows each; a ninth keeps a
//   ring of
//             w4..w7 | tokens, per warp         kStages x kChunks chunks of 64 columns full. With kSplit > 1
//             the blocks
//                                               of a cluster share the columns; sums meet in the order of the
//                                               ranks.
//
// Traffic as in gemm.cuh, weights by the copy engine (a tile's chunks of a stage are one piece), tokens as
// well if they are neighbours; chosen tokens by cp.async, and a tenth warp hands them over to the products. A
// comes from registers (packed weights are in its order, codes are decoded there while the products of the
// chunk before run), B from shared memory. Sums go through shared memory to 32-byte stores.
#pragma once

#include <cudaTypedefs.h>

#include "ggml-like/cuda/finish_sum.cuh"
#include "ggml-like/cuda/gemm.cuh"
#include "ggml-like/cuda/wgmma.cuh"

#if QUERN_WGMMA
#define QUERN_CLUSTER(n) __cluster_dims__(n, 1, 1)
#else
#define QUERN_CLUSTER(n)
#endif

namespace quern::cuda {

/// Parts that the sum over a split matrix's columns is made of, each a run of neighbours.
inline constexpr int kSplitParts = 2;

/// Parts of the sums of answers (few_rows.cuh): of part p chunks p, p + 16, ...; they are added in fours, then the fours.
inline constexpr int kAnswerParts = 16, kAnswerFours = 4;

/// Split: blocks that share the columns. Parts: 1, or kAnswerParts for the sums of answers, of which a block makes all fours
/// or, with Split = kAnswerFours, one.
template <int Tokens, int Chunks, int BlocksPerSm, int Split, int Parts, bool Gather>
struct WarpgroupShape {
    static constexpr int kTokens = Tokens;
    static constexpr int kChunks = Chunks;  // of a stage
    static constexpr int kBlocksPerSm = BlocksPerSm;
    static constexpr int kSplit = Split;
    static constexpr int kParts = Parts;
    static constexpr bool kAnswer = Parts == kAnswerParts;
    static_assert((Parts == 1 && (Split == 1 || Split == kSplitParts)) ||
                  (kAnswer && Chunks == 1 && (Split == 1 || Split == kAnswerFours)));
    static constexpr bool kGather = Gather;  // grouped: any rows of x
    static constexpr int kTiles = 8;
    static constexpr int kSumThreads = 256;
    // A block that has its multiprocessor for itself moves registers from the copying warps, a whole group,
    // to the others.
    static constexpr bool kMoveRegisters = BlocksPerSm == 1;
    static constexpr int kThreads = kSumThreads + (kMoveRegisters ? 128 : Gather ? 64 : 32);
    static constexpr int kPitch = kTiles * 16 + 4;  // of sums, in floats
    static constexpr int kSumBytes = Tokens * kPitch * 4;
};

template <Kind K, class S>
struct Ring {
    static constexpr int kTileBytes = S::kChunks * chunk_bytes(K);
    static constexpr int kWeights = S::kTiles * kTileBytes;
    static constexpr int kTokens = S::kChunks * S::kTokens * 128;
    static constexpr int kTotals = S::kAnswer && S::kSplit == 1 ? S::kSumThreads * S::kTokens / 2 * 4 : 0;
    static constexpr int kRoom = 227 * 1024 / S::kBlocksPerSm - 2048 - S::kTokens * 8 - kTotals;
    static constexpr int kMost = kRoom / (kWeights + kTokens);
    static constexpr int kStages = kMost < 8 ? kMost : 8;
    static constexpr int kAll = kStages * (kWeights + kTokens);
    static constexpr int kBytes = kAll > S::kSumBytes ? kAll : S::kSumBytes;
    static constexpr int kShared =
        kBytes + S::kTokens * 8 + kTotals + 1024;  // with the lists of rows and factors, and what aligns it
    static_assert(kStages >= 2 && kBytes <= kRoom);
};

#if QUERN_WGMMA

template <Kind K, class S>
struct WarpgroupBlock {
    using R = Ring<K, S>;
    const GemmTask& task;
    const CUtensorMap& x;  // unless S::kGather
    uint8_t* shared;
    uint64_t* full;
    uint64_t* landed;  // chosen tokens are there, but not yet for products
    uint64_t* empty;
    GemmPlace place;
    const uint8_t* weights;  // of the block's first tile
    int tiles;               // of the block that exist
    int chunk_begin, chunk_end;

    __device__ __forceinline__ uint8_t* tokens_of(int stage) const { return shared + stage * R::kTokens; }
    __device__ __forceinline__ uint8_t* weights_of(int stage) const {
        return shared + R::kStages * R::kTokens + stage * R::kWeights;
    }
    __device__ __forceinline__ int* y_rows() const { return reinterpret_cast<int*>(shared + R::kBytes); }
    __device__ __forceinline__ float* scales() const {
        return reinterpret_cast<float*>(y_rows() + S::kTokens);
    }
    /// Of answers: of each thread its sums over whole fours.
    __device__ __forceinline__ float4* totals() const {
        return reinterpret_cast<float4*>(scales() + S::kTokens) + threadIdx.x;
    }
    /// The chunk that comes at place `at`.
    __device__ __forceinline__ int chunk_at(int at) const {
        if constexpr (!S::kAnswer) return at;
        const int steps = task.chunks / kAnswerParts, part = quotient(at, steps);
        return part + (at - part * steps) * kAnswerParts;
    }
    __device__ __forceinline__ int steps() const {
        return (chunk_end - chunk_begin + S::kChunks - 1) / S::kChunks;
    }

    __device__ __forceinline__ void init_barriers() const {
        if (threadIdx.x < R::kStages) {
            init_phases(full + threadIdx.x, S::kGather ? 2 : 1);
            init_phases(landed + threadIdx.x, 32);
            init_phases(empty + threadIdx.x, S::kSumThreads / 32);
        }
        publish_phases();
    }

    __device__ __forceinline__ void find_weights() {
        const int tile = place.row_block * S::kTiles;
        weights = task.data + place.expert * task.expert_bytes +
                  static_cast<int64_t>(tile) * task.chunks * chunk_bytes(K);
        tiles = min(S::kTiles, task.tiles - tile);
        const int rank = S::kSplit == 1 ? 0 : cluster_rank();
        chunk_begin = rank * task.chunks / S::kSplit;
        chunk_end = (rank + 1) * task.chunks / S::kSplit;
    }

    __device__ __forceinline__ void wait_empty(int step) const {
        if (step >= R::kStages) wait_phase(empty + step % R::kStages, (step / R::kStages - 1) & 1);
    }

    /// One warp. Announces the stage's bytes, those of tokens that the copy engine brings included.
    __device__ __forceinline__ void copy_weights(int step, int lane) const {
        const int stage = step % R::kStages;
        const int at = chunk_begin + step * S::kChunks, chunk = chunk_at(at);
        const int bytes = min(S::kChunks, chunk_end - at) * chunk_bytes(K);  // of each tile
        if (lane == 0)
            arrive_and_expect(full + stage,
                              static_cast<uint32_t>(tiles * bytes + (S::kGather ? 0 : R::kTokens)));
        __syncwarp();
        if (lane < tiles)
            copy_bulk(weights_of(stage) + lane * R::kTileBytes,
                      weights + (static_cast<int64_t>(lane) * task.chunks + chunk) * chunk_bytes(K),
                      static_cast<uint32_t>(bytes), full + stage);
    }

    /// The copying warp. The weights of the first `primed` steps are under way.
    __device__ __forceinline__ void keep_full(int primed, int lane) const {
        const int all = steps();
#pragma unroll 1
        for (int step = 0; step < all; ++step) {
            const int stage = step % R::kStages;
            wait_empty(step);
            if (step >= primed) copy_weights(step, lane);
            if (lane < S::kChunks)
                copy_box(tokens_of(stage) + lane * (S::kTokens * 128), x,
                         chunk_at(chunk_begin + step * S::kChunks + lane) * kChunkCols, place.first,
                         full + stage);
        }
    }

    /// As keep_full for chosen tokens, without weights. Few instructions: this warp's pace is the block's.
    __device__ __forceinline__ void gather_full(int lane) const {
        uint32_t row[S::kTokens / 4];  // of x, in 16 bytes; absent ones repeat the last
#pragma unroll
        for (int i = 0; i < S::kTokens / 4; ++i) {
            if (i * 4 >= place.count) break;
            const int n = place.first + min(i * 4 + lane / 8, place.count - 1);
            row[i] = static_cast<uint32_t>(rows_of(task, n).x) * static_cast<uint32_t>(task.ldx8);
        }
        const int column = lane % 8;
        const uint32_t place_of[2] = {
            static_cast<uint32_t>(lane / 8 * 128 + ((column ^ (lane / 8)) << 4)),
            static_cast<uint32_t>(512 + lane / 8 * 128 + ((column ^ (lane / 8 + 4)) << 4))};
        const int all = steps();
        int stage = 0;
        uint32_t phase = 1;
#pragma unroll 1
        for (int step = 0; step < all; ++step) {
            wait_phase(empty + stage, phase);  // a new barrier's phase before its first has ended
            const uint8_t* to = tokens_of(stage);
            const int k = (chunk_begin + step * S::kChunks) * kChunkCols + column * 8;
            const uint8_t* from[S::kChunks];
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                // Weights of columns that are absent are zeros: any that are there will do.
                const int there = k + c * kChunkCols < task.cols ? k + c * kChunkCols
                                  : column * 8 < task.cols       ? column * 8
                                                                 : 0;
                from[c] = reinterpret_cast<const uint8_t*>(task.x + there);
            }
#pragma unroll
            for (int i = 0; i < S::kTokens / 4; ++i) {
                if (i * 4 >= place.count) break;
#pragma unroll
                for (int c = 0; c < S::kChunks; ++c)
                    copy_async_at(
                        shared_address(to) + place_of[i % 2] + i / 2 * 1024 + c * (S::kTokens * 128),
                        from[c] + uint64_t{row[i]} * 16);
            }
            arrive_after_copies(landed + stage);
            if (++stage == R::kStages) stage = 0, phase ^= 1;
        }
    }

    /// One warp, beside gather_full: the fence between cp.async and products, where no other copies or
    /// products have to wait for it; and the weights.
    __device__ __forceinline__ void hand_over(int primed, int lane) const {
        const int all = steps();
#pragma unroll 1
        for (int step = 0; step < all; ++step) {
            wait_phase(landed + step % R::kStages, (step / R::kStages) & 1);
            fence_shared_for_wgmma();
            if (lane == 0) arrive(full + step % R::kStages);
            const int next = step + R::kStages - 1;
            if (next >= primed && next < all) {
                wait_empty(next);
                copy_weights(next, lane);
            }
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
            if (task.answer.scale.squares != nullptr)
                norm_factors(task.answer.scale, place.first, place.count, S::kSumThreads / 32, scales());
    }

    /// The A registers of chunk c of a stage.
    __device__ __forceinline__ void load(int stage, int c, uint32_t (&a)[4][4]) const {
        WeightChunk<K> chunk;
        chunk.load(
            weights_of(stage) + static_cast<int>(threadIdx.x) / 32 * R::kTileBytes + c * chunk_bytes(K),
            threadIdx.x % 32);
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) chunk.fragment(kk, a[kk]);
    }

    /// The multiplying warps: acc = their 16 rows x the first kN tokens, over the columns of one part. While the products
    /// of a chunk run, its successor's A registers are made.
    struct March {
        int stage = 0, chunk = 0, left;  // chunk of the stage; chunks to come
        uint32_t phase = 0;
        uint32_t next[4][4];
    };
    template <int kN>
    __device__ __forceinline__ void march_part(March& m, int chunks, float (&acc)[kN / 8][4]) const {
#pragma unroll
        for (int i = 0; i < kN / 8; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][r] = 0;
        hold(acc);  // the zeros are there before the fence
#pragma unroll 1
        for (; chunks > 0; --chunks) {
            const uint64_t rows =
                wgmma_rows(shared_address(tokens_of(m.stage)) + m.chunk * (S::kTokens * 128));
            uint32_t a[4][4];
#pragma unroll
            for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = m.next[i / 4][i % 4];
            wgmma_fence();
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) wgmma<kN>(acc, a[kk], rows + kk * 2);
            wgmma_commit();
            const int done = m.stage;
            if (++m.chunk == S::kChunks) {
                m.chunk = 0;
                if (++m.stage == R::kStages) m.stage = 0, m.phase ^= 1;
            }
            if (--m.left > 0) {
                if (m.chunk == 0) wait_phase(full + m.stage, m.phase);
                load(m.stage, m.chunk, m.next);
            }
            wgmma_wait<0>();
            hold(a);
            if (m.chunk == 0 && threadIdx.x % 32 == 0) arrive(empty + done);
        }
        hold(acc);
    }
    /// The same over all columns of the block.
    template <int kN>
    __device__ __forceinline__ void march(float (&acc)[kN / 8][4]) const {
        March m;
        m.left = chunk_end - chunk_begin;
        wait_phase(full, 0);
        load(0, 0, m.next);
        if constexpr (S::kAnswer) {
            march_fours<kN>(m, acc);
        } else {
            march_part<kN>(m, m.left, acc);
        }
    }

    /// acc = the block's fours, each of four parts.
    template <int kN>
    __device__ __forceinline__ void march_fours(March& m, float (&acc)[kN / 8][4]) const {
        const int steps = task.chunks / kAnswerParts;
        constexpr int kFours = kAnswerFours / S::kSplit;
#pragma unroll 1
        for (int four = 0; four < kFours; ++four) {
            march_part<kN>(m, steps, acc);
#pragma unroll 1
            for (int part = 1; part < kAnswerParts / kAnswerFours; ++part) {
                float own[kN / 8][4];
                march_part<kN>(m, steps, own);
#pragma unroll
                for (int i = 0; i < kN / 8; ++i)
#pragma unroll
                    for (int r = 0; r < 4; ++r) acc[i][r] += own[i][r];
            }
            if constexpr (kFours == 1) return;
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
        const float* f =
            task.factor +
            (static_cast<int64_t>(place.expert) * task.tiles + place.row_block * S::kTiles) * 16 + raw;
#pragma unroll
        for (int i = 0; i < kRaw; ++i) factor[i] = f[i] * kRowLift<K>;
        const int rank = S::kSplit == 1 ? 0 : cluster_rank();
        for (int n = static_cast<int>(threadIdx.x) / kLanes * S::kSplit + rank; n < place.count;
             n += kEach * S::kSplit) {
            float v[kRaw];
            const float scale = scales()[n];
#pragma unroll
            for (int i = 0; i < kRaw; i += 4) {
                const float4 s = sums_at(n * S::kPitch + raw + i);
                v[i] = s.x * factor[i] * scale, v[i + 1] = s.y * factor[i + 1] * scale;
                v[i + 2] = s.z * factor[i + 2] * scale, v[i + 3] = s.w * factor[i + 3] * scale;
            }
            float out[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) out[i] = kPaired ? gated_prompt(v[i], v[i + kRaw - 8]) : v[i];
            const int64_t y_row = y_rows()[n];
            store_row(task, out, y_row * task.ldy + row, y_row * task.residual_ld + row, there);
        }
    }

    /// Of answers: 16 neighbouring lanes for the rows of a tile, as finish_sum wants them.
    __device__ __forceinline__ void store_answer() const {
        const StepOutput& out = task.answer;
        const int kept = out.paired ? 8 : 16, height = out.paired ? task.rows / 2 : task.rows;
        const int rank = S::kSplit == 1 ? 0 : cluster_rank(), lanes = S::kSumThreads / 16;
        const int r = static_cast<int>(threadIdx.x) % 16, each = static_cast<int>(threadIdx.x) / 16;
        if (r >= kept) return;
        for (int i = each; i < tiles * ((place.count - rank + S::kSplit - 1) / S::kSplit); i += lanes) {
            const int n = quotient(i, tiles), tile = i - n * tiles, token = n * S::kSplit + rank;
            const int row = (place.row_block * S::kTiles + tile) * kept + r;
            if (row >= height) continue;
            const auto sum = [&](int at) { return sum_at(token * S::kPitch + tile * kTileRows + at); };
            finish_sum(out, place.first + token, row, sum(r), out.paired ? sum(r + 8) : 0.0f,
                       out.scale.squares != nullptr ? scales()[token] : 1.0f);
        }
    }
    __device__ __forceinline__ float sum_at(int at) const {
        const float* here = reinterpret_cast<const float*>(shared) + at;
        if constexpr (S::kSplit == 1) return *here;
        float sum = 0;
#pragma unroll
        for (int rank = 0; rank < S::kSplit; ++rank) sum += load_one_of_block(shared_address(here), rank);
        return sum;
    }

    template <int kN>
    __device__ __forceinline__ void multiply() const {
        float acc[kN / 8][4];
        march<kN>(acc);
        put_sums<kN>(acc);
    }

    /// Products of absent tokens cost as much as others: as few as there are, in steps of 16.
    __device__ __forceinline__ void multiply_present() const {
        if constexpr (S::kTokens == 256) {
            if (place.count > 96) return multiply<256>();
        }
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
    warpgroup_kernel(const __grid_constant__ GemmTask task, const __grid_constant__ CUtensorMap x) {
#if QUERN_WGMMA
    using R = Ring<K, S>;
    extern __shared__ __align__(1024) uint8_t unaligned[];
    __shared__ uint64_t barriers[3 * R::kStages];
    allow_successor();
    uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    WarpgroupBlock<K, S> block{task, x, shared, barriers, barriers + R::kStages, barriers + 2 * R::kStages};
    block.init_barriers();
    const int id = static_cast<int>(blockIdx.x) / S::kSplit;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x % 32;
    if constexpr (S::kGather) {
        wait_for_predecessor();
        block.place = grouped_place<S>(task, id);
        if (block.place.count == 0) return;
    } else {
        block.place = dense_place<S>(task, id);
    }
    block.find_weights();
    __syncthreads();
    const int primed = min(R::kStages, block.steps());
    if (warp == (S::kGather ? 9 : 8))
        for (int i = 0; i < primed; ++i) block.copy_weights(i, lane);
    if constexpr (!S::kGather) wait_for_predecessor();
    if (warp >= 8) {
        if constexpr (S::kMoveRegisters) shrink_registers<40>();
        if (warp == 8) {
            if constexpr (S::kGather)
                block.gather_full(lane);
            else
                block.keep_full(primed, lane);
        } else if (S::kGather && warp == 9) {
            block.hand_over(primed, lane);
        }
    } else {
        if constexpr (S::kMoveRegisters) grow_registers<232>();
        block.find_y_rows();
        block.multiply_present();
    }
    if constexpr (S::kSplit > 1) cluster_barrier();
    if (warp < 8) {
        if constexpr (S::kSplit == 1) block.sum_barrier();
        if constexpr (S::kAnswer)
            block.store_answer();
        else if (task.paired)
            block.template store_sums<true>();
        else
            block.template store_sums<false>();
    }
    if constexpr (S::kSplit > 1) cluster_barrier();
#endif
}

/// Whether this binary has code for sm_90a, which takes everything but fp8 (its scales meet the sums of a
/// chunk).
template <Kind K, class S>
bool has_warpgroups() {
    static const bool has = [] {
        cudaFuncAttributes attributes{};
        check_launch(cudaFuncGetAttributes(&attributes, warpgroup_kernel<K, S>), "gemm");
        return attributes.sharedSizeBytes > 0;
    }();
    return has;
}

/// The dense x as boxes of S::kTokens rows and 64 columns, which the copy engine writes in the order of
/// products.
template <class S>
CUtensorMap token_map(const GemmTask& task) {
    static const auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check_launch(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found),
            "gemm");
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
    }();
    CUtensorMap map{};
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(task.cols), static_cast<cuuint64_t>(task.tokens)};
    const cuuint64_t stride[1] = {static_cast<cuuint64_t>(task.ldx8) * 16};
    const cuuint32_t box[2] = {kChunkCols, S::kTokens};
    const cuuint32_t each[2] = {1, 1};
    const CUresult made = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<bf16*>(task.x), sizes,
                                 stride, box, each, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check_launch(made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "gemm: the map of its rows");
    return map;
}

/// Whether the GPU takes this shape's kernel: there is code for it, and shared memory.
template <Kind K, class S>
bool warpgroups_fit(const Context& context) {
    return context.capability == 90 && Ring<K, S>::kShared <= context.shared_bytes && has_warpgroups<K, S>();
}

/// `token_tiles` of S::kTokens.
template <Kind K, class S>
void launch_warpgroups(Context& context, const char* what, GemmTask task, int64_t token_tiles) {
    task.row_blocks = (task.tiles + S::kTiles - 1) / S::kTiles;
    const dim3 grid(static_cast<unsigned>(task.row_blocks * token_tiles * S::kSplit));
    CUtensorMap x{};
    if constexpr (!S::kGather) x = token_map<S>(task);
    launch(context, what, warpgroup_kernel<K, S>, grid, dim3(S::kThreads), Ring<K, S>::kShared, task, x);
}

}  // namespace quern::cuda
