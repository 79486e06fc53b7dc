// Matrices that a kernel reads together, in one format: gate and up of a pair, the experts of a layer.
//
// A checkpoint may store them in several. A backend whose kernels cannot mix them holds all of them in BF16, each weight
// rounded once; what is stored alike stays as it is.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "ggml-like/weight.h"

namespace quern {

/// Whether all segments that are read together are FP8, or NVFP4, or have 16 or 32 bits. Segments of a stacked weight are
/// read one after another, so any formats will do.
bool one_format(const Weight& weight, RowOrder order);
bool one_format(const ExpertWeights& experts);

/// The same matrices in BF16, without data.
Weight bf16_form(const Weight& weight);
ExpertWeights bf16_form(const ExpertWeights& experts);

/// A form with data, and the memory that it points into.
template <typename T>
struct InBf16 {
    T form;
    std::vector<std::unique_ptr<std::byte[]>> memory;
};

/// Without data where the weight has none.
InBf16<Weight> to_bf16(const Weight& weight, int threads);
InBf16<ExpertWeights> to_bf16(const ExpertWeights& experts, int threads);

}  // namespace quern
