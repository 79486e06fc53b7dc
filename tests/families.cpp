// The table of model families: which row a configuration names, and what an opened model has from its row.
#include "models/families.h"
#include "ggml-like/json.h"

#include <doctest/doctest.h>

#include "ggml-like/error.h"
#include "models/chat_format.h"

namespace quern {
namespace {

const std::string kVectors = std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/";

std::string refusal(const nlohmann::json& config) {
    try {
        family_of(config, "config.json");
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::model);
        return error.what();
    }
    return "";
}

TEST_SUITE("cpu") {
    TEST_CASE("families: a configuration names its row, as a whole or as the text part alone") {
        for (const ModelFamily& f : model_families()) {
            CAPTURE(f.architecture);
            CHECK(&find_family(f.architecture) == &f);
            CHECK(&family_of({{"model_type", f.architecture}}, "x") == &f);
            CHECK(&family_of({{"model_type", f.text_type}}, "x") == &f);
            const nlohmann::json text = {{"model_type", f.text_type}};
            CHECK(&family_of({{"model_type", f.architecture}, {"text_config", text}}, "x") == &f);
        }
    }

    TEST_CASE("families: another model type is refused with the known ones, and so are two in one file") {
        const std::string expected =
            "config.json: model_type should be 'qwen3_5_moe' (Qwen3.5 and 3.6, MoE: Qwen3.6-35B-A3B, "
            "Qwen3.5-397B-A17B, ...) or 'qwen3_5' (Qwen3.5, 3.6 and 3.8, dense: Qwen3.6-27B, Qwen3.5-4B, "
            "...), "
            "but is ";
        CHECK(refusal({{"model_type", "llama"}}) == expected + "'llama'");
        CHECK(
            refusal({{"model_type", 3}}).starts_with(expected + "missing; is this the model's config.json"));
        CHECK(refusal(nlohmann::json::array()) == "config.json: should be a JSON object");
        const nlohmann::json dense = {{"model_type", "qwen3_5_text"}};
        CHECK(refusal({{"model_type", "qwen3_5_moe"}, {"text_config", dense}}) ==
              "config.json: model_type is 'qwen3_5_moe', but that of text_config is 'qwen3_5_text'; were two "
              "configurations mixed?");
    }

    TEST_CASE("families: a model is opened without a backend, with architecture and chat format of its row") {
        for (const auto& [checkpoint, architecture] :
             {std::pair("base/ct", "qwen3_5_moe"), std::pair("dense/ct", "qwen3_5")}) {
            const auto model = open_model(kVectors + checkpoint, {.tokenizer = false});
            CHECK(model->info().architecture == architecture);
            CHECK(&model->chat() == find_family(architecture).chat("").format);
            CHECK(model->info().parameters > 0);
            CHECK(model->weights().memory.empty());
        }
        const auto made = open_synthetic("tiny-dense", "aeon", {.tokenizer = false});
        CHECK(made->info().architecture == "qwen3_5");
        CHECK(&made->chat() == find_family("qwen3_5").chat("").format);
    }
}

}  // namespace
}  // namespace quern
