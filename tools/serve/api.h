// Api: the routes of the server. Exists before the model is loaded; until then most of them answer 503.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tools/engine/dense_cost.h"
#include "tools/engine/engine.h"
#include "tools/serve/access.h"
#include "tools/serve/answer_format.h"
#include "tools/serve/generation.h"
#include "tools/serve/http_server.h"
#include "tools/serve/metrics.h"
#include "tools/serve/options.h"
#include "tools/serve/replicas.h"
#include "tools/serve/response_store.h"

namespace quern {

class Api {
  public:
    Api(const ServeOptions& options, Replicas& replicas, Metrics& metrics);

    HttpServer::Callbacks callbacks();

    /// From any thread.
    void set_progress(const LoadProgress& progress);
    /// From now on requests are answered, and read of `engine` what does not change: of several replicas it is the first one's. It
    /// must outlive them. `costs`: what
    /// was measured at the load. `doctor`: what --doctor found; null: it was not asked.
    void set_ready(const Engine& engine, const MeasuredCosts& costs = {},
                   nlohmann::ordered_json doctor = nullptr);
    /// New requests get 503.
    void set_draining();
    /// The device failed: new requests and /health get 503 with that message.
    void set_lost();
    /// Running requests end at once.
    void set_stopping();

  private:
    enum class State { loading, ready, draining, lost, stopping };
    using Body = nlohmann::ordered_json;
    using Handler = HttpReply (Api::*)(const HttpRequest&);
    struct Route {
        const char* method;
        Handler handler = nullptr;
        bool open = false;              // needs no key
        bool always = false;            // answers while the model is loading
        const char* missing = nullptr;  // why this route of other servers does not exist here
    };
    struct Exchange;  // a request while it is answered

    const Route* find(const HttpRequest& r) const;
    ApiError unavailable() const;
    std::optional<HttpReply> gate(const HttpRequest& r);
    HttpReply handle(HttpRequest r);
    HttpReply reply_of(const Route& route, const HttpRequest& r);
    HttpReply fail(int status, const HttpRequest& r) const;
    HttpReply finish(HttpReply reply, const HttpRequest& r) const;
    Body parse(const HttpRequest& r) const;

    HttpReply page(const HttpRequest& r);
    HttpReply health(const HttpRequest& r);
    HttpReply live(const HttpRequest& r);
    HttpReply models(const HttpRequest& r);
    HttpReply model(const HttpRequest& r);
    HttpReply metrics(const HttpRequest& r);
    HttpReply props(const HttpRequest& r);
    HttpReply slots(const HttpRequest& r);
    HttpReply tokenize(const HttpRequest& r);
    HttpReply detokenize(const HttpRequest& r);
    HttpReply apply_template(const HttpRequest& r);
    HttpReply chat(const HttpRequest& r);
    HttpReply responses(const HttpRequest& r);
    HttpReply chat_tokens(const HttpRequest& r);
    HttpReply response_tokens(const HttpRequest& r);
    HttpReply stored_response(const HttpRequest& r);
    HttpReply drop_response(const HttpRequest& r);
    HttpReply messages(const HttpRequest& r);
    HttpReply count_tokens(const HttpRequest& r);
    HttpReply completions(const HttpRequest& r);
    HttpReply control(const HttpRequest& r);
    HttpReply llama_completion(const HttpRequest& r);
    HttpReply infill(const HttpRequest& r);
    HttpReply ollama_chat(const HttpRequest& r);
    HttpReply ollama_generate(const HttpRequest& r);
    HttpReply ollama_tags(const HttpRequest& r);
    HttpReply ollama_ps(const HttpRequest& r);
    HttpReply ollama_show(const HttpRequest& r);
    HttpReply ollama_version(const HttpRequest& r);
    HttpReply tokenizer_info(const HttpRequest& r);
    HttpReply version(const HttpRequest& r);

    Body infill_body(Body body) const;
    Body ollama_model(const Alias& alias) const;
    struct Asked;  // a request to /v1/responses
    Asked read_response(const HttpRequest& r) const;
    int64_t input_tokens(const ChatBody& chat) const;

    HttpReply generate(const HttpRequest& r, GenerationRequest request, std::unique_ptr<AnswerFormat> format,
                       std::vector<std::string> ignored);
    HttpReply answer_whole(const HttpRequest& r, std::shared_ptr<Exchange> exchange);
    bool answer_stream(Exchange& exchange, const HttpWriter& write);
    bool next(Exchange& exchange, std::optional<Event>& event);
    static bool has_gone(Exchange& exchange);
    std::shared_ptr<Job> make_job(const std::shared_ptr<Exchange>& exchange, int choice) const;
    void prepare(Job& job, const Exchange& exchange) const;
    int64_t slot_count() const;
    void log(const Exchange& exchange, int status, const char* end) const;
    Body model_json(const Alias& alias) const;

    const ServeOptions& options_;
    Replicas& replicas_;
    Metrics& metrics_;
    AccessRules access_;
    std::map<std::string, Route> routes_;
    std::atomic<State> state_ = State::loading;
    std::atomic<int64_t> loaded_ = 0, to_load_ = 0;
    const Engine* engine_ = nullptr;  // set once, before state_ is ready
    MeasuredCosts costs_;
    nlohmann::ordered_json doctor_;
    std::vector<Alias> aliases_;
    std::unique_ptr<RequestReader> reader_;
    mutable ResponseStore store_;
    std::mutex running_mutex_;
    std::map<std::string, std::weak_ptr<Exchange>> running_;  // by AnswerFormat::id
};

}  // namespace quern
