#include "models/tensor_names.h"

namespace quern {
namespace {

constexpr std::string_view kText = "model.language_model.";

bool strip(std::string_view& s, std::string_view prefix) {
    if (!s.starts_with(prefix)) return false;
    s.remove_prefix(prefix.size());
    return true;
}

/// An official name: `prefix`, then `rest`, which is the end of the name it was found in.
struct Canonical {
    std::string_view prefix, rest;
};

Canonical canonical_parts(std::string_view name) {
    std::string_view rest = name;
    while (strip(rest, "model.") || strip(rest, "language_model.")) {
    }
    if (strip(rest, "visual.") || strip(rest, "vision_tower.")) return {"model.visual.", rest};
    for (const std::string_view start : {"layers.", "embed_tokens.", "norm."}) {
        if (rest.starts_with(start)) return {kText, rest};
    }
    for (const std::string_view start : {"mtp.", "lm_head."}) {
        if (rest.starts_with(start)) return {"", rest};
    }
    return {"", name};
}

}  // namespace

std::string canonical_name(std::string_view name) {
    const Canonical parts = canonical_parts(name);
    return std::string(parts.prefix).append(parts.rest);
}

bool is_canonical(std::string_view name) {
    const Canonical parts = canonical_parts(name);
    return parts.prefix.size() + parts.rest.size() == name.size() && name.starts_with(parts.prefix);
}

std::string fused_name(std::string_view module) {
    constexpr std::pair<std::string_view, std::string_view> kParts[] = {
        {"q_proj", "qkv_proj"},        {"k_proj", "qkv_proj"},      {"v_proj", "qkv_proj"},
        {"gate_proj", "gate_up_proj"}, {"up_proj", "gate_up_proj"}, {"in_proj_qkv", "in_proj_qkvz"},
        {"in_proj_z", "in_proj_qkvz"}, {"in_proj_b", "in_proj_ba"}, {"in_proj_a", "in_proj_ba"},
    };
    const size_t leaf = module.rfind('.') + 1;
    std::string out(module);
    for (const auto& [part, whole] : kParts)
        if (module.substr(leaf) == part) out.replace(leaf, part.size(), whole);
    return out;
}

const char* unused_reason_text(UnusedReason reason) {
    switch (reason) {
        case UnusedReason::vision:
            return "vision tower: only images read it";
        case UnusedReason::mtp:
            return "MTP layer: drafts nothing";
        case UnusedReason::activation_scale:
            return "activation scales: activations are not quantized";
        case UnusedReason::kv_scale:
            return "scales of queries, keys and values: kept, the KV cache is not quantized by them";
        case UnusedReason::rotary:
            return "rotary frequencies: computed from the config";
    }
    return "";
}

bool known_unused(std::string_view canonical, UnusedReason& reason) {
    const auto found = [&](UnusedReason r) {
        reason = r;
        return true;
    };
    if (canonical.starts_with("model.visual.")) return found(UnusedReason::vision);
    if (canonical.starts_with("mtp.")) return found(UnusedReason::mtp);
    for (const std::string_view scale : {".input_global_scale", ".input_scale", "activation_scale"})
        if (canonical.ends_with(scale)) return found(UnusedReason::activation_scale);
    for (const std::string_view scale : {".q_scale", ".k_scale", ".v_scale"})
        if (canonical.ends_with(scale)) return found(UnusedReason::kv_scale);
    if (canonical.ends_with("rotary_emb.inv_freq")) return found(UnusedReason::rotary);
    return false;
}

}  // namespace quern
