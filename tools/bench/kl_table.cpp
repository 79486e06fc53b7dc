#include "tools/bench/kl_table.h"

#include <fmt/format.h>

#include <fstream>
#include <iterator>

#include "ggml-like/check.h"
#include "models/tokenizer.h"
#include "models/weight_placement.h"
#include "tools/bench/quality.h"
#include "tools/engine/kv_cost.h"
#include "tools/engine/kv_types.h"

namespace quern {

namespace {

std::vector<int32_t> tokens_of_questions(const Model& model, const std::string& path) {
    const ChatFormat& format = model.chat();
    std::vector<int32_t> tokens;
    for (const Question& q : read_questions(path)) {
        const std::vector<int32_t> prompt =
            encode_prompt(format.render(q.messages, q.tools, {.thinking = false}), *model.tokenizer());
        const std::vector<int32_t> answer =
            model.tokenizer()->encode(q.expect + format.turn_end + "\n", Tokenizer::Markers::control);
        tokens.insert(tokens.end(), prompt.begin(), prompt.end());
        tokens.insert(tokens.end(), answer.begin(), answer.end());
    }
    return tokens;
}

std::vector<int32_t> tokens_of_text(const Model& model, const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) FAIL(usage, "--kl: cannot read '{}'", path);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return model.tokenizer()->encode(text, Tokenizer::Markers::control);
}

}  // namespace

std::vector<int32_t> kl_tokens(const Model& model, const std::string& path) {
    CHECK(model.tokenizer() != nullptr, "[compare] {} has no tokenizer", model.info().name);
    std::vector<int32_t> tokens =
        path.ends_with(".jsonl") ? tokens_of_questions(model, path) : tokens_of_text(model, path);
    if (tokens.empty()) FAIL(usage, "--kl: the file has no text");
    const auto most = static_cast<size_t>(model.info().context - 1);
    if (tokens.size() > most) tokens.resize(most);
    return tokens;
}

KlTable measure_kl(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
                   const std::vector<std::pair<std::string, std::string>>& kv) {
    const auto count = static_cast<int64_t>(tokens.size());
    KlTable out{.tokens = count, .rows = {}};
    const Reading before = read_text(model, backend, tokens, reading_options(model, count));
    const auto measure = [&](const char* dense, const std::string& k, const std::string& v) {
        const std::string name = kv_name(parse_kv_types(k, v, backend.activation_dtype()));
        out.rows.push_back(
            {dense, name, compare_reading(before, model, backend, reading_options(model, count, k, v))});
    };
    for (const auto& [k, v] : kv) measure("as stored", k, v);
    if (model.info().dense == DenseFormat::as_stored) return out;
    requantize_weights(model, backend);
    const char* dense = dense_format_name(model.info().dense);
    measure(dense, "auto", "");
    for (const auto& [k, v] : kv) measure(dense, k, v);
    return out;
}

std::string describe(const KlTable& c) {
    std::string text = fmt::format(
        "against the model as it is stored, {} tokens\n\n| dense | KV cache | mean KL | p99 | most | same "
        "likeliest "
        "token |\n| --- | --- | ---: | ---: | ---: | ---: |\n",
        c.tokens);
    for (const KlTable::Row& r : c.rows)
        text += fmt::format("| {} | {} | {:.5f} | {:.4f} | {:.4f} | {:.2f} % |\n", r.dense, r.kv,
                            r.cost.kl_mean, r.cost.kl_p99, r.cost.kl_max, 100 * r.cost.agreement);
    return text;
}

nlohmann::ordered_json to_json(const KlTable& c) {
    nlohmann::ordered_json rows = nlohmann::ordered_json::array();
    for (const KlTable::Row& r : c.rows)
        rows.push_back({{"dense", r.dense},
                        {"kv_cache", r.kv},
                        {"kl_mean", r.cost.kl_mean},
                        {"kl_p99", r.cost.kl_p99},
                        {"kl_max", r.cost.kl_max},
                        {"top1_agreement", r.cost.agreement},
                        {"compared", r.cost.tokens}});
    return {{"tokens", c.tokens}, {"rows", rows}};
}

}  // namespace quern
