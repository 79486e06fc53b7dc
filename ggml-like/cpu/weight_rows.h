// Rows of a Weight times activation rows: what `linear` and the two MoE ops share.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml-like/cpu/context.h"
#include "ggml-like/tensor.h"
#include "ggml-like/weight.h"

namespace quern::cpu {

/// Float rows of some activations; `packed` (empty unless asked for) in the order of the NVFP4 kernel.
struct ActivationRows {
    std::vector<const float*> natural;
    std::vector<const float*> packed;

    /// These rows, in this order.
    ActivationRows choose(const std::vector<int64_t>& rows) const;
    int64_t count() const { return static_cast<int64_t>(natural.size()); }
};

/// `count` rows of `width` elements that begin `stride` elements apart in x. F32 rows stay where they are;
/// others go to context buffer `first_buffer`, packed rows to the buffer after it.
ActivationRows activation_rows(const Tensor& x, int64_t count, int64_t width, int64_t stride, bool pack,
                               Context& context, int first_buffer);

bool has_nvfp4(const Weight& w);

/// y[t][row - begin] for rows [begin, end) of the stacked matrix, all scales applied, FP32.
void weight_rows(const DotKernels& dot, const Weight& w, int64_t begin, int64_t end, const ActivationRows& x,
                 float* const* y);

/// Rows for one chunk of work: few enough that all threads are busy and that a chunk's weights stay in a core's cache
/// while it walks over the tokens, many enough that handing it out pays.
int64_t rows_per_chunk(int64_t rows, int64_t bytes_per_row, int64_t products_per_row, int threads);

/// Throws unless the CPU kernels know every segment's format: dtype and scale kind fit, NVFP4 columns are a
/// multiple of 16.
void check_weight(const char* op, std::string_view name, const Weight& w);
/// The same of all experts, and that they are of one shape. Not of placed ones: the backend checked them then, and 256 in each layer would
/// take a third of the time in which the graph of a step is built.
void check_experts(const char* op, std::string_view name, const ExpertWeights& experts);

}  // namespace quern::cpu
