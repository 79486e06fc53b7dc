// The rules for scales, one function each, and explanations of what is wrong with a tensor. They do not name the
// file or the tensor; an empty string means that all is well.
#pragma once

#include <optional>
#include <span>
#include <string>

#include "ggml-like/quantize.h"
#include "ggml-like/safetensors.h"
#include "ggml-like/weight.h"

namespace quern {

/// BF16, F16, F32; false for every other dtype.
bool plain_dtype(SafeDType from, DType& to);
/// Converts all elements of a BF16, F16 or F32 tensor; the source may be unaligned.
void to_floats(const SafeTensor& t, float* out);

/// What is wrong with the codes of an NVFP4 matrix [rows, cols].
std::string explain_codes(const SafeTensor& t, int64_t rows, int64_t cols);
/// What is wrong with its block scales.
std::string explain_block_scale(const SafeTensor& t, int64_t rows, int64_t cols);
/// How the scales of FP8 matrices are laid out.
struct Fp8Scales {
    ScaleKind kind;  // per_tensor, per_row or block128
    int64_t each;    // scales of one matrix; 0: one scale for all matrices
};
/// By the shape of the scales of `count` matrices [rows, cols], which lie in one tensor if there are several; none if it
/// is no shape of theirs. In this order, D and A being blocks of 128 down and across:
///   one matrix   [] | [1] | [1, 1], [rows] | [rows, 1], [D, A] | [D, 1, A, 1]
///   several      the same with `count` in front, or with count * rows and count * D; or one scale for all of them
std::optional<Fp8Scales> fp8_scales(const SafeTensor& t, int64_t count, int64_t rows, int64_t cols);
/// What is wrong with the dtype or the shape of the scales of an FP8 matrix.
std::string explain_fp8_scale(const SafeTensor& t, int64_t rows, int64_t cols);
/// The expected and the found shape, and whether this one looks transposed, stacked or padded.
std::string explain_shape(const SafeTensor& t, std::span<const int64_t> expected);

/// Converts a stored global scale to multiplier form. It must be positive, normal, and imply a largest weight in
/// (1e-3, 1e3); exactly 1 is also legal when all codes are zero (an expert that calibration never reached).
std::string read_global_scale(float stored, std::span<const std::byte> codes, GlobalForm form, float& scale);
/// FP8 scales must be positive and normal, or zero if all their values are zero; the largest weight in the range
/// above. `segment` has data, size and scale_kind set.
std::string check_fp8_scales(const WeightSegment& segment, std::span<const float> scales);

/// True when all NVFP4 codes are +0 or -0.
bool codes_are_zero(std::span<const std::byte> codes);

}  // namespace quern
