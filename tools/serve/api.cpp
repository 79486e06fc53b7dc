#include "tools/serve/api.h"

#include <fmt/format.h>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "models/tokenizer.h"
#include "tools/engine/defaults.h"
#include "tools/serve/api_error.h"
#include "tools/serve/other_formats.h"
#include "tools/serve/page.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

/// The client's own, if it is fit to be sent back and logged.
std::string request_id(const HttpRequest& r) {
    const std::string given = r.header("X-Request-Id");
    const bool good =
        !given.empty() && given.size() <= 128 &&
        given.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
            std::string::npos;
    return good ? given : random_id("req-");
}

}  // namespace

Api::Api(const ServeOptions& options, EngineLoop& loop, Metrics& metrics)
    : options_(options), loop_(loop), metrics_(metrics) {
    access_ = {options.keys, options.hosts, options.cors_origins, options.limits.body_bytes};
    routes_.insert({
        {"/health", {.method = "GET", .handler = &Api::health, .open = true, .always = true}},
        {"/v1/health", {.method = "GET", .handler = &Api::health, .open = true, .always = true}},
        {"/readyz", {.method = "GET", .handler = &Api::health, .open = true, .always = true}},
        {"/livez", {.method = "GET", .handler = &Api::live, .open = true, .always = true}},
        {"/metrics", {.method = "GET", .handler = &Api::metrics, .always = true}},
        {"/v1/models", {.method = "GET", .handler = &Api::models}},
        {"/models", {.method = "GET", .handler = &Api::models}},
        {"/props", {.method = "GET", .handler = &Api::props}},
        {"/slots", {.method = "GET", .handler = &Api::slots}},
        {"/tokenize", {.method = "POST", .handler = &Api::tokenize}},
        {"/detokenize", {.method = "POST", .handler = &Api::detokenize}},
        {"/apply-template", {.method = "POST", .handler = &Api::apply_template}},
        {"/v1/chat/completions", {.method = "POST", .handler = &Api::chat}},
        {"/chat/completions", {.method = "POST", .handler = &Api::chat}},
        {"/v1/responses", {.method = "POST", .handler = &Api::responses}},
        {"/responses", {.method = "POST", .handler = &Api::responses}},
        {"/v1/messages", {.method = "POST", .handler = &Api::messages, .anthropic = true}},
        {"/v1/messages/count_tokens", {.method = "POST", .handler = &Api::count_tokens, .anthropic = true}},
        {"/v1/completions", {.method = "POST", .handler = &Api::completions}},
        {"/completions", {.method = "POST", .handler = &Api::completions}},
    });
    for (const char* path :
         {"/v1/embeddings", "/embeddings", "/embedding", "/v1/rerank", "/rerank", "/reranking", "/infill",
          "/lora-adapters", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/generations"})
        routes_[path] = {.method = nullptr, .missing = "this server generates text, and does nothing else"};
    for (const char* path : {"/api/chat", "/api/generate", "/api/tags"})
        routes_[path] = {.method = nullptr, .missing = "this is no Ollama server; use the OpenAI API at /v1"};
}

HttpServer::Callbacks Api::callbacks() {
    return {.gate = [this](const HttpRequest& r) { return gate(r); },
            .handle = [this](HttpRequest r) { return handle(std::move(r)); },
            .fail =
                [](int status) {
                    if (status == 429)
                        return ApiError(429, "too_many_connections",
                                        "this address has too many connections open (--peer-connections)")
                            .reply();
                    return ApiError(status, "bad_http", fmt::format("not a proper request (HTTP {})", status))
                        .reply();
                }};
}

void Api::set_progress(const LoadProgress& progress) {
    loaded_ = progress.bytes_done;
    to_load_ = progress.bytes_total;
}

void Api::set_ready(const Engine& engine, const std::optional<DenseCost>& dense, ordered_json doctor) {
    engine_ = &engine;
    dense_ = dense;
    doctor_ = std::move(doctor);
    const auto aliases = options_.aliases.empty()
                             ? decltype(options_.aliases){{engine.model().info().name, {}}}
                             : options_.aliases;
    for (const auto& [name, settings] : aliases) {
        Alias alias{name, default_settings(engine.model())};
        for (const auto& [key, value] : options_.settings)
            set_value(alias.settings, key, value, "--" + key, "flag");
        for (const auto& [key, value] : settings)
            set_value(alias.settings, key, value, "--alias " + name, "alias");
        aliases_.push_back(std::move(alias));
    }
    reader_ = std::make_unique<RequestReader>(engine.model(), aliases_, options_.strict);
    State loading = State::loading;
    state_.compare_exchange_strong(loading, State::ready);
}

void Api::set_draining() { state_ = State::draining; }
void Api::set_lost() { state_ = State::lost; }
void Api::set_stopping() { state_ = State::stopping; }

const Api::Route* Api::find(const HttpRequest& r) const {
    static const Route kModel = {.method = "GET", .handler = &Api::model};
    static const Route kSlot = {
        .method = nullptr,
        .missing = "states of prompts are saved and found by themselves (--cache-dir), not by slot"};
    static const Route kPage = {.method = "GET", .handler = &Api::page, .open = true, .always = true};
    if (options_.web_page && is_page_path(r.path)) return &kPage;
    const auto found = routes_.find(r.path);
    if (found != routes_.end()) return &found->second;
    if (r.path.compare(0, 7, "/slots/") == 0) return &kSlot;
    return r.path.compare(0, 11, "/v1/models/") == 0 ? &kModel : nullptr;
}

/// Why nothing is answered now.
ApiError Api::unavailable() const {
    switch (state_) {
        case State::loading:
            return {503, "loading", "the model is being loaded"};
        case State::lost:
            return {503, "device_error", "the GPU has failed and this server ends; see its log"};
        default:
            return {503, "draining", "the server is shutting down"};
    }
}

std::optional<HttpReply> Api::gate(const HttpRequest& r) {
    const Route* route = find(r);
    try {
        if (r.method == "OPTIONS" && !r.header("Origin").empty() && !options_.cors_origins.empty())
            return HttpReply{.status = 204, .headers = cors_headers(r, access_)};
        check_access(r, access_, route != nullptr && route->open);
        if (route == nullptr) throw ApiError(404, "not_found", "there is nothing at " + r.path);
        if (route->missing != nullptr)
            throw ApiError(501, "not_supported", r.path + " is not supported: " + route->missing);
        const bool get = r.method == "GET" || r.method == "HEAD";
        if (get ? route->method != std::string("GET") : r.method != route->method)
            throw ApiError(405, "method_not_allowed", r.path + " takes " + route->method);
        if (state_ != State::ready && !route->always) throw unavailable();
    } catch (const ApiError& error) {
        HttpReply reply = error_reply(error, route);
        if (error.status == 405) reply.headers.emplace_back("Allow", route->method);
        return reply;
    }
    return {};
}

HttpReply Api::error_reply(const ApiError& error, const Route* route) const {
    HttpReply reply = error.reply();
    if (route != nullptr && route->anthropic) {
        reply.body = dump(anthropic_error(error));
        if (error.status == 429) reply.status = 529;
    }
    return reply;
}

HttpReply Api::handle(HttpRequest r) {
    const Route* route = find(r);
    r.id = request_id(r);
    HttpReply reply;
    try {
        reply = (this->*route->handler)(r);
    } catch (const ApiError& error) {
        reply = error_reply(error, route);
    } catch (const FieldError& error) {
        reply = error_reply(ApiError(error), route);
    } catch (const Error& error) {
        const bool theirs = error.kind() == ErrorKind::usage;
        reply = error_reply({theirs ? 400 : 500, theirs ? "invalid_value" : "internal_error", error.what()},
                            route);
    } catch (const std::exception& error) {
        reply = error_reply({500, "internal_error", error.what()}, route);
    }
    for (auto& header : cors_headers(r, access_)) reply.headers.push_back(std::move(header));
    reply.headers.emplace_back("X-Content-Type-Options", "nosniff");
    reply.headers.emplace_back("X-Request-Id", r.id);
    return reply;
}

Api::Body Api::parse(const HttpRequest& r) const {
    try {
        return parse_json_ordered(r.body, "the request body", {.kind = ErrorKind::usage});
    } catch (const Error& error) {
        throw ApiError(400, "invalid_json", error.what());
    }
}

HttpReply Api::health(const HttpRequest&) {
    const State state = state_;
    if (state == State::ready) return {.body = R"({"status":"ok"})"};
    const ApiError error = unavailable();
    HttpReply reply = error.reply();
    if (state != State::loading) return reply;
    const int64_t total = to_load_;
    ordered_json body = error.json();
    body["status"] = "loading";
    body["progress"] = total > 0 ? static_cast<double>(loaded_) / static_cast<double>(total) : 0.0;
    reply.body = dump(body);
    return reply;
}

HttpReply Api::live(const HttpRequest&) { return {.body = R"({"status":"alive"})"}; }

HttpReply Api::page(const HttpRequest& r) { return page_reply(r.path); }

HttpReply Api::metrics(const HttpRequest&) {
    return {.body = metrics_.text(), .type = "text/plain; version=0.0.4; charset=utf-8"};
}

ordered_json Api::model_json(const Alias& alias) const {
    const ModelInfo& info = engine_->model().info();
    return {{"id", alias.name},
            {"object", "model"},
            {"created", 0},
            {"owned_by", "quern"},
            {"max_model_len", engine_->context()},
            {"context_length", engine_->context()},
            {"meta",
             {{"n_ctx", engine_->context()},
              {"n_ctx_train", info.context},
              {"n_vocab", info.vocab},
              {"n_params", info.parameters},
              {"size", info.weight_bytes}}}};
}

HttpReply Api::models(const HttpRequest&) {
    ordered_json list = ordered_json::array();
    for (const Alias& alias : aliases_) list.push_back(model_json(alias));
    return {.body = dump({{"object", "list"}, {"data", list}})};
}

HttpReply Api::model(const HttpRequest& r) {
    const std::string name = r.path.substr(std::string("/v1/models/").size());
    for (const Alias& alias : aliases_)
        if (alias.name == name) return {.body = dump(model_json(alias))};
    throw ApiError(404, "model_not_found", "there is no model of that name; /v1/models lists them", "model");
}

/// null: weights are as stored. Random weights have no cost.
ordered_json dense_json(DenseFormat format, const std::optional<DenseCost>& cost) {
    if (format == DenseFormat::as_stored) return nullptr;
    ordered_json j{{"format", dense_format_name(format)}};
    if (cost)
        j.update({{"kl_mean", cost->kl_mean},
                  {"kl_p99", cost->kl_p99},
                  {"kl_max", cost->kl_max},
                  {"top1_agreement", cost->agreement},
                  {"tokens", cost->tokens},
                  {"seconds", cost->seconds}});
    return j;
}

HttpReply Api::props(const HttpRequest&) {
    ordered_json aliases = ordered_json::array();
    for (const Alias& a : aliases_) {
        const Sampling& s = a.settings.sampling;
        aliases.push_back({{"name", a.name},
                           {"temperature", s.temperature},
                           {"top_k", s.top_k},
                           {"top_p", s.top_p},
                           {"min_p", s.min_p},
                           {"repeat_penalty", s.repetition_penalty},
                           {"presence_penalty", s.presence_penalty},
                           {"frequency_penalty", s.frequency_penalty},
                           {"thinking", a.settings.thinking},
                           {"reasoning_budget", a.settings.reasoning_budget}});
    }
    const ModelInfo& info = engine_->model().info();
    return {.body = dump(
                {{"build_info", "quern " QUERN_VERSION},
                 {"model", info.name},
                 {"architecture", info.architecture},
                 {"formats", info.formats},
                 {"dense", dense_json(info.dense, dense_)},
                 {"n_ctx", engine_->context()},
                 {"total_slots", engine_->sequences()},
                 {"queue", options_.queue},
                 {"cache_ram_bytes", options_.cache_bytes},
                 {"speculation", drafter_name(options_.speculation.kind)},
                 {"draft_max", options_.speculation.on() ? options_.speculation.draft_max : 0},
                 {"batch_invariant", true},
                 {"batch_invariant_over", {"concurrent requests", "ubatch size", "prompt cache", "restarts"}},
                 {"batch_invariant_except", {"GPUs or CPUs of different kinds"}},
                 {"max_body_bytes", options_.limits.body_bytes},
                 {"doctor", doctor_},
                 {"aliases", aliases}})};
}

HttpReply Api::slots(const HttpRequest&) {
    ordered_json list = ordered_json::array();
    const int64_t running = metrics_.running;
    for (int64_t i = 0; i < engine_->sequences(); ++i)
        list.push_back({{"id", i}, {"n_ctx", engine_->context()}, {"is_processing", i < running}});
    return {.body = dump(list)};
}

HttpReply Api::tokenize(const HttpRequest& r) {
    const Body body = parse(r);
    Fields f(body);
    const auto content = f.string("content"), prompt = f.string("prompt");
    if (!content && !prompt) throw FieldError("content", "content is missing");
    const bool control = f.boolean("parse_special").value_or(false),
               pieces = f.boolean("with_pieces").value_or(false);
    const Tokenizer& tokenizer = *engine_->model().tokenizer();
    const auto ids = tokenizer.encode(content ? *content : *prompt,
                                      control ? Tokenizer::Markers::control : Tokenizer::Markers::literal);
    ordered_json tokens = ordered_json::array();
    for (const int32_t id : ids)
        tokens.push_back(pieces ? ordered_json{{"id", id}, {"piece", tokenizer.piece(id)}}
                                : ordered_json(id));
    return {.body = dump({{"tokens", tokens}, {"count", ids.size()}, {"max_model_len", engine_->context()}})};
}

HttpReply Api::detokenize(const HttpRequest& r) {
    const Body body = parse(r);
    Fields f(body);
    const ordered_json* tokens = f.list("tokens");
    if (tokens == nullptr) throw FieldError("tokens", "tokens is missing");
    std::vector<int32_t> ids;
    for (const ordered_json& id : *tokens) {
        if (!id.is_number_integer() || id < 0 || id >= engine_->model().info().vocab_rows)
            throw FieldError("tokens", "tokens must be token ids");
        ids.push_back(id.get<int32_t>());
    }
    const std::string text = engine_->model().tokenizer()->decode(ids, false);
    return {.body = dump({{"content", text}, {"prompt", text}})};
}

HttpReply Api::apply_template(const HttpRequest& r) {
    return {.body = dump({{"prompt", reader_->render(parse(r)).text()}})};
}

HttpReply Api::chat(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->chat(parse(r), &ignored);
    auto format = openai_format(true, request, *engine_->model().tokenizer());
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::responses(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->chat(chat_from_responses(parse(r)), &ignored);
    auto format = responses_format(request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::messages(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->chat(chat_from_messages(parse(r)), &ignored);
    auto format = messages_format(request);
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

HttpReply Api::count_tokens(const HttpRequest& r) {
    const GenerationRequest request = reader_->chat(chat_from_messages(parse(r)), nullptr);
    return {.body = dump({{"input_tokens", request.prompt_tokens()}})};
}

HttpReply Api::completions(const HttpRequest& r) {
    std::vector<std::string> ignored;
    GenerationRequest request = reader_->completion(parse(r), &ignored);
    auto format = openai_format(false, request, *engine_->model().tokenizer());
    return generate(r, std::move(request), std::move(format), std::move(ignored));
}

}  // namespace quern
