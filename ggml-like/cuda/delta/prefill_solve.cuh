// A = (I + L)^-1 diag(beta) of a chunk, by blocks of 16 x 16: diagonal blocks by forward substitution in FP32, the
// others as X_ic = -X_ii sum_j L_ij X_jc on tensor cores, with operands split into two BF16 numbers.
#pragma once

#include "ggml-like/cuda/delta/prefill.cuh"

namespace quern::cuda::delta {

using namespace ptx;

constexpr int kPitch = 24;  // floats a row of a diagonal block: float2 reads of 4 rows meet no bank twice

/// L of a value head in shared memory. Blocks below the diagonal only enter products: each number as the sum of a high and a low BF16
/// one, four words of each a lane, as registers of a right operand.
struct Lower {
    float diagonal[4][16 * kPitch];  // later inverted in place
    uint4 high[6][32], low[6][32];
};
/// The place of block (i, j), j < i.
__device__ __forceinline__ constexpr int below(int i, int j) { return i * (i - 1) / 2 + j; }

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

/// sum += left right^T of 16 x 16 blocks, nearly as exact as FP32. high, low: right as two B operands; words 2 t and
/// 2 t + 1 are rows 8 t to 8 t + 7, columns 0 to 7 and 8 to 15.
__device__ __forceinline__ void multiply(float (&sum)[2][4], const Split& left, const uint32_t (&high)[4],
                                         const uint32_t (&low)[4]) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
        mma(sum[t], left.high, low[2 * t], low[2 * t + 1]);
        mma(sum[t], left.low, high[2 * t], high[2 * t + 1]);
        mma(sum[t], left.high, high[2 * t], high[2 * t + 1]);
    }
}
__device__ __forceinline__ void multiply_below(float (&sum)[2][4], const Split& left, const Lower& lower,
                                               int block, int lane) {
    const uint4 h = lower.high[block][lane], l = lower.low[block][lane];
    multiply(sum, left, {h.x, h.y, h.z, h.w}, {l.x, l.y, l.z, l.w});
}
__device__ __forceinline__ void multiply_diagonal(float (&sum)[2][4], const Split& left, const float* right,
                                                  int lane) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = *reinterpret_cast<const float2*>(right + (8 * (i / 2) + lane / 4) * kPitch +
                                                          2 * (lane % 4) + 8 * (i % 2));
        split(v.x, v.y, high[i], low[i]);
    }
    multiply(sum, left, high, low);
}

/// Block (i, j) of A to the record.
__device__ __forceinline__ void store_block(Record& record, int i, int j, int lane, const uint32_t (&high)[4],
                                            const uint32_t (&low)[4]) {
    store_block(record.solve, i, j, lane, high);
    store_block(record.solve_low, i, j, lane, low);
}

/// One warp: the blocks (i, column), i >= column, of A, from L with inverted diagonal blocks. Works on X^T, whose sums
/// are left operands as they stand.
__device__ void solve_column(const Lower& lower, const float* beta, int column, int lane, Record& record) {
    const int r = lane / 4, c = 2 * (lane % 4);
    const float* diagonal = lower.diagonal[column];
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
        for (int e = 0; e < d; ++e) multiply_below(sum, x[e], lower, below(i, column + e), lane);
        float z[2][4] = {};
        multiply_diagonal(z, split_sums(sum), lower.diagonal[i], lane);
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
