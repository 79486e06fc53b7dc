#include "models/families.h"

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "models/checkpoint.h"
#include "models/qwen3_6_chat.h"
#include "models/qwen3_6_moe.h"

namespace quern {
namespace {

constexpr ModelFamily kFamilies[] = {
    {"qwen3_5_moe", "qwen3_5_moe_text", "Qwen3.5 and 3.6, MoE: Qwen3.6-35B-A3B, Qwen3.5-397B-A17B, ...",
     open_qwen3_6_moe, choose_qwen3_chat},
    {"qwen3_5", "qwen3_5_text", "Qwen3.5, 3.6 and 3.8, dense: Qwen3.6-27B, Qwen3.5-4B, ...", open_qwen3_6_moe,
     choose_qwen3_chat},
};

std::string model_type(const nlohmann::json& level) {
    const auto type = level.find("model_type");
    return type != level.end() && type->is_string() ? type->get<std::string>() : "";
}

std::string known_families() {
    std::string text;
    for (const ModelFamily& f : kFamilies)
        text += fmt::format("{}'{}' ({})", text.empty() ? "" : " or ", f.architecture, f.examples);
    return text;
}

const ModelFamily& family_of_type(const std::string& type, const std::string& file) {
    for (const ModelFamily& f : kFamilies)
        if (type == f.architecture || type == f.text_type) return f;
    FAIL(model, "{}: model_type should be {}, but is {}", file, known_families(),
         type.empty() ? "missing; is this the model's config.json, and is it whole? Download it again"
                      : fmt::format("'{}'", type));
}

}  // namespace

std::span<const ModelFamily> model_families() { return kFamilies; }

const ModelFamily& find_family(std::string_view architecture) {
    for (const ModelFamily& f : kFamilies)
        if (architecture == f.architecture) return f;
    FAIL(runtime, "[find_family] there is no family {}", architecture);
}

const ModelFamily& family_of(const nlohmann::json& config, const std::string& file) {
    if (!config.is_object()) FAIL(model, "{}: should be a JSON object", file);
    const std::string whole = model_type(config);
    const ModelFamily& family = family_of_type(whole, file);
    const auto text = config.find("text_config");
    if (text == config.end() || !text->is_object()) return family;
    const std::string part = model_type(*text);
    if (!part.empty() && &family_of_type(part, file) != &family)
        FAIL(model, "{}: model_type is '{}', but that of text_config is '{}'; were two configurations mixed?",
             file, whole, part);
    return family;
}

std::unique_ptr<Model> open_model(const std::string& path, const OpenOptions& options) {
    Checkpoint checkpoint = Checkpoint::open(path, options.threads, options.mtp != MtpUse::none);
    const ModelFamily& family = family_of(checkpoint.config(), checkpoint.files().config);
    return family.open(family, std::move(checkpoint), options);
}

}  // namespace quern
