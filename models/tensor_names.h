// One name for a tensor, whatever prefix the checkpoint's writer gave it.
#pragma once

#include <string>
#include <string_view>

namespace quern {

/// The official name of a Qwen3.5/3.6 tensor: "model.language_model.layers.3.mlp.gate.weight",
/// "lm_head.weight", "model.visual...", "mtp...". Leading "model." and "language_model.", in any number and order,
/// count as one prefix, so text-only exports (model.layers), older nesting (language_model.model.layers), doubled
/// prefixes and vision below language_model all get the same name. Other names are returned unchanged.
std::string canonical_name(std::string_view name);
/// Whether `name` is its own official name.
bool is_canonical(std::string_view name);

/// The module into which vLLM and SGLang fuse this one and its siblings, which then need one format and one global
/// scale: the same path with qkv_proj, gate_up_proj, in_proj_qkvz or in_proj_ba. `module` itself if they do not fuse it.
std::string fused_name(std::string_view module);

/// What a tensor that the text model does not read is for.
enum class UnusedReason : unsigned char {
    vision,            // tower; only images and videos read it
    mtp,               // layer for multi-token prediction, where it does not draft
    activation_scale,  // input scales of W4A4 and W8A8; activations are not quantized
    kv_scale,          // scales of a quantized attention: q, and k and v, which the model keeps
    rotary,            // rotary inv_freq buffers; computed from the config
};
inline constexpr int kUnusedReasons = 5;

/// "vision tower: only images read it"
const char* unused_reason_text(UnusedReason reason);

/// Finds the reason why a tensor of this official name may stay unread; false if there is none.
bool known_unused(std::string_view canonical, UnusedReason& reason);

}  // namespace quern
