// Dot products of stored weight rows with F32 activations, one set of kernels per instruction set.
//
// y[t][r] = sum_k w[r][k] * x[t][k] in FP32. The order of the sum depends only on k and the instruction set,
// never on rows, tokens or threads: a token's result has the same bits alone and in a batch. Every stored
// value becomes exactly its float; NaN and infinity come through. Weights may lie at any address (a mapped
// file), nothing outside the described memory is read.
#pragma once

#include <cstdint>

namespace quern::cpu {

/// `rows` consecutive rows of a matrix. Strides in bytes.
struct RowBlock {
    const void* data = nullptr;
    int64_t row_bytes = 0;
    int64_t rows = 0;
    const void* scale = nullptr;  // kernels with block scales only
    int64_t scale_row_bytes = 0;  // 0: all rows use the same scales
};

/// x[t]: k floats of token t, any alignment. y[t][0 .. w.rows) is written. Any k >= 0 unless said otherwise.
using RowKernel = void (*)(const RowBlock& w, int64_t k, const float* const* x, float* const* y,
                           int64_t tokens);

struct DotKernels {
    const char* name;  // "scalar", "avx2", "avx512", "neon"
    RowKernel f32;
    RowKernel bf16;
    RowKernel f16;
    RowKernel f8_e4m3;
    /// scale: one float per 128 columns (the last block may be shorter), applied to the block's sum.
    RowKernel f8_e4m3_block;
    /// data: codes [k/2], scale: E4M3 [k/16], k a multiple of 16; x arranged by pack_nvfp4. Block scales are
    /// applied to sums of products inside their block; no global scale.
    RowKernel nvfp4;
    /// Arranges k floats (a multiple of 16) in the order that `nvfp4` of this set wants; not in place.
    void (*pack_nvfp4)(const float* x, int64_t k, float* packed);
    /// The sum of a[i] * b[i], in an order that depends only on n.
    float (*dot_f32)(const float* a, const float* b, int64_t n);
    /// y[i] += a * x[i]; the bits of an element do not depend on its place.
    void (*axpy)(float a, const float* x, float* y, int64_t n);
    /// y[t][c] = a[t][0] * b[0][c] + a[t][1] * b[1][c] + ..., added in this order, for c < columns; b has `rows` rows,
    /// row_floats apart.
    void (*combine_rows)(const float* b, int64_t row_floats, int64_t columns, const float* const* a,
                         int64_t rows, float* const* y, int64_t tokens);
    /// Of n numbers, in place; what lies more than 87 below the highest counts as 87. NaN anywhere makes all NaN.
    void (*softmax)(float* x, int64_t n);
    /// In place; with u as in its tanh u, within 2e-7 (3 + |2 u|) of it, relative.
    void (*gelu_tanh)(float* x, int64_t n);
};

/// The best set for this CPU, chosen once.
const DotKernels& dot_kernels();

/// All sets that this CPU can run, the best first.
struct DotKernelList {
    const DotKernels* set[4] = {};
    int count = 0;
    const DotKernels* const* begin() const { return set; }
    const DotKernels* const* end() const { return set + count; }
};
DotKernelList available_dot_kernels();

// One definition each where the build has the instruction set.
const DotKernels& scalar_dot_kernels();
const DotKernels& avx2_dot_kernels();
const DotKernels& avx512_dot_kernels();
const DotKernels& neon_dot_kernels();

}  // namespace quern::cpu
