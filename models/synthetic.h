// Synthetic checkpoints: random weights in the shapes and formats of a real one, to measure what a machine can do
// before anyone downloads 22 GB.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "models/qwen3_6_moe.h"
#include "models/qwen3_6_vision.h"

namespace quern {

/// "qwen3.6-35b-a3b", "qwen3.6-27b-shape" (dense); "tiny", "tiny-dense": the same in miniature, for tests. With "+vision" behind it:
/// one that reads images. Throws Error(usage) that lists the known names.
Qwen36MoeConfig synthetic_config(const std::string& name);

/// The tower of such a model; none if its name does not say so.
std::optional<Qwen36VisionConfig> synthetic_vision(const std::string& name);

/// Weights without data (a backend fills them when it places them), and small vectors with sensible values in
/// `floats`. Mixes: aeon (experts, shared experts or dense MLPs, and attention in NVFP4; DeltaNet and head in BF16);
/// fp8-head (aeon with an FP8 head in blocks of 128); xs (aeon with DeltaNet projections in NVFP4); nvidia (attention and
/// DeltaNet in FP8, one scale a matrix, the rest and the head in NVFP4); qwen-fp8 (all but the head in FP8 blocks). Throws
/// Error(usage) that lists them.
/// `mtp`: with an MTP layer, in BF16 or, in qwen-fp8, FP8 blocks. `vision`: with such a tower, in BF16.
Qwen36MoeWeights synthetic_weights(const Qwen36MoeConfig& config, const std::string& mix, bool mtp,
                                   const std::optional<Qwen36VisionConfig>& vision,
                                   std::vector<std::unique_ptr<float[]>>& floats);

}  // namespace quern
