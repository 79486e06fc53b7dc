#include "tools/serve/api.h"

#include <fmt/format.h>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "models/tokenizer.h"
#include "tools/engine/defaults.h"
#include "tools/engine/draft_rows.h"
#include "tools/engine/kv_types.h"
#include "tools/engine/memory_plan.h"
#include "tools/serve/api_error.h"
#include "tools/serve/json_repair.h"
#include "tools/serve/page.h"
#include "tools/serve/sampling_fields.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr size_t kResponseBytes = 64 << 20;
constexpr std::chrono::hours kResponseLifetime{6};

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

Api::Api(const ServeOptions& options, Replicas& replicas, Metrics& metrics)
    : options_(options), replicas_(replicas), metrics_(metrics), store_(kResponseBytes, kResponseLifetime) {
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
        {"/v1/chat/completions/control", {.method = "POST", .handler = &Api::control}},
        {"/completion", {.method = "POST", .handler = &Api::llama_completion}},
        {"/infill", {.method = "POST", .handler = &Api::infill}},
        {"/tokenizer_info", {.method = "GET", .handler = &Api::tokenizer_info}},
        {"/version", {.method = "GET", .handler = &Api::version}},
        {"/api/chat", {.method = "POST", .handler = &Api::ollama_chat}},
        {"/api/generate", {.method = "POST", .handler = &Api::ollama_generate}},
        {"/api/tags", {.method = "GET", .handler = &Api::ollama_tags}},
        {"/api/ps", {.method = "GET", .handler = &Api::ollama_ps}},
        {"/api/show", {.method = "POST", .handler = &Api::ollama_show}},
        {"/api/version", {.method = "GET", .handler = &Api::ollama_version}},
        {"/v1/chat/completions/input_tokens", {.method = "POST", .handler = &Api::chat_tokens}},
        {"/v1/responses", {.method = "POST", .handler = &Api::responses}},
        {"/responses", {.method = "POST", .handler = &Api::responses}},
        {"/v1/responses/input_tokens", {.method = "POST", .handler = &Api::response_tokens}},
        {"/v1/messages", {.method = "POST", .handler = &Api::messages}},
        {"/v1/messages/count_tokens", {.method = "POST", .handler = &Api::count_tokens}},
        {"/v1/completions", {.method = "POST", .handler = &Api::completions}},
        {"/completions", {.method = "POST", .handler = &Api::completions}},
    });
    for (const char* path :
         {"/v1/embeddings", "/embeddings", "/embedding", "/v1/rerank", "/rerank", "/reranking",
          "/lora-adapters", "/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations",
          "/v1/images/generations", "/v1/images/edits", "/v1/moderations", "/api/embed", "/api/embeddings"})
        routes_[path] = {.method = nullptr, .missing = "this server generates text, and does nothing else"};
}

HttpServer::Callbacks Api::callbacks() {
    return {.gate = [this](const HttpRequest& r) { return gate(r); },
            .handle = [this](HttpRequest r) { return handle(std::move(r)); },
            .fail = [this](int status, const HttpRequest& r) { return fail(status, r); }};
}

/// What the HTTP library refuses.
HttpReply Api::fail(int status, const HttpRequest& r) const {
    const auto error = [&]() -> ApiError {
        switch (status) {
            case 413:
                return {413, "body_too_long",
                        fmt::format("the body has more than the {} bytes that are taken (--max-body)",
                                    options_.limits.body_bytes)};
            case 414:
                return {414, "path_too_long", "the path of the request is too long"};
            case 431:
                return {431, "headers_too_large", "the headers are too many, too long, or one of them is"};
            default:
                return {status, "bad_http", fmt::format("not a proper request (HTTP {})", status)};
        }
    };
    return finish(error().reply(error_form(r)), r);
}

/// Headers that every reply has.
HttpReply Api::finish(HttpReply reply, const HttpRequest& r) const {
    for (auto& header : cors_headers(r, access_)) reply.headers.push_back(std::move(header));
    reply.headers.emplace_back("X-Content-Type-Options", "nosniff");
    reply.headers.emplace_back("X-Request-Id", r.id.empty() ? request_id(r) : r.id);
    return reply;
}

void Api::set_progress(const LoadProgress& progress) {
    loaded_ = progress.bytes_done;
    to_load_ = progress.bytes_total;
}

void Api::set_ready(const Engine& engine, const MeasuredCosts& costs, ordered_json doctor) {
    engine_ = &engine;
    costs_ = costs;
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
    reader_ =
        std::make_unique<RequestReader>(engine.model(), aliases_, options_.strict, engine.image_sizes());
    State loading = State::loading;
    state_.compare_exchange_strong(loading, State::ready);
}

void Api::set_draining() { state_ = State::draining; }
void Api::set_lost() { state_ = State::lost; }
void Api::set_stopping() { state_ = State::stopping; }

const Api::Route* Api::find(const HttpRequest& r) const {
    static const Route kModel = {.method = "GET", .handler = &Api::model};
    static const Route kResponse = {.method = "GET", .handler = &Api::stored_response};
    static const Route kDropResponse = {.method = "DELETE", .handler = &Api::drop_response};
    static const Route kSlot = {
        .method = nullptr,
        .missing = "states of prompts are saved and found by themselves (--cache-dir), not by slot"};
    static const Route kPage = {.method = "GET", .handler = &Api::page, .open = true, .always = true};
    if (options_.web_page && is_page_path(r.path)) return &kPage;
    const auto found = routes_.find(r.path);
    if (found != routes_.end()) return &found->second;
    if (r.path.starts_with("/slots/")) return &kSlot;
    if (r.path.starts_with("/v1/responses/")) return r.method == "DELETE" ? &kDropResponse : &kResponse;
    return r.path.starts_with("/v1/models/") ? &kModel : nullptr;
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
        if (r.crowded && (route == nullptr || !route->always || !route->open))
            throw ApiError(429, "too_many_connections",
                           "this address has too many connections open (--peer-connections)");
        check_access(r, access_, route != nullptr && route->open);
        if (route == nullptr) throw ApiError(404, "not_found", "there is nothing at " + r.path);
        if (route->missing != nullptr)
            throw ApiError(404, "not_supported", r.path + " is not supported: " + route->missing);
        const std::string method = r.method == "HEAD" ? "GET" : r.method;
        if (method != route->method)
            throw ApiError(405, "method_not_allowed", r.path + " takes " + route->method);
        if (state_ != State::ready && !route->always) throw unavailable();
    } catch (const ApiError& error) {
        HttpReply reply = error.reply(error_form(r));
        if (error.status == 405) reply.headers.emplace_back("Allow", route->method);
        return finish(std::move(reply), r);
    }
    return {};
}

/// The reply of the handler, or the error that it threw.
HttpReply Api::reply_of(const Route& route, const HttpRequest& r) {
    const auto refuse = [&](const ApiError& error) { return error.reply(error_form(r)); };
    try {
        return (this->*route.handler)(r);
    } catch (const ApiError& error) {
        return refuse(error);
    } catch (const FieldError& error) {
        return refuse(ApiError(error));
    } catch (const Error& error) {
        const bool theirs = error.kind() == ErrorKind::usage;
        return refuse({theirs ? 400 : 500, theirs ? "invalid_value" : "internal_error", error.what()});
    } catch (const std::exception& error) {
        return refuse({500, "internal_error", error.what()});
    }
}

HttpReply Api::handle(HttpRequest r) {
    r.id = request_id(r);
    return finish(reply_of(*find(r), r), r);
}

Api::Body Api::parse(const HttpRequest& r) const {
    try {
        return parse_json_ordered(repaired_json(r.body), "the request body", {.kind = ErrorKind::usage});
    } catch (const Error& error) {
        throw ApiError(400, "invalid_json", error.what());
    }
}

HttpReply Api::health(const HttpRequest&) {
    const State state = state_;
    if (state == State::ready) {
        const std::string warning = replicas_.warning();
        if (warning.empty()) return {.body = R"({"status":"ok"})"};
        return {.body = dump({{"status", "ok"}, {"warning", warning}})};
    }
    const ApiError error = unavailable();
    HttpReply reply = error.reply(ErrorForm::openai);
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

namespace {

ordered_json input_modalities(const ModelInfo& info) {
    return info.vision ? ordered_json{"text", "image"} : ordered_json::array({"text"});
}

}  // namespace

ordered_json Api::model_json(const Alias& alias) const {
    const ModelInfo& info = engine_->model().info();
    return {
        {"id", alias.name},
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
          {"size", info.weight_bytes}}},
        {"architecture", {{"input_modalities", input_modalities(info)}, {"output_modalities", {"text"}}}}};
}

namespace {

/// Why drafts are as long as they are now, which the sequences of a step have in common.
ordered_json speculation_json(const SpeculationReport& r) {
    return {{"steps", r.steps},
            {"rounds", r.rounds},
            {"drafted", r.drafted},
            {"accepted", r.accepted},
            {"last_sequences", r.last_sequences},
            {"last_drafted", r.last_drafted},
            {"expected_rate", r.last_rate},
            {"plain_rate", r.plain_rate},
            {"acceptance", r.acceptance}};
}

/// A model as Codex describes it, so that it knows the context and offers apply_patch.
ordered_json model_card(const std::string& name, int64_t context, const ordered_json& modalities) {
    ordered_json levels = ordered_json::array();
    for (const char* effort : {"none", "low", "medium", "high"})
        levels.push_back({{"effort", effort}, {"description", effort}});
    return {{"slug", name},
            {"name", name},
            {"model", name},
            {"display_name", name},
            {"description", nullptr},
            {"default_reasoning_level", "medium"},
            {"supported_reasoning_levels", levels},
            {"shell_type", "shell_command"},
            {"visibility", "list"},
            {"supported_in_api", true},
            {"priority", 1},
            {"availability_nux", nullptr},
            {"upgrade", nullptr},
            {"base_instructions", ""},
            {"supports_reasoning_summaries", false},
            {"support_verbosity", false},
            {"default_verbosity", nullptr},
            {"apply_patch_tool_type", "freeform"},
            {"truncation_policy", {{"mode", "tokens"}, {"limit", 10000}}},
            {"supports_parallel_tool_calls", true},
            {"context_window", context},
            {"max_context_window", context},
            {"experimental_supported_tools", ordered_json::array()},
            {"input_modalities", modalities}};
}

}  // namespace

HttpReply Api::models(const HttpRequest&) {
    ordered_json list = ordered_json::array();
    for (const Alias& alias : aliases_) list.push_back(model_json(alias));
    ordered_json cards = ordered_json::array();
    for (const Alias& alias : aliases_)
        cards.push_back(
            model_card(alias.name, engine_->context(), input_modalities(engine_->model().info())));
    return {.body = dump({{"object", "list"}, {"data", list}, {"models", cards}})};
}

HttpReply Api::model(const HttpRequest& r) {
    const std::string name = r.path.substr(std::string("/v1/models/").size());
    for (const Alias& alias : aliases_)
        if (alias.name == name) return {.body = dump(model_json(alias))};
    throw ApiError(404, "model_not_found", "there is no model of that name; /v1/models lists them", "model");
}

/// Random weights have no cost.
ordered_json cost_json(ordered_json j, const std::optional<DenseCost>& cost) {
    if (cost)
        j.update({{"kl_mean", cost->kl_mean},
                  {"kl_p99", cost->kl_p99},
                  {"kl_max", cost->kl_max},
                  {"top1_agreement", cost->agreement},
                  {"tokens", cost->tokens},
                  {"seconds", cost->seconds}});
    return j;
}

/// null: weights are as stored.
ordered_json dense_json(DenseFormat format, const std::optional<DenseCost>& cost) {
    if (format == DenseFormat::as_stored) return nullptr;
    return cost_json({{"format", dense_format_name(format)}}, cost);
}

ordered_json kv_json(const MemoryPlan& plan, const std::optional<DenseCost>& cost) {
    return cost_json({{"type_k", kv_name(plan.kv_types.k)},
                      {"type_v", kv_name(plan.kv_types.v)},
                      {"token_bytes", plan.token_bytes}},
                     cost);
}

/// What each runs on, and what made it fail.
ordered_json replicas_json(const std::vector<Replicas::Described>& list) {
    ordered_json out = ordered_json::array();
    for (const Replicas::Described& replica : list) {
        out.push_back(
            {{"device", replica.device}, {"total_slots", replica.slots}, {"up", replica.error.empty()}});
        if (!replica.error.empty()) out.back()["error"] = replica.error;
    }
    return out;
}

HttpReply Api::props(const HttpRequest&) {
    ordered_json aliases = ordered_json::array();
    for (const Alias& a : aliases_) {
        const Sampling& s = a.settings.sampling;
        aliases.push_back({{"name", a.name},
                           {"temperature", as_written(s.temperature)},
                           {"top_k", s.top_k},
                           {"top_p", as_written(s.top_p)},
                           {"min_p", as_written(s.min_p)},
                           {"repeat_penalty", as_written(s.repetition_penalty)},
                           {"presence_penalty", as_written(s.presence_penalty)},
                           {"frequency_penalty", as_written(s.frequency_penalty)},
                           {"thinking", a.settings.thinking},
                           {"reasoning_budget", a.settings.reasoning_budget}});
    }
    const ModelInfo& info = engine_->model().info();
    ordered_json props = {
        {"build_info", "quern " QUERN_VERSION},
        {"model", info.name},
        {"architecture", info.architecture},
        {"formats", info.formats},
        {"dense", dense_json(info.dense, costs_.dense)},
        {"kv_cache", kv_json(engine_->memory_plan(), costs_.kv)},
        {"modalities", {{"vision", info.vision.has_value()}, {"audio", false}}},
        {"n_ctx", engine_->context()},
        {"total_slots", slot_count()},
        {"queue", options_.queue},
        {"cache_ram_bytes", options_.cache_bytes},
        {"speculation", drafter_name(options_.speculation.kind)},
        {"draft_max", options_.speculation.on() ? options_.speculation.draft_max : 0},
        {"batch_invariant", true},
        {"batch_invariant_over", {"concurrent requests", "ubatch size", "prompt cache", "restarts"}},
        {"batch_invariant_except", {"GPUs or CPUs of different kinds"}},
        {"max_body_bytes", options_.limits.body_bytes},
        {"doctor", doctor_},
        {"aliases", aliases}};
    if (const auto list = replicas_.list(); list.size() > 1) props["replicas"] = replicas_json(list);
    return {.body = dump(props)};
}

/// What is kept of earlier requests, where, and why something was dropped.
ordered_json kept_json(const PrefixCacheStats& stats, const KeptReport& report) {
    ordered_json kept = ordered_json::array(), dropped = ordered_json::array();
    for (const KeptReport::Kept& k : report.kept)
        kept.push_back({{"tokens", k.tokens},
                        {"bytes", k.bytes},
                        {"where", k.where},
                        {"uses", k.uses},
                        {"idle_seconds", k.idle_seconds}});
    for (const KeptReport::Dropped& d : report.dropped)
        dropped.push_back({{"tokens", d.tokens}, {"why", d.why}, {"seconds_ago", d.seconds_ago}});
    return {{"host_bytes", stats.bytes},
            {"host_budget_bytes", stats.budget},
            {"kept", kept},
            {"dropped", dropped}};
}

int64_t Api::slot_count() const { return engine_->sequences() * static_cast<int64_t>(metrics_.replicas()); }

/// States are of no slot in particular: the first one tells of all.
HttpReply Api::slots(const HttpRequest&) {
    ordered_json list = ordered_json::array();
    for (size_t r = 0; r < metrics_.replicas(); ++r) {
        const ReplicaMetrics& replica = metrics_.replica(r);
        const int64_t running = replica.running;
        const auto report = replica.speculation();
        for (int64_t i = 0; i < engine_->sequences(); ++i) {
            list.push_back(
                {{"id", list.size()}, {"n_ctx", engine_->context()}, {"is_processing", i < running}});
            if (metrics_.replicas() > 1) list.back()["replica"] = r;
            if (!report) continue;
            ordered_json& speculation = list.back()["speculation"] = speculation_json(*report);
            const auto at = static_cast<size_t>(i);
            if (at < report->answers.size()) speculation["draft_rows"] = draft_rows_name(report->answers[at]);
        }
    }
    const ReplicaMetrics& newest = metrics_.newest();
    list[0]["states"] = kept_json(newest.cache(), newest.kept());
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
            throw wrong_value(
                "tokens", fmt::format("token ids from 0 to {}", engine_->model().info().vocab_rows - 1), id);
        ids.push_back(id.get<int32_t>());
    }
    const std::string text = engine_->model().tokenizer()->decode(ids, false);
    return {.body = dump({{"content", text}, {"prompt", text}})};
}

HttpReply Api::apply_template(const HttpRequest& r) {
    return {.body = dump({{"prompt", reader_->render(chat_body(parse(r)).body).text()}})};
}

}  // namespace quern
