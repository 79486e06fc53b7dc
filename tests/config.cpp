// config.json of Qwen3.6: what is read, and one clear Error(model) for each fault that can be seen in it
// alone.
#include <doctest/doctest.h>

#include <functional>

#include "checkpoint_writer.h"
#include "ggml-like/json.h"
#include "models/qwen3_6_moe.h"

using namespace quern;
using namespace quern::test;
using nlohmann::json;

namespace {

json good() {
    return json::parse(R"({"model_type": "qwen3_5_moe", "tie_word_embeddings": false, "text_config": {
        "model_type": "qwen3_5_moe_text", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 88,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}})");
}

/// The good configuration after `change`, which gets its text_config.
Qwen36MoeConfig parse(const std::function<void(json&)>& change) {
    json root = good();
    change(root["text_config"]);
    return parse_qwen3_6_moe_config(root, "config.json");
}

std::string error_after(const std::function<void(json&)>& change) {
    return model_error([&] { parse(change); });
}

std::string error_with(const char* key, const json& value) {
    return error_after([&](json& text) { text[key] = value; });
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("config: text_config nested, or its fields at the root") {
        const json root = good();
        json flat = root["text_config"];
        for (const json& j : {root, flat}) {
            const Qwen36MoeConfig c = parse_qwen3_6_moe_config(j, "config.json");
            CHECK(c.layers == 4);
            CHECK(c.full_attention == std::vector<bool>{false, false, false, true});
            CHECK(c.rope_theta == 1e7f);
            CHECK(c.rotary_dims == 8);
            CHECK(c.eos_ids == std::vector<int32_t>{88});
            CHECK_FALSE(c.tied_head);
        }
        CHECK(contains(model_error([] { parse_qwen3_6_moe_config(json::array(), "config.json"); }),
                       "JSON object"));
        json wrong = root;
        wrong["text_config"] = json::array();
        CHECK(contains(model_error([&] { parse_qwen3_6_moe_config(wrong, "config.json"); }),
                       "'text_config' should be an object"));
    }

    TEST_CASE("config: another architecture") {
        const auto type = [](const json& value) {
            json root = good();
            root["model_type"] = value;
            return model_error([&] { parse_qwen3_6_moe_config(root, "config.json"); });
        };
        CHECK(contains(type("llama"), "should be 'qwen3_5_moe'"));
        CHECK(contains(type("llama"), "but is 'llama'"));
        CHECK(contains(type("llama"), "or 'qwen3_5' (Qwen3.5, 3.6 and 3.8, dense"));
        CHECK(contains(type("qwen3_5"),
                       "model_type is 'qwen3_5', but that of text_config is 'qwen3_5_moe_text'"));
        CHECK(contains(type(nullptr), "but is missing"));
        CHECK(contains(type(5), "but is missing"));
    }

    TEST_CASE("config: the dense family, with its own defaults") {
        json root = good();
        root["model_type"] = "qwen3_5";
        json& text = root["text_config"];
        text["model_type"] = "qwen3_5_text";
        CHECK(contains(model_error([&] { parse_qwen3_6_moe_config(root, "config.json"); }),
                       "'num_experts' should be absent (model_type says that the model is dense), but is 8"));
        text.erase("num_experts");
        text.erase("num_experts_per_tok");
        text["linear_num_value_heads"] = 6;
        text["intermediate_size"] = 80;
        const Qwen36MoeConfig c = parse_qwen3_6_moe_config(root, "config.json");
        CHECK(c.dense());
        CHECK(c.dense_width == 80);
        CHECK(c.experts == 0);
        CHECK(std::string(c.architecture()) == "qwen3_5");
        CHECK_FALSE(parse([](json&) {}).dense());
        const Qwen36MoeConfig bare =
            parse_qwen3_6_moe_config({{"model_type", "qwen3_5_text"}}, "config.json");
        CHECK(bare.width == 4096);
        CHECK(bare.layers == 32);
        CHECK(bare.kv_heads == 4);
        CHECK(bare.dense_width == 12288);
        text["intermediate_size"] = 0;
        CHECK(contains(model_error([&] { parse_qwen3_6_moe_config(root, "config.json"); }),
                       "'intermediate_size' should be an integer from 1"));
    }

    TEST_CASE("config: layer_types") {
        CHECK(contains(error_after([](json& t) { t["layer_types"].erase(0); }),
                       "'layer_types' should list 4 layers (num_hidden_layers), but lists 3"));
        CHECK(
            contains(error_after([](json& t) { t["layer_types"].push_back("full_attention"); }), "lists 5"));
        CHECK(contains(error_with("num_hidden_layers", 8), "should list 8 layers"));
        CHECK(contains(error_with("layer_types", "linear_attention"), "is not a list"));
        CHECK(contains(error_after([](json& t) { t["layer_types"][1] = "sliding_attention"; }),
                       "but is \"sliding_attention\""));
        CHECK(contains(error_after([](json& t) { t["layer_types"][1] = 0; }), "'layer_types' should be"));
        const Qwen36MoeConfig c = parse([](json& t) {
            t.erase("layer_types");
            t["full_attention_interval"] = 2;
        });
        CHECK(c.full_attention == std::vector<bool>{false, true, false, true});
        CHECK(contains(error_after([](json& t) {
                           t.erase("layer_types");
                           t["full_attention_interval"] = 0;
                       }),
                       "'full_attention_interval' should be an integer from 1"));
    }

    TEST_CASE("config: long-context rope is refused under either key, old spelling or new") {
        for (const char* key : {"rope_parameters", "rope_scaling"}) {
            for (const char* name : {"rope_type", "type"}) {
                CAPTURE(key);
                CAPTURE(name);
                const std::string message = error_with(key, {{name, "yarn"}, {"factor", 4.0}});
                CHECK(contains(message, std::string("'") + name + "' should be \"default\""));
                CHECK(contains(message, "yarn are not supported"));
            }
            CHECK(contains(error_with(key, 5), std::string("'") + key + "' should be an object"));
        }
        // Beside sound rope_parameters, too: the old key is what guides to yarn tell people to add.
        CHECK(contains(error_with("rope_scaling", {{"type", "linear"}}), "\"linear\""));
        CHECK(error_with("rope_scaling", nullptr) == "<no error>");
    }

    TEST_CASE("config: rope numbers, missing and wrong") {
        const Qwen36MoeConfig c = parse([](json& t) { t.erase("rope_parameters"); });
        CHECK(c.rope_theta == 1e4f);  // what the reference class takes
        CHECK(c.rotary_dims == 8);
        const auto rope = [](const char* key, const json& value) {
            return error_after([&](json& t) { t["rope_parameters"][key] = value; });
        };
        CHECK(contains(rope("rope_theta", 0), "'rope_theta' should be a number from 1"));
        CHECK(contains(rope("rope_theta", "1e7"), "'rope_theta'"));
        CHECK(contains(rope("partial_rotary_factor", 1.5),
                       "'partial_rotary_factor' should be a number from 0 to 1"));
        CHECK(contains(rope("partial_rotary_factor", 0.1), "3 rotary dimensions; it must be even"));
    }

    TEST_CASE("config: eos ids that no token can have") {
        for (const json& bad : std::initializer_list<json>{
                 96, -1, "88", 88.5, {88, 1000}, {88, nullptr}, 18446744073709551615u, json::object()}) {
            CAPTURE(bad.dump());
            CHECK(contains(error_with("eos_token_id", bad),
                           "'eos_token_id' should be token ids below vocab_size (96)"));
        }
        CHECK(parse([](json& t) { t["eos_token_id"] = {1, 95}; }).eos_ids == std::vector<int32_t>{1, 95});
        CHECK(parse([](json& t) { t["eos_token_id"] = nullptr; }).eos_ids.empty());
    }

    TEST_CASE("config: numbers out of range name their limits") {
        for (const char* key :
             {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
              "linear_value_head_dim", "linear_conv_kernel_dim", "num_experts", "num_experts_per_tok",
              "moe_intermediate_size", "shared_expert_intermediate_size", "max_position_embeddings"}) {
            for (const json& bad : std::initializer_list<json>{0, -1, 1e3, 4.5, "4", true, json::array(),
                                                               1u << 31, 18446744073709551615u}) {
                CAPTURE(key);
                CAPTURE(bad.dump());
                CHECK(contains(error_with(key, bad),
                               fmt::format("config.json: '{}' should be an integer from", key)));
            }
        }
        CHECK(contains(error_with("num_experts_per_tok", 9), "an integer from 1 to 8, but is 9"));
        CHECK(contains(error_with("rms_norm_eps", -1), "'rms_norm_eps' should be a number"));
        CHECK(contains(error_with("num_key_value_heads", 3),
                       "should be a multiple of 'num_key_value_heads' (3)"));
        CHECK(contains(error_with("linear_num_key_heads", 3),
                       "should be a multiple of 'linear_num_key_heads' (3)"));
        CHECK(error_with("hidden_size", std::string(100'000, 'x')).size() < 300);
    }

    TEST_CASE("config: switches of variants that quern does not implement") {
        CHECK(contains(error_with("hidden_act", "gelu"), "'hidden_act' should be \"silu\""));
        CHECK(contains(error_with("attention_bias", true), "projections have no bias"));
        CHECK(contains(error_with("attn_output_gate", false), "attention outputs are gated"));
        CHECK(contains(error_with("norm_topk_prob", false), "renormalised"));
        CHECK(contains(error_with("mlp_only_layers", json::array({0})), "every layer has experts"));
        CHECK(contains(error_with("decoder_sparse_step", 2), "every layer has experts"));
    }

    TEST_CASE("config: where the tie of embedding and head is read") {
        const auto tied = [](const json& outer, const json& inner) {
            json root = good();
            root.erase("tie_word_embeddings");
            if (!outer.is_null()) root["tie_word_embeddings"] = outer;
            if (!inner.is_null()) root["text_config"]["tie_word_embeddings"] = inner;
            return parse_qwen3_6_moe_config(root, "config.json").tied_head;
        };
        CHECK(tied(true, false));
        CHECK_FALSE(tied(false, true));  // the outermost level decides
        CHECK(tied(nullptr, true));
        CHECK_FALSE(tied(nullptr, nullptr));
    }
}
