// Checkpoints of tests/vectors/parity whose experts are stacked in one tensor a layer.
#pragma once

#include "checkpoint_copy.h"

namespace quern::test::stacked {

inline const std::string kPrefix = "model.language_model.layers.";
inline constexpr int kLayers = 4, kExperts = 8;  // of base

inline std::string experts_of(int layer) { return fmt::format("{}{}.mlp.experts.", kPrefix, layer); }

/// What one tensor of all experts has, expert after expert.
inline std::string gather(SafetensorsWriter& w, int layer, std::initializer_list<const char*> parts,
                          const char* suffix, int experts = kExperts) {
    std::string data;
    for (int e = 0; e < experts; ++e)
        for (const char* part : parts) {
            const std::string name = fmt::format("{}{}.{}{}", experts_of(layer), e, part, suffix);
            data += w.at(name).data;
        }
    return data;
}

/// Compressed-tensors' experts as one matrix [E * rows, cols] a projection. `globals`: the values to store.
inline void stack(SafetensorsWriter& w, bool one_global) {
    SafetensorsWriter out;
    for (int layer = 0; layer < kLayers; ++layer) {
        const auto add = [&](const std::string& name, std::initializer_list<const char*> parts, int64_t rows,
                             int64_t cols) {
            const std::string module = experts_of(layer) + name;
            std::string globals = gather(w, layer, {*parts.begin()}, ".weight_global_scale");
            if (one_global) globals.resize(sizeof(float));
            const auto count = static_cast<int64_t>(globals.size() / sizeof(float));
            out.add(module + ".weight_packed", "U8", {kExperts * rows, cols / 2},
                    gather(w, layer, parts, ".weight_packed"));
            out.add(module + ".weight_scale", "F8_E4M3", {kExperts * rows, cols / 16},
                    gather(w, layer, parts, ".weight_scale"));
            out.add(module + ".weight_global_scale", "F32", {count}, globals);
            if (!one_global)
                out.add(module + ".input_global_scale", "F32", {kExperts},
                        gather(w, layer, {*parts.begin()}, ".input_global_scale"));
        };
        add("gate_up_proj", {"gate_proj", "up_proj"}, 32, 32);
        add("down_proj", {"down_proj"}, 32, 16);
    }
    std::erase_if(w.entries, [](const auto& e) { return contains(e.name, ".mlp.experts."); });
    w.entries.insert(w.entries.end(), out.entries.begin(), out.entries.end());
}

/// The other experts of a layer, or up, get the scale of the first, or of gate: then it can be stored once.
inline void level(SafetensorsWriter& w, int layer, const char* suffix, bool all_experts) {
    for (int e = 0; e < kExperts; ++e)
        for (const char* part : {"gate_proj", "up_proj", "down_proj"}) {
            const bool down = std::string_view(part) == "down_proj";
            w.at(fmt::format("{}{}.{}{}", experts_of(layer), e, part, suffix)).data =
                w.at(fmt::format("{}{}.{}{}", experts_of(layer), all_experts ? 0 : e,
                                 down || all_experts ? part : "gate_proj", suffix))
                    .data;
        }
}

inline constexpr int kFp8Layers = 2, kFp8Experts = 4;  // of real_heads

/// FP8 experts as parameters [E, rows, cols] with a scale each, as transformers holds them; gate and up share theirs.
inline void stack_fp8(SafetensorsWriter& w, bool stacked) {
    SafetensorsWriter out;
    for (int layer = 0; layer < kFp8Layers; ++layer) {
        for (int e = 0; e < kFp8Experts; ++e) {
            const std::string expert = fmt::format("{}{}.", experts_of(layer), e);
            w.at(expert + "up_proj.weight_scale_inv").data = w.at(expert + "gate_proj.weight_scale_inv").data;
        }
        const auto add = [&](const std::string& name, std::initializer_list<const char*> parts, int64_t rows,
                             int64_t cols) {
            const std::string parameter = experts_of(layer) + name;
            out.add(parameter, "F8_E4M3", {kFp8Experts, rows, cols},
                    gather(w, layer, parts, ".weight", kFp8Experts));
            out.add(parameter + "_scale_inv", "BF16", {kFp8Experts, 1, 1},
                    gather(w, layer, {*parts.begin()}, ".weight_scale_inv", kFp8Experts));
        };
        add("gate_up_proj", {"gate_proj", "up_proj"}, 32, 32);
        add("down_proj", {"down_proj"}, 32, 16);
    }
    if (!stacked) return;
    std::erase_if(w.entries, [](const auto& e) { return contains(e.name, ".mlp.experts."); });
    w.entries.insert(w.entries.end(), out.entries.begin(), out.entries.end());
}

}  // namespace quern::test::stacked
