#include "tools/common/doctor/known_models.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/json.h"
#include "models/tokenizer.h"

namespace quern {

extern const char* const kKnownModels;  // known_models.json

namespace {

using Json = nlohmann::json;

std::vector<KnownAnswer> read_answers(const Json& list) {
    std::vector<KnownAnswer> out;
    for (const Json& a : list)
        out.push_back(
            {a.at("prompt").get<std::vector<int32_t>>(), a.at("answer").get<std::vector<int32_t>>()});
    return out;
}

KnownNumbers read_numbers(const Json& j) {
    return {j.at("weight_bytes").get<int64_t>(), j.at("prompt").get<std::vector<int32_t>>(),
            j.at("log_probability").get<std::vector<double>>(),
            j.at("residual_rms").get<std::vector<double>>()};
}

KnownModel read_model(const Json& j) {
    KnownModel m;
    j.at("name").get_to(m.name);
    j.at("agreed").get_to(m.agreed);
    const Json& shape = j.at("shape");
    shape.at("architecture").get_to(m.architecture);
    shape.at("layers").get_to(m.layers);
    shape.at("width").get_to(m.width);
    shape.at("experts").get_to(m.experts);
    shape.at("experts_used").get_to(m.experts_used);
    shape.at("vocab_rows").get_to(m.vocab_rows);
    j.at("vocabulary").at("text").get_to(m.text);
    j.at("vocabulary").at("ids").get_to(m.text_ids);
    if (j.contains("embedding")) {
        j["embedding"].at("token").get_to(m.embedding_token);
        j["embedding"].at("row").get_to(m.embedding_row);
        j["embedding"].at("tolerance").get_to(m.embedding_tolerance);
    }
    m.answers = read_answers(j.value("answers", Json::array()));
    m.likeliest = read_answers(j.value("likeliest", Json::array()));
    if (j.contains("numbers")) m.numbers = read_numbers(j["numbers"]);
    m.nats = j.value("nats", m.nats);
    m.bits_per_byte = j.value("bits_per_byte", m.bits_per_byte);
    j.at("recall_tokens").get_to(m.recall_tokens);
    return m;
}

bool same_shape(const KnownModel& k, const ModelInfo& i) {
    return k.architecture == i.architecture && k.layers == i.layers && k.width == i.width &&
           k.experts == i.experts && k.experts_used == i.experts_used && k.vocab_rows == i.vocab_rows;
}

}  // namespace

std::vector<KnownModel> parse_known_models(const std::string& json) {
    std::vector<KnownModel> list;
    try {
        const Json root = Json::parse(json);
        for (const Json& entry : root.at("models")) list.push_back(read_model(entry));
    } catch (const Json::exception& error) {
        FAIL(runtime, "known models, entry {}: {}", list.size() + 1, error.what());
    }
    return list;
}

const std::vector<KnownModel>& known_models() {
    static const std::vector<KnownModel> list = parse_known_models(kKnownModels);
    return list;
}

const KnownModel* find_known_model(const std::vector<KnownModel>& list, const Model& model) {
    for (const KnownModel& k : list)
        if (same_shape(k, model.info()) && model.tokenizer() != nullptr &&
            model.tokenizer()->encode(k.text, Tokenizer::Markers::literal) == k.text_ids)
            return &k;
    return nullptr;
}

}  // namespace quern
