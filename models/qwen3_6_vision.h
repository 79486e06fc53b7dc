// The vision tower of Qwen3.5 and 3.6: configuration, weights with their shapes, the forward pass.
//
// Letters: N patches, D width of the tower, H heads, L blocks, F width of the MLP, P pixels of a patch's side, S side of the table of
// positions, m patches along the side of a token's square, O width of the text model. Source: Hugging Face transformers,
// models/qwen3_5_moe (the vision model) and models/qwen2_vl (images).
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/model_weights.h"
#include "models/vision.h"

namespace quern {

class Checkpoint;
class TensorUse;

struct Qwen36VisionConfig {
    int64_t width = 0, blocks = 0, heads = 0, mlp_width = 0;  // D, L, H, F
    int64_t patch = 0, frames = 0, merge = 0;                 // P, frames of a patch, m
    int64_t side = 0;                                         // S
    int64_t out_width = 0;                                    // O
    float theta = 10000, eps = 1e-6f;
    int32_t image_token = 0, video_token = 0;
    ImageSizes sizes;
    VideoSizes video_sizes;

    VisionInfo info() const;
};

/// Whether the checkpoint has a tower: any tensor of one, unless its config.json says language_model_only.
bool has_vision(const Checkpoint& checkpoint);

/// Reads vision_config of config.json and, where they are beside it, preprocessor_config.json and
/// video_preprocessor_config.json. Throws Error(model) naming key,
/// expected, found.
Qwen36VisionConfig parse_qwen3_6_vision_config(const Checkpoint& checkpoint, int64_t text_width,
                                               int64_t vocab_rows);

struct LayerNormWeights {
    Tensor weight, bias;  // F32
};

/// A matrix and its bias, F32.
struct BiasedWeight {
    Weight weight;
    Tensor bias;
};

struct VisionBlockWeights {
    LayerNormWeights norm1, norm2;
    BiasedWeight qkv, proj, fc1, fc2;  // [3D, D], [D, D], [F, D], [D, F]
};

struct Qwen36VisionWeights {
    BiasedWeight patches;  // [D, 3 * frames * P * P]
    Tensor positions;      // F32 [S * S, D]
    std::vector<VisionBlockWeights> blocks;
    LayerNormWeights merger_norm;
    BiasedWeight merger_fc1, merger_fc2;  // [m*m*D, m*m*D], [O, m*m*D]
};

/// Reads and checks every tensor of the tower and accounts for them in `use`. Throws Error(model), naming the first that is
/// missing or has another shape.
Qwen36VisionWeights read_qwen3_6_vision(const Checkpoint& checkpoint, const Qwen36VisionConfig& config,
                                        TensorUse& use);

/// For ModelWeights::uses. `w` must stay where it is.
void list_vision(std::vector<WeightUse>& uses, Qwen36VisionWeights& w);

/// The tower, or a part of it, over the patches of some images.
VisionGraph build_qwen3_6_vision(const Qwen36VisionConfig& config, const Qwen36VisionWeights& weights,
                                 const VisionShape& shape, DType activations);

}  // namespace quern
