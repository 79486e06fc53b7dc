// From checkpoint tensors to weights: the format of every matrix is decided from the tensors that are there.
//
//   P.weight_packed U8 + weight_scale E4M3 + weight_global_scale        NVFP4, compressed-tensors (a divisor)
//   P.weight U8 + weight_scale E4M3 + weight_scale_2                    NVFP4, ModelOpt (a multiplier)
//   P.weight F8_E4M3 + weight_scale | weight_scale_inv                  FP8 per tensor, row or 128x128 block
//   P.weight BF16 | F16 | F32                                           plain
// Scales without a dtype here are BF16, F16 or F32.
// Anything else is an Error(model) that names file, tensor, expected, found and the likely cause. Module and
// tensor names are official names (models/tensor_names.h), without ".weight" for modules.
#pragma once

#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/tensor.h"
#include "ggml-like/weight.h"
#include "models/checkpoint.h"
#include "models/tensor_use.h"

namespace quern {

/// Whether the checkpoint has a matrix of that module name, in any format.
bool has_linear(const Checkpoint& checkpoint, const std::string& module);

/// The matrix [rows, cols] of a linear module (also embed_tokens and lm_head). Codes and block scales stay in
/// the mapping; FP8 row and block scales become float arrays owned by `use`. With ReadMode::values, scales that are
/// floats must be finite and positive and put the largest weight into (1e-3, 1e3), which finds inverted global
/// scales. A global scale of exactly 1 is legal when all codes are zero.
WeightSegment read_linear(const Checkpoint& checkpoint, const std::string& module, int64_t rows, int64_t cols,
                          TensorUse& use);

/// Whether the checkpoint has matrices of that name stacked in one tensor, in any format.
bool has_stacked(const Checkpoint& checkpoint, const std::string& name);

/// `count` matrices [rows, cols] that are stacked in one tensor (the experts of a layer), as segments "name[i]".
/// Either a tensor `name` [count, rows, cols] in BF16, F16, F32, or FP8 beside `name`_scale_inv; or a module `name` in one of
/// the formats above, whose tensors are [count, rows, ...] or [count * rows, ...], with scales for each or one for all.
std::vector<WeightSegment> read_stacked(const Checkpoint& checkpoint, const std::string& name, int64_t count,
                                        int64_t rows, int64_t cols, TensorUse& use);

/// A small tensor (norm, A_log, conv1d) of exactly this shape, converted to F32 in memory owned by `use`; all
/// values must be finite. BF16, F16 and F32 are read. With ReadMode::headers data is null.
Tensor read_floats(const Checkpoint& checkpoint, const std::string& name,
                   std::initializer_list<int64_t> shape, TensorUse& use);

struct ScaleCheck {
    std::vector<std::string> problems;  // at most one line a segment
    int64_t zero_blocks = 0;            // block scales that are zero, so that all their weights are zero
};

/// Reads all block scales (and FP8 values) of the segments. NaN, negative, or all zero over non-zero codes are
/// problems. Reads a ninth of an NVFP4 checkpoint's bytes, so it runs on `threads` threads.
ScaleCheck check_scales(const Checkpoint& checkpoint, std::span<const WeightSegment* const> segments,
                        int threads);

}  // namespace quern
