// How the tensors of quantized matrices are called and shaped in the two formats of checkpoints. Internal to tools/quantize.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ggml-like/quantize.h"
#include "tools/quantize/write_plan.h"

namespace quern {

WeightStorage storage_of(const WeightSegment& segment);
bool is_fp8(ScaleKind kind);

/// The scales of an FP8 matrix [n, k].
std::vector<int64_t> fp8_scale_shape(WeightStorage storage, int64_t n, int64_t k, CheckpointFormat format);
/// A scale of its own: [1] or [].
std::vector<int64_t> scalar_shape(CheckpointFormat format);

/// A scale of NVFP4 that is one number, by its suffix: compressed-tensors' divisor, ModelOpt's multiplier.
struct ScalarName {
    std::string_view divisor, multiplier;
};
inline constexpr ScalarName kScalarNames[] = {{".weight_global_scale", ".weight_scale_2"},
                                              {".input_global_scale", ".input_scale"}};

/// The scale in form `to`, of one in the other form. A divisor is the one whose reciprocal in FP32, which is what readers
/// multiply with, is the multiplier; without one, the nearest.
float inverse_of(float stored, GlobalForm to);

}  // namespace quern
