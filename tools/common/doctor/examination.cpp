#include "tools/common/doctor/examination.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/parallel.h"
#include "models/tokenizer.h"
#include "tools/common/doctor/texts.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxTextTokens = 128;      // of each built-in text: the time that all take
constexpr int64_t kFewestTraceTokens = 32;  // where a full context leaves little memory

/// What several numbers of a distribution need, in one pass over its logits after the largest is known.
struct Softmax {
    explicit Softmax(std::span<const float> logits)
        : highest(static_cast<double>(*std::max_element(logits.begin(), logits.end()))) {
        for (const float x : logits) {
            const double shifted = static_cast<double>(x) - highest, e = std::exp(shifted);
            sum += e;
            weighted += shifted * e;
        }
    }
    double surprise(float logit) const {
        const double nats = highest + std::log(sum) - static_cast<double>(logit);
        return std::isnan(nats) ? HUGE_VAL : nats;
    }
    double entropy() const { return std::log(sum) - weighted / sum; }

    double highest;
    double sum = 0;       // of e^(logit - highest)
    double weighted = 0;  // of that times (logit - highest)
};

/// -log of the probability that a model which only counts gives `token` after `seen`: (count + 1) / (tokens + vocab).
double adaptive_surprise(std::map<int32_t, int64_t>& counts, int64_t seen, int32_t token, int64_t vocab) {
    return std::log(static_cast<double>(seen + vocab) / static_cast<double>(counts[token] + 1));
}

/// A request that adds to `reading`, which must stay where it is, while `prompt` is read.
Request reading_request(TextReading& reading, std::vector<int32_t> prompt, int64_t vocab, int threads) {
    std::map<int32_t, int64_t> counts;
    for (size_t i = 0; i < prompt.size(); ++i) {
        if (i > 0) reading.adaptive += adaptive_surprise(counts, static_cast<int64_t>(i), prompt[i], vocab);
        ++counts[prompt[i]];
    }
    reading.tokens = static_cast<int64_t>(prompt.size()) - 1;
    Request request;
    request.prompt = prompt;
    request.max_tokens = 0;
    request.use_cache = false;
    request.on_prompt_logits = [&reading, prompt, vocab, threads](const PromptLogits& logits) {
        std::vector<std::pair<double, double>> of(logits.count());
        for_each_parallel(threads, logits.count(), [&](size_t i) {
            const size_t next = static_cast<size_t>(logits.first) + i + 1;
            if (next >= prompt.size()) return;
            const auto row = logits.row(i).first(static_cast<size_t>(vocab));
            const Softmax p(row);
            of[i] = {p.surprise(row[static_cast<size_t>(prompt[next])]), p.entropy()};
        });
        for (const auto& [nats, e] : of) {
            if (!std::isfinite(nats) || !std::isfinite(e)) {
                ++reading.not_finite;
                continue;
            }
            reading.nats += nats;
            reading.entropy += e;
        }
    };
    return request;
}

}  // namespace

double surprise(std::span<const float> logits, int32_t token) {
    return Softmax(logits).surprise(logits[static_cast<size_t>(token)]);
}

double entropy(std::span<const float> logits) { return Softmax(logits).entropy(); }

Examination::Examination(Engine& engine, const DoctorOptions& options)
    : engine_(engine),
      options_(options),
      known_(find_known_model(options.known != nullptr ? *options.known : known_models(), engine.model())) {
    CHECK(engine.model().tokenizer() != nullptr, "[doctor] the model was loaded without its tokenizer");
    if (!options.open_on_cpu || seconds_left() <= 0) return;
    reference_ = std::async(std::launch::async, [this, ids = trace_tokens(kMaxTraceTokens)] {
        const SecondModel cpu = options_.open_on_cpu();
        return trace_in_parts(*cpu.model, *cpu.backend, ids, [this] { return seconds_left(); });
    });
}

double Examination::seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

double Examination::seconds_left() const { return options_.seconds - seconds(); }

std::vector<Result> Examination::run(std::vector<Request> requests) {
    std::vector<RequestId> ids;
    for (Request& r : requests) {
        r.use_cache = false;
        ids.push_back(engine_.submit(std::move(r)));
    }
    while (engine_.step()) {
    }
    std::vector<Result> results;
    for (const RequestId id : ids) {
        results.push_back(engine_.take(id));
        if (results.back().reason == FinishReason::error) FAIL(runtime, "{}", results.back().error);
    }
    return results;
}

Result Examination::run(Request request) {
    std::vector<Request> one;
    one.push_back(std::move(request));
    return std::move(run(std::move(one)).front());
}

Request Examination::greedy(std::vector<int32_t> prompt, int64_t tokens) {
    Request request;
    request.prompt = std::move(prompt);
    request.sampling.temperature = 0;
    request.max_tokens = tokens;
    return request;
}

ChatAnswer Examination::answer(const std::vector<Message>& messages, const nlohmann::ordered_json& tools,
                               bool thinking, int64_t tokens) {
    ChatSettings settings;
    settings.sampling.temperature = 0;
    settings.thinking = thinking;
    settings.max_tokens = tokens;
    settings.tools = tools;
    ChatCallbacks callbacks;
    callbacks.keep_going = [this] { return seconds_left() > 0; };
    ChatAnswer answer = ChatSession(engine_).respond(messages, settings, callbacks);
    if (answer.reason == FinishReason::cancelled) throw TimeOver();
    if (answer.reason == FinishReason::error) FAIL(runtime, "{}", answer.error);
    return answer;
}

std::vector<int32_t> Examination::encode_user(const std::string& text, bool thinking) const {
    const std::vector<Message> messages = {{.role = "user", .content = text}};
    return encode_prompt(model().chat().render(messages, {}, {.thinking = thinking}), tokenizer());
}

const std::vector<TextReading>& Examination::readings() {
    if (!readings_.empty()) return readings_;
    const auto longest = static_cast<int64_t>(kMaxTextTokens);
    if (engine_.context() < longest)
        FAIL(too_long, "the built-in texts have up to {} tokens, the context {}", longest, engine_.context());
    const auto begin = Clock::now();
    const int64_t vocab = model().info().vocab;
    readings_.resize(doctor_texts().size());
    std::vector<Request> requests;
    int64_t tokens = 0;
    for (size_t i = 0; i < readings_.size(); ++i) {
        const DoctorText& text = doctor_texts()[i];
        std::vector<int32_t> ids = tokenizer().encode(text.text, Tokenizer::Markers::literal);
        ids.resize(std::min(ids.size(), kMaxTextTokens));
        readings_[i].kind = text.kind;
        for (const int32_t id : ids) readings_[i].bytes += static_cast<int64_t>(tokenizer().piece(id).size());
        tokens += static_cast<int64_t>(ids.size());
        requests.push_back(reading_request(readings_[i], std::move(ids), vocab, engine_.backend().threads()));
    }
    run(std::move(requests));
    prompt_rate_ = static_cast<double>(tokens) / std::chrono::duration<double>(Clock::now() - begin).count();
    return readings_;
}

std::vector<int32_t> Examination::trace_tokens(int64_t tokens) const {
    const size_t each = static_cast<size_t>(tokens) / doctor_texts().size();
    std::vector<int32_t> ids;
    for (const DoctorText& text : doctor_texts()) {
        const std::vector<int32_t> part = tokenizer().encode(text.text, Tokenizer::Markers::literal);
        ids.insert(ids.end(), part.begin(),
                   part.begin() + static_cast<std::ptrdiff_t>(std::min(part.size(), each)));
    }
    return ids;
}

const ModelTrace& Examination::trace() {
    for (int64_t tokens = kMaxTraceTokens; !trace_; tokens /= 4) {
        try {
            trace_ = trace_prompt(model(), engine_.backend(), trace_tokens(tokens));
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::memory || tokens <= kFewestTraceTokens) throw;
        }
    }
    return *trace_;
}

}  // namespace quern
