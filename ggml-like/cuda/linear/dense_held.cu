// y = h W^T for 9 to 64 rows of an answer step, W an FP8 or NVFP4 part of a matrix of 32 chunks of columns: each warp holds its
// columns of x in registers, as dense_one.cuh does for one row.
//
//   all tiles   | block 0 | block 1 | block 2 ...           runs of tiles, of equal numbers as far as they go
//   a block     warp p has split p of every sum (few_rows.cuh): two neighbouring chunks of the columns
//   a warp      16 or 32 rows of these 128 columns in registers; tile after tile comes through its ring
//
// Sums of up to kTogether tiles lie where x was, [warp][tile][row of the tile][row of x]; then all threads add splits in fours, and the
// fours, so a row has the bits that it has alone. More than 32 rows are two halves, each for half of the blocks.
//
// Traffic: weights once a half; x once a block, from L2. Bound: latency, and instructions of the block scales: attention's in_proj of 32
// rows takes 15.8 us in a chain of its own (NVFP4; FP8 12.9), 2.5 of bytes; by quarters of gemm_answer.cu 20.3 (19.3) (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/linear/finish_sum.cuh"
#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/linear/held_shapes.h"
#include "ggml-like/cuda/pack/decode.cuh"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"
#include "ggml-like/cuda/ptx/tensor_map.cuh"
#include "ggml-like/cuda/ptx/wgmma.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

/// x of one warp as B operands of mma: 128 columns of 8 * kEights rows, lifted (few_rows.cuh).
template <int kEights>
struct HeldColumns {
    uint32_t b[kHeldChunks][4][kEights][2];

    /// at: the shared address of its first chunk, rows of 128 bytes as the copy engine turns them.
    __device__ __forceinline__ void load(uint32_t at) {
        const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
        const uint32_t place = at + row * 128 + ((lane / 8 % 2 ^ row % 8) << 4);
#pragma unroll
        for (int c = 0; c < kHeldChunks; ++c)
#pragma unroll
            for (int kk = 0; kk < 4; ++kk)
#pragma unroll
                for (int j = 0; j < kEights; j += 2) {
                    uint32_t v[4];
                    load_matrices(v,
                                  (place ^ static_cast<uint32_t>(kk * 32)) + c * kEights * 1024 + j * 1024);
#pragma unroll
                    for (int i = 0; i < 4; ++i) b[c][kk][j + i / 2][i % 2] = lifted(v[i]);
                }
    }
};

/// sum += the tile's chunk times chunk `c` of the held columns; as few_rows.cuh's multiply_chunk, bit by bit.
template <Kind K, int kEights>
__device__ __forceinline__ void multiply_held(const uint8_t* chunk, const uint32_t (&x)[4][kEights][2],
                                              float (&sum)[kEights][4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (K == Kind::fp8) {
        const auto products = [&](int kk, const uint32_t(&a)[4], float(&partial)[kEights][4]) {
#pragma unroll
            for (int n = 0; n < kEights; ++n) mma(partial[n], a, x[kk][n][0], x[kk][n][1]);
        };
        add_fp8_chunk(chunk, lane, products, sum);
    } else {
        const auto operands = [&](int n, int j) {
            return make_uint4(x[2 * j][n][0], x[2 * j][n][1], x[2 * j + 1][n][0], x[2 * j + 1][n][1]);
        };
        multiply_fp4<false, kEights>(chunk, operands, lane, sum);
    }
}

/// One warp's pieces, tile after tile.
template <Kind K, class S>
struct HeldRing {
    uint8_t* data;
    uint64_t* barriers;
    const uint8_t* from;  // the next piece
    int left;             // to ask for
    int at = 0;           // the place of the piece that comes
    uint32_t parities = 0;
    static constexpr int kTileBytes = kWarps * kPieceBytes<K>;

    /// Whole warp.
    __device__ __forceinline__ void init(int lane) {
        if (lane < S::kDepth) init_phases(barriers + lane, 1);
        publish_phases();
        __syncwarp();
    }
    /// Whole warp: asks for the next piece, if there is one, to place `to`.
    __device__ __forceinline__ void request(int to) {
        if (left == 0) return;
        if (elected()) {
            arrive_and_expect(barriers + to, kPieceBytes<K>);
            copy_bytes(data + to * kPieceBytes<K>, from, kPieceBytes<K>, barriers + to);
        }
        --left;
        from += kTileBytes;
    }
    __device__ __forceinline__ const uint8_t* wait() {
        wait_phase(barriers + at, parities >> at & 1);
        return data + at * kPieceBytes<K>;
    }
    /// Whole warp: the piece has been read; its place takes the next one.
    __device__ __forceinline__ void release() {
        __syncwarp();
        if (left > 0) {
            request(at);
            if (left == 0) allow_successor();  // only now: what that asks for early would delay these weights
        }
        parities ^= 1u << at;
        at = at + 1 == S::kDepth ? 0 : at + 1;
    }
};

template <Kind K, int kEights>
__global__ void __launch_bounds__(kThreads, 1)
    held_kernel(const __grid_constant__ GemmTask task, const __grid_constant__ CUtensorMap x) {
#if QUERN_WGMMA
    using S = HeldShape<K, kEights>;
    extern __shared__ __align__(1024) uint8_t unaligned[];
    __shared__ uint64_t barriers[kWarps][S::kDepth + 1];
    __shared__ float scales[S::kRows];
    uint8_t* held = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int halves = (task.tokens + S::kRows - 1) / S::kRows, half = static_cast<int>(blockIdx.x) % halves,
              block = static_cast<int>(blockIdx.x) / halves, blocks = static_cast<int>(gridDim.x) / halves;
    const int begin = static_cast<int>(int64_t{task.tiles} * block / blocks),
              end = static_cast<int>(int64_t{task.tiles} * (block + 1) / blocks);
    const int first = half * S::kRows, count = min(S::kRows, task.tokens - first);

    uint8_t* own = held + warp * S::kWarpBytes;  // of x, then of sums
    uint8_t* rings = held + kWarps * S::kWarpBytes;
    uint64_t* own_x = barriers[warp] + S::kDepth;
    using Ring = HeldRing<K, S>;
    Ring ring{rings + warp * S::kRingBytes, barriers[warp],
              task.data + int64_t{begin} * Ring::kTileBytes + warp * kPieceBytes<K>, end - begin};
    if (lane == 0) init_phases(own_x, 1);
    ring.init(lane);
    if (elected()) prefetch_map(x);
#pragma unroll 1
    for (int i = 0; i < S::kDepth; ++i) ring.request(i);
    __syncwarp();
    bring_near(task);
    wait_for_predecessor();
    if (elected()) {
        arrive_and_expect(own_x, kHeldChunks * S::kRows * 128);
#pragma unroll
        for (int c = 0; c < kHeldChunks; ++c)
            copy_box(own + c * S::kRows * 128, x, (kHeldChunks * warp + c) * kChunkCols, first, own_x);
    }
    __syncwarp();
    if (ring.left == 0) allow_successor();
    const StepOutput& out = task.answer;
    norm_factors(out.scale, first, 1, count, kWarps, scales);
    HeldColumns<kEights> columns;
    wait_phase(own_x, 0);
    columns.load(shared_address(own));
    __syncwarp();

    const int g = lane / 4, t = lane % 4;
#pragma unroll 1
    for (int from = begin; from < end; from += S::kTogether) {
        const int together = min(S::kTogether, end - from);
#pragma unroll 1
        for (int j = 0; j < together; ++j) {
            float sum[kEights][4] = {};
            const uint8_t* piece = ring.wait();
#pragma unroll
            for (int c = 0; c < kHeldChunks; ++c)
                multiply_held<K, kEights>(piece + c * chunk_bytes(K), columns.b[c], sum);
            ring.release();
            float* to = reinterpret_cast<float*>(own + j * S::kTileBytes);
#pragma unroll
            for (int n = 0; n < kEights; ++n)
#pragma unroll
                for (int i = 0; i < 2; ++i)
                    *reinterpret_cast<float2*>(to + S::place(g + 8 * i, 8 * n + 2 * t)) =
                        make_float2(sum[n][2 * i], sum[n][2 * i + 1]);
        }
        // A thread four rows of a tile for one row of x.
        constexpr int kEach = 4 * S::kRows;  // threads of a tile
        const int thread = static_cast<int>(threadIdx.x), j = thread / kEach, n = thread % S::kRows,
                  r = thread % kEach / S::kRows * 4, row = (from + j) * kTileRows + r,
                  there = task.rows - row;
        const bool stores = j < together && n < count && there > 0;
        float4 factor{};
        if (stores) factor = *reinterpret_cast<const float4*>(task.factor + row);
        __syncthreads();
        if (stores) {
            const auto* sums = reinterpret_cast<const float*>(held + j * S::kTileBytes);
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum[i] = add_splits(kWarps, sums + S::place(r + i, n), S::kWarpBytes / 4);
            sum[0] = scaled(sum[0], factor.x), sum[1] = scaled(sum[1], factor.y);
            sum[2] = scaled(sum[2], factor.z), sum[3] = scaled(sum[3], factor.w);
            const float none[4] = {};
            finish_four(out, first + n, row, sum, none, scales[n], there, {});
        }
        if (from + S::kTogether < end) __syncthreads();
    }
#endif
}

template <Kind K, int kEights>
void run(Context& c, const GemmTask& task) {
    using S = HeldShape<K, kEights>;
    const int halves = (task.tokens + S::kRows - 1) / S::kRows;
    const CUtensorMap x =
        make_map(task.x, {.type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                          .dimensions = 2,
                          .size = {static_cast<cuuint64_t>(task.cols), static_cast<cuuint64_t>(task.tokens)},
                          .stride = {static_cast<cuuint64_t>(task.ldx8) * 16},
                          .box = {kChunkCols, static_cast<cuuint32_t>(S::kRows)},
                          .swizzle = CU_TENSOR_MAP_SWIZZLE_128B});
    launch(c, "dense_held", held_kernel<K, kEights>, dim3(static_cast<unsigned>(c.sms / halves * halves)),
           kThreads, S::kShared, task, x);
}

template <Kind K>
void run_rows(Context& c, const GemmTask& task) {
    task.tokens <= HeldShape<K, 2>::kRows ? run<K, 2>(c, task) : run<K, 4>(c, task);
}

}  // namespace

void dense_held(Context& c, const Part& part, const Packed& w, const StepRows& x, const StepOutput& out) {
    GemmTask task = part_task(w, part, x.x, x.ld, x.rows);
    task.answer = out;
    part.kind == Kind::fp8 ? run_rows<Kind::fp8>(c, task) : run_rows<Kind::nvfp4>(c, task);
}

}  // namespace quern::cuda::linear
