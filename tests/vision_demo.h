// The demo checkpoint with a small vision tower of random weights: it sees something, and talks as before.
#pragma once

#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "demo_copy.h"

namespace quern::test {

inline std::string base64(const std::string& bytes) {
    constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 3; ++k)
            bits = bits << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0);
        for (size_t k = 0; k < 4; ++k) out += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
    }
    return out;
}

struct VisionDemo : DemoCopy {
    static constexpr int64_t kWidth = 48, kHeads = 2, kMlp = 40, kPatch = 8, kSide = 4;

    VisionDemo() {
        nlohmann::ordered_json config = nlohmann::ordered_json::parse(std::ifstream(dir / "config.json"));
        const int64_t out = config["text_config"]["hidden_size"];
        config["language_model_only"] = false;
        config["vision_config"] = {{"depth", 1},
                                   {"hidden_size", kWidth},
                                   {"num_heads", kHeads},
                                   {"intermediate_size", kMlp},
                                   {"patch_size", kPatch},
                                   {"num_position_embeddings", kSide * kSide},
                                   {"out_hidden_size", out}};
        dir.write("config.json", config.dump());
        dir.write("preprocessor_config.json",
                  R"({"size": {"shortest_edge": 2048, "longest_edge": 65536}, "patch_size": 8})");
        std::erase_if(weights.entries, [](const auto& e) { return e.name.starts_with("model.visual."); });
        add_tower(out);
        write();
    }

  private:
    void add(const std::string& name, std::vector<int64_t> shape, float scale) {
        int64_t count = 1;
        for (const int64_t n : shape) count *= n;
        std::string data;
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t bits = float_to_bf16(scale * normal_(random_));
            data.append(reinterpret_cast<const char*>(&bits), sizeof bits);
        }
        weights.add("model.visual." + name, "BF16", std::move(shape), data);
    }
    void biased(const std::string& name, int64_t rows, int64_t cols) {
        add(name + ".weight", {rows, cols}, 1 / std::sqrt(static_cast<float>(cols)));
        add(name + ".bias", {rows}, 0.1f);
    }
    void norm(const std::string& name) {
        add(name + ".weight", {kWidth}, 1);
        add(name + ".bias", {kWidth}, 0.1f);
    }
    void add_tower(int64_t out) {
        add("patch_embed.proj.weight", {kWidth, 3, 2, kPatch, kPatch}, 0.1f);
        add("patch_embed.proj.bias", {kWidth}, 0.1f);
        add("pos_embed.weight", {kSide * kSide, kWidth}, 0.3f);
        norm("blocks.0.norm1");
        norm("blocks.0.norm2");
        biased("blocks.0.attn.qkv", 3 * kWidth, kWidth);
        biased("blocks.0.attn.proj", kWidth, kWidth);
        biased("blocks.0.mlp.linear_fc1", kMlp, kWidth);
        biased("blocks.0.mlp.linear_fc2", kWidth, kMlp);
        norm("merger.norm");
        biased("merger.linear_fc1", 4 * kWidth, 4 * kWidth);
        biased("merger.linear_fc2", out, 4 * kWidth);
    }

    std::mt19937 random_{5};
    std::normal_distribution<float> normal_;
};

}  // namespace quern::test
