// Api: routes of Ollama, llama.cpp and vLLM that are not of the OpenAI API.
#include <fmt/format.h>

#include "models/tokenizer.h"
#include "tools/serve/api.h"
#include "tools/serve/api_error.h"
#include "tools/serve/other_formats.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// The version of Ollama's API that is spoken; clients ask for a least one.
constexpr const char* kOllamaVersion = "0.12.0";

/// No file has these; clients want them.
constexpr const char* kNoDate = "2026-01-01T00:00:00Z";

}  // namespace

HttpReply Api::llama_completion(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->completion(chat_body(parse(r)).body, &ignored);
    auto format = llama_format(request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

/// With the prompt in place of the texts before and after it.
ordered_json Api::infill_body(Body body) const {
    Fields f(body);
    const std::vector<int32_t> ids = infill_prompt(*engine_->model().tokenizer(), f);
    for (const char* name : {"input_prefix", "input_suffix", "input_extra", "filename"}) body.erase(name);
    body["prompt"] = ids;
    return body;
}

HttpReply Api::infill(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->completion(infill_body(chat_body(parse(r)).body), &ignored);
    auto format = llama_format(request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::ollama_chat(const HttpRequest& r) {
    const Body body = parse(r);
    if (Fields f(body); f.list("messages") == nullptr || f.list("messages")->empty())
        return {.body = dump(ollama_loaded(body, true))};
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->chat(chat_from_ollama(body), &ignored);
    auto format = ollama_format(true, request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::ollama_generate(const HttpRequest& r) {
    const Body body = parse(r);
    if (Fields f(body); f.string("prompt").value_or("").empty() && f.string("suffix").value_or("").empty())
        return {.body = dump(ollama_loaded(body, false))};
    std::vector<std::string> ignored;
    ChatBody chat = chat_from_ollama_prompt(body);
    if (chat.body.contains("input_suffix")) chat.body = infill_body(std::move(chat.body));
    GenerationRequest request = chat.body.contains("messages") ? reader_->chat(chat, &ignored)
                                                               : reader_->completion(chat.body, &ignored);
    auto format = ollama_format(false, request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

ordered_json Api::ollama_model(const Alias& alias) const {
    const ModelInfo& info = engine_->model().info();
    return {{"name", alias.name},
            {"model", alias.name},
            {"modified_at", kNoDate},
            {"size", info.weight_bytes},
            {"digest", ""},
            {"details",
             {{"parent_model", ""},
              {"format", "safetensors"},
              {"family", info.architecture},
              {"families", {info.architecture}},
              {"parameter_size", fmt::format("{:.1f}B", static_cast<double>(info.parameters) / 1e9)},
              {"quantization_level", info.formats}}}};
}

HttpReply Api::ollama_tags(const HttpRequest&) {
    ordered_json list = ordered_json::array();
    for (const Alias& alias : aliases_) list.push_back(ollama_model(alias));
    return {.body = dump({{"models", list}})};
}

HttpReply Api::ollama_ps(const HttpRequest&) {
    ordered_json one = ollama_model(aliases_.front());
    one.update({{"expires_at", "9999-12-31T23:59:59Z"},
                {"size_vram", one["size"]},
                {"context_length", engine_->context()}});
    return {.body = dump({{"models", ordered_json::array({one})}})};
}

HttpReply Api::ollama_show(const HttpRequest& r) {
    const Body body = parse(r);
    Fields f(body);
    std::string name = f.string("model").value_or(f.string("name").value_or(""));
    if (name.ends_with(":latest")) name.resize(name.size() - std::string(":latest").size());
    const Alias* found = nullptr;
    for (const Alias& alias : aliases_)
        if (alias.name == name) found = &alias;
    if (found == nullptr)
        throw ApiError(404, "model_not_found", "there is no model of that name; /api/tags lists them");
    const ModelInfo& info = engine_->model().info();
    const Sampling& s = found->settings.sampling;
    ordered_json one = ollama_model(*found), capabilities = {"completion", "tools", "thinking", "insert"};
    if (info.vision) capabilities.push_back("vision");
    return {.body = dump({{"modelfile", ""},
                          {"parameters", fmt::format("temperature {}\ntop_k {}\ntop_p {}\nmin_p {}",
                                                     s.temperature, s.top_k, s.top_p, s.min_p)},
                          {"template", ""},
                          {"details", one["details"]},
                          {"model_info",
                           {{"general.architecture", info.architecture},
                            {"general.parameter_count", info.parameters},
                            {info.architecture + ".context_length", engine_->context()},
                            {info.architecture + ".block_count", info.layers},
                            {info.architecture + ".embedding_length", info.width}}},
                          {"capabilities", capabilities},
                          {"modified_at", kNoDate}})};
}

HttpReply Api::ollama_version(const HttpRequest&) { return {.body = dump({{"version", kOllamaVersion}})}; }

HttpReply Api::version(const HttpRequest&) { return {.body = dump({{"version", QUERN_VERSION}})}; }

/// As vLLM has it, for evaluation tools.
HttpReply Api::tokenizer_info(const HttpRequest&) {
    const Tokenizer& tokenizer = *engine_->model().tokenizer();
    const auto& ends = engine_->model().generation().eos_ids;
    const ordered_json end = ends.empty() ? ordered_json() : ordered_json(tokenizer.piece(ends.front()));
    return {.body = dump({{"tokenizer_class", "Qwen2TokenizerFast"},
                          {"vocab_size", engine_->model().info().vocab},
                          {"model_max_length", engine_->context()},
                          {"bos_token", nullptr},
                          {"eos_token", end},
                          {"pad_token", end},
                          {"unk_token", nullptr},
                          {"add_bos_token", false}})};
}

}  // namespace quern
