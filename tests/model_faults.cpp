// Whole checkpoints with one fault each: load_model refuses them with one clear Error(model). The sound ones
// are those of tests/parity.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "checkpoint_copy.h"
#include "ggml-like/json.h"
#include "models/checkpoint.h"
#include "models/tensor_use.h"
#include "models/tokenizer.h"
#include "models/weight_placement.h"
#include "tools/engine/engine.h"

using namespace quern;
using namespace quern::test;
using nlohmann::json;

namespace {

const std::string kVectors = QUERN_SOURCE_DIR "/tests/vectors/";
const std::string kExperts = "model.language_model.layers.0.mlp.experts.";

struct Copy : CheckpointCopy {
    using CheckpointCopy::CheckpointCopy;

    std::unique_ptr<Model> load(bool tokenizer = false) const {
        write();
        return load_model(dir.str(), *backend, {.tokenizer = tokenizer});
    }
    /// The same on one thread and on several.
    std::string error(bool tokenizer = false) const {
        const std::string found = model_error([&] { load(tokenizer); });
        const auto threads = make_cpu_backend(4);
        CHECK(model_error([&] { load_model(dir.str(), *threads, {.tokenizer = tokenizer}); }) == found);
        return found;
    }

    std::unique_ptr<Backend> backend = make_cpu_backend(1);
};

/// The error of base/ct after `change`.
std::string after(const std::function<void(Copy&)>& change) {
    Copy copy("base/ct");
    change(copy);
    return copy.error();
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("model faults: the sound checkpoints load") {
        for (const char* name : {"base/ct", "base/modelopt", "base/bf16", "tied_text/ct", "dense/ct"}) {
            CAPTURE(name);
            CHECK(Copy(name).error() == "<no error>");
        }
    }

    TEST_CASE("model: projections that run as one product keep a scale each") {
        Copy copy("base/ct");
        const auto logits = [&] {
            const auto model = copy.load();
            std::vector<float> out;
            Request request;
            request.prompt = {5, 17, 80, 3, 41};
            request.max_tokens = 1;
            request.on_prompt_logits = [&](const PromptLogits& prompt) {
                out.insert(out.end(), prompt.values.begin(), prompt.values.end());
            };
            Engine(*model, *copy.backend, {}).run(std::move(request));
            return out;
        };
        const std::vector<float> before = logits();
        // The same key weights, written with half the divisor and half of each block scale.
        const std::string keys = "model.language_model.layers.3.self_attn.k_proj.";
        float divisor;
        std::string& global = copy.weights.at(keys + "weight_global_scale").data;
        std::memcpy(&divisor, global.data(), sizeof divisor);
        global = f32_bytes(divisor / 2);
        for (char& scale : copy.weights.at(keys + "weight_scale").data) {
            REQUIRE(scale >= 0x10);  // stays a normal number
            scale = static_cast<char>(scale - 8);
        }
        CHECK(before.size() == 5 * 96);
        CHECK(logits() == before);
    }

    TEST_CASE("model faults: a dense model with a matrix missing, of another width, or with experts") {
        const std::string mlp = "model.language_model.layers.1.mlp.";
        const auto dense = [](const std::function<void(Copy&)>& change) {
            Copy copy("dense/ct");
            change(copy);
            return copy.error();
        };
        CHECK(contains(dense([&](Copy& c) { c.weights.remove(mlp + "up_proj.weight_scale"); }),
                       "tensor '" + mlp + "up_proj.weight_scale': expected beside weight_packed"));
        CHECK(contains(dense([](Copy& c) { c.config["text_config"]["intermediate_size"] = 96; }),
                       "layers.0.mlp.gate_proj.weight_packed"));
        CHECK(contains(dense([](Copy& c) {
                           c.config["model_type"] = "qwen3_5_moe";
                           c.config["text_config"]["model_type"] = "qwen3_5_moe_text";
                       }),
                       "layers.0.mlp.gate.weight"));
        CHECK(contains(dense([&](Copy& c) {
                           SafetensorsWriter::Entry router = c.weights.at("lm_head.weight");
                           router.name = mlp + "gate.weight";
                           c.weights.entries.push_back(router);
                       }),
                       "mlp.gate.weight': [96, 32] BF16 is not part of this model"));
    }

    TEST_CASE(
        "model faults: of several the first is told: by layers, tensors before configurations and text") {
        const auto lacking = [](const std::vector<int>& layers) {
            Copy copy("base/ct");
            for (const int layer : layers)
                copy.weights.remove(
                    fmt::format("model.language_model.layers.{}.post_attention_layernorm.weight", layer));
            copy.generation["eos_token_id"] = 1 << 30;
            copy.dir.write("tokenizer.json", "{");
            return copy.error(true);
        };
        CHECK(contains(lacking({3, 2, 1}), "layers.1.post_attention_layernorm.weight"));
        CHECK(contains(lacking({2, 3}), "layers.2.post_attention_layernorm.weight"));
    }

    TEST_CASE("model faults: one tensor missing of many") {
        const std::string module = kExperts + "5.up_proj";
        const auto without = [&](const std::string& suffix) {
            return after([&](Copy& c) { c.weights.remove(module + suffix); });
        };
        CHECK(contains(without(".weight_scale"),
                       "tensor '" + module + ".weight_scale': expected beside weight_packed"));
        CHECK(contains(without(".weight_global_scale"), module + ".weight_global_scale': expected"));
        CHECK(contains(without(".weight_packed"), "its weight_scale is there"));
        CHECK(contains(after([](Copy& c) { c.weights.remove("model.language_model.norm.weight"); }),
                       "'model.language_model.norm.weight': expected [32], found none"));
        CHECK(contains(after([](Copy& c) { c.weights.remove("lm_head.weight"); }), "no lm_head.weight"));
    }

    TEST_CASE("model faults: an expert missing, an expert too many, another number of experts") {
        const auto starts_with_expert = [](int e) {
            return [prefix = kExperts + std::to_string(e) + "."](const SafetensorsWriter::Entry& entry) {
                return entry.name.starts_with(prefix);
            };
        };
        CHECK(contains(after([&](Copy& c) { std::erase_if(c.weights.entries, starts_with_expert(7)); }),
                       kExperts + "7.gate_proj"));
        const std::string extra = after([&](Copy& c) {
            std::vector<SafetensorsWriter::Entry> more;
            std::copy_if(c.weights.entries.begin(), c.weights.entries.end(), std::back_inserter(more),
                         starts_with_expert(7));
            for (SafetensorsWriter::Entry& e : more) {
                e.name[kExperts.size()] = '8';
                c.weights.entries.push_back(e);
            }
        });
        CHECK(contains(extra, "is not part of this model"));
        CHECK(contains(extra, kExperts + "8."));
        CHECK(contains(after([](Copy& c) { c.config["text_config"]["num_experts"] = 7; }), "mlp.gate"));
        CHECK(contains(after([](Copy& c) { c.config["text_config"]["num_experts"] = 9; }), "mlp.gate"));
    }

    TEST_CASE("model faults: experts stacked in a form that is not read") {
        for (const char* suffix : {"_packed", "_blocks"}) {
            const std::string message = after([&](Copy& c) {
                c.weights.at(kExperts + "0.gate_proj.weight_packed").name =
                    kExperts + "gate_up_proj" + suffix;
            });
            CHECK(contains(message, std::string("gate_up_proj") + suffix));
            CHECK(contains(message, "are not read; expected"));
            CHECK(contains(message, "MXFP4") == (suffix == std::string("_blocks")));
        }
    }

    TEST_CASE("model faults: matrices exchanged") {
        // gate and up have one shape: exchanging those two cannot be seen in any file.
        const std::string message = after([](Copy& c) {
            for (const char* suffix : {".weight_packed", ".weight_scale", ".weight_global_scale"}) {
                std::swap(c.weights.at(kExperts + "2.gate_proj" + suffix).name,
                          c.weights.at(kExperts + "2.down_proj" + suffix).name);
            }
        });
        CHECK(contains(message, kExperts + "2.gate_proj.weight_packed"));
        CHECK(contains(message, "[32, 8] U8"));
    }

    TEST_CASE("model faults: layer kinds of the configuration against those of the file") {
        const std::string message = after([](Copy& c) {
            c.config["text_config"]["layer_types"] = {"full_attention", "linear_attention",
                                                      "linear_attention", "linear_attention"};
        });
        CHECK(contains(message, "layers.0.self_attn.q_proj"));
        CHECK(contains(after([](Copy& c) {
                           c.config["text_config"]["num_hidden_layers"] = 3;
                           c.config["text_config"]["layer_types"].erase(3);
                       }),
                       "is not part of this model"));
    }

    TEST_CASE("model faults: tie_word_embeddings against lm_head") {
        // The reference does not tie what is there twice: tests/layouts.cpp.
        CHECK(after([](Copy& c) { c.config["tie_word_embeddings"] = true; }) == "<no error>");
        Copy tied("tied_text/ct");
        tied.config["tie_word_embeddings"] = false;
        CHECK(contains(tied.error(), "no lm_head.weight"));
    }

    TEST_CASE("model faults: vocabulary of configuration, embedding and tokenizer") {
        CHECK(contains(after([](Copy& c) { c.config["text_config"]["vocab_size"] = 104; }),
                       "expected [104, 32], found [96, 32]"));
        Copy big("base/ct");  // a tokenizer of 3033 tokens with an embedding of 96 rows
        for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
            std::filesystem::copy_file(kVectors + "tokenizer/" + name, big.dir / name);
        }
        CHECK(contains(big.error(true), "the embedding of the model has only 96 rows"));
        Copy none("base/ct");
        CHECK(contains(none.error(true), "tokenizer.json"));
    }

    TEST_CASE("model faults: small tensors that are not numbers") {
        CHECK(contains(after([](Copy& c) {
                           c.weights.at("model.language_model.norm.weight").data.replace(2, 2, "\xc0\x7f");
                       }),
                       "'model.language_model.norm.weight': element 1 of [32] BF16 is nan"));
        CHECK(contains(
            after([](Copy& c) { c.weights.at(kExperts + "1.up_proj.weight_scale").data[3] = '\x7f'; }),
            kExperts + "1.up_proj.weight_scale': the scale of row"));
    }

    TEST_CASE("model faults: a quantization list that would ruin a regex engine is never run") {
        CHECK(after([](Copy& c) {
                  json& ignore = c.config["quantization_config"]["ignore"];
                  ignore = {"re:(a+)+$", "re:((.*)*)*x", "re:(", std::string(10'000, '(')};
              }) == "<no error>");
    }

    TEST_CASE("model faults: generation_config.json") {
        const auto with = [](const char* key, const json& value) {
            return after([&](Copy& c) { c.generation[key] = value; });
        };
        for (const json& bad : std::initializer_list<json>{96, -1, "89", {89, 96}, 18446744073709551615u})
            CHECK(contains(with("eos_token_id", bad), "'eos_token_id' should be token ids below 96"));
        CHECK(contains(with("temperature", "hot"), "'temperature' should be a number, but is \"hot\""));
        CHECK(contains(with("top_p", json::array()), "'top_p' should be a number"));
        CHECK(with("temperature", nullptr) == "<no error>");
    }

    TEST_CASE("model: an answer ends with the chat's own marker, whatever the configurations name") {
        const auto backend = make_cpu_backend(1);
        TempDir dir;
        for (const char* name :
             {"tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"})
            std::filesystem::create_symlink(QUERN_SOURCE_DIR "/models/demo/" + std::string(name), dir / name);
        for (const char* generation : {"{}", R"({"eos_token_id": 5})", R"({"eos_token_id": [5, 3001]})"}) {
            dir.write("generation_config.json", generation);
            const auto model = load_model(dir.str(), *backend, {});
            const auto& ids = model->generation().eos_ids;
            const auto end = model->tokenizer()->find_added("<|im_end|>");
            REQUIRE(end);
            CHECK(std::count(ids.begin(), ids.end(), *end) == 1);
            CHECK(std::count(ids.begin(), ids.end(), 5) == (std::string(generation) == "{}" ? 0 : 1));
        }
    }
}
