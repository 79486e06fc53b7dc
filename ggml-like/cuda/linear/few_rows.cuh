// Products of packed weights with few rows of activations (1 to 16): a memory-bound stream of weights through
// tensor cores.
//
//   block = 16 warps; S of them share one tile of 16 weight rows, warp `rank` of S takes chunks rank, rank +
//   S, ... weights: cp.async into a ring of chunks of each warp's own; activations: BF16 in shared memory,
//   read as B operands (N = 8 columns are up to 8 rows of x); the S partial sums meet in shared memory and
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

/// Position of column k inside a row.
template <Kind K>
__device__ __forceinline__ int activation_place(int k) {
    if constexpr (K == Kind::nvfp4)
        return (k & ~31) + ((k & 16) >> 2) + ((k & 6) << 2) + ((k & 8) >> 2) + (k & 1);
    return (k & ~15) + ((k & 6) << 1) + ((k & 8) >> 2) + (k & 1);
}

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

/// sum += an FP8 chunk's products times its scales.
template <int NT>
__device__ __forceinline__ void add_fp8_chunk(const uint8_t* chunk, const float (&products)[NT][4],
                                              float (&sum)[NT][4]) {
    const float2 scale = *reinterpret_cast<const float2*>(chunk + 1024);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sum[nt][i] = __fmaf_rn(i < 2 ? scale.x : scale.y, products[nt][i], sum[nt][i]);
}

/// sum[nt] += (chunk, 16 x 64) times the 64 activations from `column` on of x[nt], the lane's row (column of
/// B). kHalf: as in multiply_fp4.
template <Kind K, bool kHalf, int NT>
__device__ __forceinline__ void multiply_chunk(const uint8_t* chunk, const bf16* const (&x)[NT], int column,
                                               int lane, float (&sum)[NT][4]) {
    const auto b = [&](int nt, int kk) {
        return *reinterpret_cast<const uint2*>(x[nt] + column + 16 * kk + 4 * (lane & 3));
    };
    if constexpr (K == Kind::bf16) {
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            const uint4 w = load16(chunk + 512 * kk + 16 * lane);
            const uint32_t a[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
                const uint2 v = b(nt, kk);
                mma(sum[nt], a, v.x, v.y);
            }
        }
    } else if constexpr (K == Kind::fp8) {
        float partial[NT][4] = {};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint4 w = load16(chunk + 512 * h + 16 * lane);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                uint32_t a[4];
                decode_fp8(i ? w.z : w.x, i ? w.w : w.y, a);
#pragma unroll
                for (int nt = 0; nt < NT; ++nt) {
                    const uint2 v = b(nt, 2 * h + i);
                    mma(partial[nt], a, v.x, v.y);
                }
            }
        }
        add_fp8_chunk(chunk, partial, sum);
    } else {
        const auto operands = [&](int nt, int j) {
            return load16(reinterpret_cast<const uint8_t*>(x[nt] + column + 32 * j + 8 * (lane & 3)));
        };
        multiply_fp4<kHalf, NT>(chunk, operands, lane, sum);
    }
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

// ---- prologues: how activations come into shared memory, as they are, with or without the factors of their norm ----
// All loads of activations go past L1: the kernel may have started before they were written.

/// Columns that a chunk has beyond the matrix.
template <Kind K>
__device__ __forceinline__ void zero_padding(bf16* h, int stride, int rows, int columns) {
    const int padded = (columns + kChunkCols - 1) / kChunkCols * kChunkCols;
    const int pad = padded - columns;
#pragma unroll 1
    for (int n = 0; n < rows && pad > 0; ++n)
        for (int i = threadIdx.x; i < pad; i += blockDim.x)
            h[n * stride + activation_place<K>(columns + i)] = __float2bfloat16(0.0f);
}

/// h = x, BF16. kTogether: loads of a thread that are under way at the same time, a power of two; 1: of one row.
template <Kind K, int kTogether = 8>
struct PlainRows {
    const bf16* x;
    int64_t ld;
    int columns, rows;

    /// Before the wait, by all threads of every kernel that uses it: the padding.
    __device__ __forceinline__ void early(bf16* h, int stride) const {
        zero_padding<K>(h, stride, rows, columns);
    }
    __device__ __forceinline__ void late() const {}
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        const Share s(*this);
#pragma unroll 1
        for (int k = s.column; k < columns; k += s.column_step) {
            if constexpr (kTogether == 1) {
                if (s.row == 0) store8(h + place_of_eight(k), __ldcg(reinterpret_cast<const uint4*>(x + k)));
            } else {
#pragma unroll 1
                for (int n = s.row; n < rows; n += kTogether * s.row_step)
                    copy_some<1>(x + k, h + place_of_eight(k), stride, n, s.row_step);
            }
        }
    }

  private:
    /// Of a thread: eights of columns of every row_step-th row. A row is loaded by 2^n threads: as many as it has eights of columns,
    /// if the block has them.
    struct Share {
        int row, row_step, column, column_step;

        __device__ __forceinline__ explicit Share(const PlainRows& p) {
            const int log_threads = min(31 - __clz(blockDim.x), 32 - __clz(p.columns / 8 - 1));
            row = threadIdx.x >> log_threads, row_step = blockDim.x >> log_threads;
            column = (threadIdx.x & ((1 << log_threads) - 1)) * 8, column_step = 8 << log_threads;
        }
    };
    /// activation_place of k, a multiple of 8; two columns further on it is kPairStep more.
    __device__ __forceinline__ static int place_of_eight(int k) {
        if constexpr (K == Kind::nvfp4) return (k & ~31) + ((k & 16) >> 2) + ((k & 8) >> 2);
        return (k & ~15) + ((k & 8) >> 2);
    }
    static constexpr int kPairStep = K == Kind::nvfp4 ? 8 : 4;

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
        for (int j = 0; j < kN; ++j) store8(to + row(j) * stride, v[j]);
    }
    /// Eight columns to their places.
    __device__ __forceinline__ static void store8(bf16* to, const uint4& v) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&words[t]);
            if constexpr (K != Kind::bf16) pair = __hmul2(pair, __float2bfloat162_rn(kActivationLift<K>));
            *reinterpret_cast<__nv_bfloat162*>(to + t * kPairStep) = pair;
        }
    }
};

/// Rows whose norm is deferred, as they are, and their factors in shared memory; up to 8 rows. The last warps have the factors: with one
/// row they load nothing else.
template <Kind K, int kTogether>
struct ScaledRows {
    PlainRows<K, kTogether> rows;
    RowScale scale;
    float* factor;  // [8]
    SquaresOfRow<kTogether == 1 ? 12 : 4> squares = {};

    __device__ __forceinline__ static int row() { return kWarps - 1 - static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ void early(bf16* h, int stride) const { rows.early(h, stride); }
    __device__ __forceinline__ void operator()(bf16* h, int stride) {
        if (row() < rows.rows) squares.load(scale, row());
        rows(h, stride);
    }
    __device__ __forceinline__ void late() const {
        if (row() >= rows.rows) return;
        const float own = norm_factor(scale, squares.sum(scale, row()));
        if (threadIdx.x % 32 == 0) factor[row()] = own;
    }
};

}  // namespace quern::cuda::linear
