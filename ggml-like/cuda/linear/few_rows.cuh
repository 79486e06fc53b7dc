// Products of packed weights with few rows of activations (1 to 16): a memory-bound stream of weights through
// tensor cores.
//
//   block = 16 warps; S of them share one tile of 16 weight rows, warp `rank` of S takes chunks rank, rank +
//   S, ... weights: cp.async into a ring of chunks of each warp's own; activations: BF16 in shared memory,
//   row after row, read as B operands by ldmatrix (N = 8 columns are up to 8 rows of x); the S partial sums meet in shared memory and
//   are added in order.
//
// Traffic: every weight byte once. Limits: bytes in flight (ring 48 to 96 KB an SM); for nvfp4 also about 3
// instructions a weight. The order of a sum depends on K only, so a row's bits do not depend on its
// neighbours.
#pragma once

#include "ggml-like/cuda/linear/dense_shapes.h"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/pack/decode.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// The logarithm of warps_per_tile.
__device__ __forceinline__ int log_warps_per_tile(int chunks) { return min(4, 32 - __clz(chunks - 1)); }
static_assert(kWarps == 1 << 4);

/// One chunk from global to shared memory by one warp.
template <Kind K>
__device__ __forceinline__ void copy_chunk(uint8_t* to, const uint8_t* from, int lane) {
    constexpr int kWide = K == Kind::bf16 ? 4 : K == Kind::fp8 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kWide; ++i) copy_async16(to + 512 * i + 16 * lane, from + 512 * i + 16 * lane);
    if constexpr (K == Kind::nvfp4)
        if (lane < 4) copy_async16(to + 512 + 16 * lane, from + 512 + 16 * lane);
    if constexpr (K == Kind::fp8)
        if (lane == 0) copy_async16(to + 1024, from + 1024);
}

__device__ __forceinline__ uint4 load16(const uint8_t* p) { return *reinterpret_cast<const uint4*>(p); }

/// A lane's A registers of 32 columns of a chunk, half j of it, in BF16 or FP8.
template <Kind K>
__device__ __forceinline__ void load_weights(const uint8_t* chunk, int j, int lane, uint32_t (&a)[2][4]) {
    static_assert(K != Kind::nvfp4);
    if constexpr (K == Kind::fp8) {
        const uint4 w = load16(chunk + 512 * j + 16 * lane);
        decode_fp8(w.x, w.y, a[0]);
        decode_fp8(w.z, w.w, a[1]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 w = load16(chunk + 1024 * j + 512 * i + 16 * lane);
            a[i][0] = w.x, a[i][1] = w.y, a[i][2] = w.z, a[i][3] = w.w;
        }
    }
}

/// What a lane gives to operands_of: the shared address of its eight columns of `row`, the row of x that is column lane % 8 of B.
__device__ __forceinline__ uint32_t operand_address(const bf16* row, int lane) {
    return shared_address(row + 8 * (lane >> 3));
}
/// A lane's B registers of 32 columns from `column` on.
__device__ __forceinline__ uint4 operands_of(uint32_t x, int column) {
    uint32_t b[4];
    load_matrices(b, x + 2 * column);
    return make_uint4(b[0], b[1], b[2], b[3]);
}

/// sum[nt] += (chunk, 16 x 64) times the 64 activations from `column` on of x[nt], operand_address of eight rows. Whole warp.
/// kHalf: as in multiply_fp4.
template <Kind K, bool kHalf, int NT>
__device__ __forceinline__ void multiply_chunk(const uint8_t* chunk, const uint32_t (&x)[NT], int column,
                                               int lane, float (&sum)[NT][4]) {
    if constexpr (K == Kind::nvfp4) {
        const auto operands = [&](int nt, int j) { return operands_of(x[nt], column + 32 * j); };
        multiply_fp4<kHalf, NT>(chunk, operands, lane, sum);
    } else {
        float partial[NT][4] = {};
        float(&products)[NT][4] = K == Kind::fp8 ? partial : sum;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint32_t a[2][4];
            load_weights<K>(chunk, j, lane, a);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                const uint4 v = operands_of(x[nt], column + 32 * j);
                mma(products[nt], a[0], v.x, v.y);
                mma(products[nt], a[1], v.z, v.w);
            }
        }
        if constexpr (K == Kind::fp8)
            add_scaled(sum, partial, *reinterpret_cast<const float2*>(chunk + 1024));
    }
}

/// sum += an FP8 chunk's scales times its products; products(kk, a, partial) adds those of its block kk of 16 columns.
template <int NT, class Products>
__device__ __forceinline__ void add_fp8_chunk(const uint8_t* chunk, int lane, const Products& products,
                                              float (&sum)[NT][4]) {
    float partial[NT][4] = {};
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
        const uint2 w = *reinterpret_cast<const uint2*>(chunk + 512 * (kk / 2) + 16 * lane + 8 * (kk % 2));
        uint32_t a[4];
        decode_fp8(w.x, w.y, a);
        products(kk, a, partial);
    }
    const float2 scale = *reinterpret_cast<const float2*>(chunk + 1024);
    add_scaled(sum, partial, scale);
}

/// Up to 16 partial sums, `step` apart, are read at once and added four by four, then the fours: the order,
/// whoever adds.
__device__ __forceinline__ float add_splits(int splits, const float* from, int step) {
    float value[kWarps], total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) value[i] = i < splits ? from[i * step] : 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; i += 4) total += ((value[i] + value[i + 1]) + value[i + 2]) + value[i + 3];
    return total;
}

/// A lane's sums into [8 * NT columns][16 rows].
template <int NT>
__device__ __forceinline__ void store_sums(float* to, const float (&sum)[NT][4], int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) to[(8 * nt + 2 * t + (i & 1)) * 16 + g + (i >> 1) * 8] = sum[nt][i];
}

/// The ring of one warp: `depth` chunks on their way. Source: void next(const uint8_t*& from) gives the
/// chunks in order, null for a step without one.
template <Kind K, int NT>
struct ChunkRing {
    uint8_t* base;  // of this warp
    int stage = 0;

    __device__ explicit ChunkRing(uint8_t* ring, int warp)
        : base(ring + warp * kRingDepth<K, NT> * chunk_bytes(K)) {}

    /// Copies under way for the first depth steps.
    template <typename Source>
    __device__ __forceinline__ void fill(Source& source, int lane) {
#pragma unroll
        for (int i = 0; i < kRingDepth<K, NT>; ++i) request(source, i, lane);
    }
    /// Waits for the current step's chunk.
    __device__ __forceinline__ const uint8_t* wait() {
        wait_copies<kRingDepth<K, NT> - 1>();
        if constexpr (K != Kind::bf16) __syncwarp();  // scales were copied by other lanes
        return base + stage * chunk_bytes(K);
    }
    /// Gives the chunk's place to the next copy.
    template <typename Source>
    __device__ __forceinline__ void release(Source& source, int lane) {
        if constexpr (K != Kind::bf16) __syncwarp();
        request(source, stage, lane);
        stage = stage + 1 == kRingDepth<K, NT> ? 0 : stage + 1;
    }

  private:
    template <typename Source>
    __device__ __forceinline__ void request(Source& source, int at, int lane) {
        const uint8_t* from = source.next();
        if (from != nullptr) copy_chunk<K>(base + at * chunk_bytes(K), from, lane);
        commit_copies();
    }
};

// ---- how activations come into shared memory ----
// All loads of activations go past L1: the kernel may have started before they were written.

/// Columns that a chunk has beyond the matrix.
__device__ __forceinline__ void zero_padding(bf16* h, int stride, int rows, int columns) {
    const int padded = (columns + kChunkCols - 1) / kChunkCols * kChunkCols;
    const int pad = padded - columns;
#pragma unroll 1
    for (int n = 0; n < rows && pad > 0; ++n)
        for (int i = threadIdx.x; i < pad; i += blockDim.x)
            h[n * stride + columns + i] = __float2bfloat16(0.0f);
}

/// Stores eight columns of x, in a format other than BF16 times kActivationLift.
template <Kind K>
__device__ __forceinline__ void store_eight(bf16* to, const uint4& v) {
    static_assert(K == Kind::bf16 || kActivationLift<K> == kActivationLift<Kind::nvfp4>);
    *reinterpret_cast<uint4*>(to) =
        K == Kind::bf16 ? v : make_uint4(lifted(v.x), lifted(v.y), lifted(v.z), lifted(v.w));
}

/// A row is loaded by 2^n of a block's threads, eight columns each: as many as it has eights of columns, if the block has them. The
/// result is n. threads: of the block, a power of two.
__device__ __forceinline__ int log_threads_of_row(int columns, int threads) {
    return min(31 - __clz(threads), 32 - __clz(columns / 8 - 1));
}

/// h = x, BF16, for mixtures; dense products have FewRows (dense_rows.cuh).
template <Kind K>
struct PlainRows {
    static constexpr int kTogether = 8;  // loads of a thread that are under way at the same time
    const bf16* x;
    int64_t ld;
    int columns, rows;

    /// Before the wait, by all threads of every kernel that uses it: the padding.
    __device__ __forceinline__ void early(bf16* h, int stride) const {
        zero_padding(h, stride, rows, columns);
    }
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        const int log_threads = log_threads_of_row(columns, static_cast<int>(blockDim.x));
        const int row = threadIdx.x >> log_threads, row_step = blockDim.x >> log_threads;
        const int column = (threadIdx.x & ((1 << log_threads) - 1)) * 8;
#pragma unroll 1
        for (int k = column; k < columns; k += 8 << log_threads)
#pragma unroll 1
            for (int n = row; n < rows; n += kTogether * row_step)
                copy_some<1>(x + k, h + k, stride, n, row_step);
    }

  private:
    /// Eight columns of row n and every step-th after it, up to kTogether rows, but at least kN.
    template <int kN>
    __device__ __forceinline__ void copy_some(const bf16* from, bf16* to, int stride, int n, int step) const {
        if constexpr (kN < kTogether)
            if (n + kN * step < rows) return copy_some<2 * kN>(from, to, stride, n, step);
        // Instead of rows that do not exist the last one, so that nothing is behind a branch.
        uint4 v[kN];
        const int pitch = 2 * static_cast<int>(ld);  // so that an address is one multiplication
        const auto row = [&](int j) { return j == 0 ? n : min(n + j * step, rows - 1); };
#pragma unroll
        for (int j = 0; j < kN; ++j)
            v[j] = __ldcg(reinterpret_cast<const uint4*>(reinterpret_cast<const uint8_t*>(from) +
                                                         int64_t{row(j)} * pitch));
#pragma unroll
        for (int j = 0; j < kN; ++j) store_eight<K>(to + row(j) * stride, v[j]);
    }
};

}  // namespace quern::cuda::linear
