// Small random checkpoints that up to four ranks can share, in any format, and groups of CPU ranks to run them on.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "checkpoint_copy.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/backend_group.h"
#include "tools/quantize/write_checkpoint.h"

namespace quern::test {

/// In BF16: 128 columns, 4 layers or 2 of them, heads of 128, two KV and two key heads, inner widths of 512. With `text_from`
/// that directory's tokenizer.
class RankModel {
  public:
    explicit RankModel(bool dense, int vocab_rows = 512, const std::string& text_from = {})
        : dense_(dense), vocab_rows_(vocab_rows) {
        const std::string like = parity(dense ? "dense/bf16" : "base/bf16");
        nlohmann::json config = read_json(like + "/config.json");
        nlohmann::json& text = config.contains("text_config") ? config["text_config"] : config;
        for (const auto& [key, value] : std::map<std::string, int>{{"hidden_size", kWidth},
                                                                   {"vocab_size", vocab_rows_},
                                                                   {"head_dim", kHead},
                                                                   {"num_attention_heads", kHeads},
                                                                   {"num_key_value_heads", kKvHeads},
                                                                   {"linear_num_key_heads", kKeyHeads},
                                                                   {"linear_num_value_heads", kValueHeads},
                                                                   {"linear_key_head_dim", kHead},
                                                                   {"linear_value_head_dim", kHead}})
            text[key] = value;
        for (const char* key :
             {"intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"})
            if (text.contains(key)) text[key] = kInner;
        if (text.contains("num_experts")) text["num_experts"] = kExperts;
        taps_ = text["linear_conv_kernel_dim"];
        add_weights(text["layer_types"]);
        dir_.write("bf16/config.json", config.dump());
        dir_.write("bf16/generation_config.json", read_json(like + "/generation_config.json").dump());
        dir_.write("bf16/model.safetensors", weights_.bytes());
        if (text_from.empty()) return;
        for (const char* file : {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"})
            std::filesystem::copy_file(text_from + "/" + file, dir_ / ("bf16/" + std::string(file)));
    }

    /// The checkpoint with projections, experts and head in a format of a recipe (tools/quantize/recipe.h), or as it is: bf16.
    std::string in(const std::string& format) const {
        const std::string path = dir_ / format;
        if (std::filesystem::exists(path)) return path;
        nlohmann::json recipe;
        for (const char* role : {"attention", "delta", "experts", "shared_expert", "mlp", "head"})
            recipe["roles"][role] = format;
        const std::string file = dir_.write(format + ".json", recipe.dump());
        write_checkpoint(Checkpoint::open(in("bf16")), {.directory = path, .recipe = file, .threads = 2});
        return path;
    }

  private:
    static constexpr int kWidth = 128, kHead = 128, kHeads = 4, kKvHeads = 2, kKeyHeads = 2, kValueHeads = 4,
                         kInner = 512, kExperts = 4;

    void add(const std::string& name, std::vector<int64_t> shape, float mean, float deviation) {
        int64_t count = 1;
        for (const int64_t n : shape) count *= n;
        std::normal_distribution<float> normal(mean, deviation);
        std::string data(static_cast<size_t>(2 * count), 0);
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t bits = float_to_bf16(normal(random_));
            std::memcpy(data.data() + 2 * i, &bits, 2);
        }
        weights_.add(name, "BF16", std::move(shape), std::move(data));
    }
    void matrix(const std::string& name, int64_t rows, int64_t cols) {
        add(name + ".weight", {rows, cols}, 0, 1.0f / std::sqrt(static_cast<float>(cols)));
    }
    void norm(const std::string& name, int64_t size, float mean = 0) {
        add(name + ".weight", {size}, mean, 0.1f);
    }

    void mlp(const std::string& name, int64_t inner) {
        matrix(name + "gate_proj", inner, kWidth);
        matrix(name + "up_proj", inner, kWidth);
        matrix(name + "down_proj", kWidth, inner);
    }

    void mixture(const std::string& name) {
        matrix(name + "gate", kExperts, kWidth);
        matrix(name + "shared_expert_gate", 1, kWidth);
        for (int e = 0; e < kExperts; ++e) mlp(fmt::format("{}experts.{}.", name, e), kInner);
        mlp(name + "shared_expert.", kInner);
    }

    void attention(const std::string& name) {
        matrix(name + "q_proj", 2 * kHeads * kHead, kWidth);
        matrix(name + "k_proj", kKvHeads * kHead, kWidth);
        matrix(name + "v_proj", kKvHeads * kHead, kWidth);
        matrix(name + "o_proj", kWidth, kHeads * kHead);
        norm(name + "q_norm", kHead);
        norm(name + "k_norm", kHead);
    }

    void delta(const std::string& name) {
        const int64_t qkv = (2 * kKeyHeads + kValueHeads) * kHead;
        matrix(name + "in_proj_qkv", qkv, kWidth);
        matrix(name + "in_proj_z", kValueHeads * kHead, kWidth);
        matrix(name + "in_proj_a", kValueHeads, kWidth);
        matrix(name + "in_proj_b", kValueHeads, kWidth);
        matrix(name + "out_proj", kWidth, kValueHeads * kHead);
        add(name + "conv1d.weight", {qkv, 1, taps_}, 0, 0.5f);
        add(name + "A_log", {kValueHeads}, 0, 0.5f);
        add(name + "dt_bias", {kValueHeads}, 0, 0.5f);
        norm(name + "norm", kHead, 1);
    }

    void add_weights(const nlohmann::json& layer_types) {
        const std::string text = "model.language_model.";
        matrix(text + "embed_tokens", vocab_rows_, kWidth);
        for (size_t i = 0; i < layer_types.size(); ++i) {
            const std::string layer = fmt::format("{}layers.{}.", text, i);
            norm(layer + "input_layernorm", kWidth);
            norm(layer + "post_attention_layernorm", kWidth);
            layer_types[i] == "full_attention" ? attention(layer + "self_attn.")
                                               : delta(layer + "linear_attn.");
            dense_ ? mlp(layer + "mlp.", kInner) : mixture(layer + "mlp.");
        }
        norm(text + "norm", kWidth);
        matrix("lm_head", vocab_rows_, kWidth);
    }

    bool dense_;
    int vocab_rows_;
    int64_t taps_ = 0;
    std::mt19937 random_{77};
    SafetensorsWriter weights_;
    TempDir dir_;
};

/// Made once.
inline const RankModel& rank_model(bool dense = false) {
    static const RankModel moe(false), mlp(true);
    return dense ? mlp : moe;
}

/// Ranks that look like devices: plans are captured, and a rank's runs can be made to fail.
struct DeviceRanks {
    explicit DeviceRanks(int ranks) {
        const std::shared_ptr<Communicator> communicator = make_host_communicator(ranks);
        std::vector<std::unique_ptr<Backend>> list;
        for (int r = 0; r < ranks; ++r) {
            auto rank =
                std::make_unique<CountedBackend>(int64_t{1} << 34, make_cpu_backend(1, communicator, r));
            each.push_back(rank.get());
            list.push_back(std::move(rank));
        }
        group = std::make_unique<BackendGroup>(std::move(list), communicator);
    }
    std::vector<CountedBackend*> each;
    std::unique_ptr<Backend> group;
};

}  // namespace quern::test
