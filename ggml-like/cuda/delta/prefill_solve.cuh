// A = (I + L)^-1 diag(beta) of a chunk, by blocks of 16 x 16: diagonal blocks by forward substitution in FP32, the
// others as X_ic = -X_ii sum_j L_ij X_jc on tensor cores, with operands split into two BF16 numbers.
#pragma once

#include "ggml-like/cuda/delta/prefill.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kPitch = 72;  // floats a row of L in shared memory: float2 reads of 8 rows meet no bank twice

/// One thread: column `column` of the inverse of a 16 x 16 block I + L, by forward substitution, in place. The threads
/// of all 16 columns are in one warp.
__device__ void invert_column(float* block, int column) {
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        float sum = i == column ? 1.0f : 0.0f;
#pragma unroll
        for (int j = 0; j < i; ++j) sum -= block[i * kPitch + j] * x[j];
        x[i] = sum;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) block[i * kPitch + column] = x[i];
}

/// A left operand as the sum of a high and a low BF16 matrix.
struct Split {
    uint32_t high[4];
    uint32_t low[4];
};

__device__ __forceinline__ Split split_sums(const float (&x)[2][4]) {
    Split s;
#pragma unroll
    for (int i = 0; i < 4; ++i) split(x[i / 2][2 * (i % 2)], x[i / 2][2 * (i % 2) + 1], s.high[i], s.low[i]);
    return s;
}

/// sum += left right^T, where right is a 16 x 16 block in shared memory; nearly as exact as FP32.
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Split& left, const float* right,
                                         int lane) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        const float* at = right + (8 * t + lane / 4) * kPitch + 2 * (lane % 4);
        const float2 b0 = *reinterpret_cast<const float2*>(at);
        const float2 b1 = *reinterpret_cast<const float2*>(at + 8);
        uint32_t high0, low0, high1, low1;
        split(b0.x, b0.y, high0, low0);
        split(b1.x, b1.y, high1, low1);
        mma(sum[t], left.high, low0, low1);
        mma(sum[t], left.low, high0, high1);
        mma(sum[t], left.high, high0, high1);
    }
}

/// Block (i, j) of A to the record.
__device__ __forceinline__ void store_block(Record& record, int i, int j, int lane, const uint32_t (&high)[4],
                                            const uint32_t (&low)[4]) {
    store_block(record.solve, i, j, lane, high);
    store_block(record.solve_low, i, j, lane, low);
}

/// One warp: the blocks (i, column), i >= column, of A, from L with inverted diagonal blocks. Works on X^T, whose sums
/// are left operands as they stand.
__device__ void solve_column(const float* lower, const float* beta, int column, int lane, Record& record) {
    const int r = lane / 4, c = 2 * (lane % 4);
    const float* diagonal = lower + column * 16 * (kPitch + 1);
    beta += 16 * column;
    const float2 b0 = *reinterpret_cast<const float2*>(beta + c);
    const float2 b1 = *reinterpret_cast<const float2*>(beta + c + 8);
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(diagonal + (r + 8 * i) * kPitch + c);
        const float2 y = *reinterpret_cast<const float2*>(diagonal + (r + 8 * i) * kPitch + c + 8);
        split(x.x * b0.x, x.y * b0.y, high[2 * i], low[2 * i]);
        split(y.x * b1.x, y.y * b1.y, high[2 * i + 1], low[2 * i + 1]);
    }
    store_block(record, column, column, lane, high, low);

    Split x[3];
    float first[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e)
        first[e / 4][e % 4] = diagonal[(8 * (e / 4) + c + e % 2) * kPitch + r + 8 * (e / 2 % 2)];
    x[0] = split_sums(first);
    const float beta_lo = beta[r], beta_hi = beta[r + 8];
#pragma unroll
    for (int d = 1; d < 4; ++d) {
        const int i = column + d;
        if (i >= 4) break;
        float sum[2][4] = {};
#pragma unroll
        for (int e = 0; e < d; ++e) multiply(sum, x[e], lower + 16 * i * kPitch + 16 * (column + e), lane);
        float z[2][4] = {};
        multiply(z, split_sums(sum), lower + 16 * i * (kPitch + 1), lane);
#pragma unroll
        for (int e = 0; e < 8; ++e) z[e / 4][e % 4] = -z[e / 4][e % 4];
        if (d < 3) x[d] = split_sums(z);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float scale = t % 2 == 0 ? beta_lo : beta_hi;
            split(z[t / 2][2 * (t % 2)] * scale, z[t / 2][2 * (t % 2) + 1] * scale, high[t], low[t]);
            high[t] = transpose(high[t]);
            low[t] = transpose(low[t]);
        }
        store_block(record, i, column, lane, high, low);
    }
}

}  // namespace quern::cuda::delta
