// Examination: a loaded model under the checks of the doctor, and what several of them need: answers, readings of the
// built-in texts, a trace, the time that is left.
#pragma once

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "models/chat_format.h"
#include "tools/common/doctor/known_models.h"
#include "tools/engine/chat_session.h"
#include "tools/engine/engine.h"
#include "tools/engine/model_trace.h"

namespace quern {

/// A text as the model reads it, each token after the first.
struct TextReading {
    std::string kind;
    int64_t bytes = 0, tokens = 0;  // of the text that was read; tokens without the first
    double nats = 0;                // sum of -log of the probability of each token
    double entropy = 0;             // sum of the entropy of the distribution it was drawn from, nats
    double adaptive = 0;            // sum of -log by counting the text's own tokens so far (examination.cpp)
    int64_t not_finite = 0;         // tokens after logits that are not numbers

    double nats_per_token() const { return nats / static_cast<double>(tokens); }
    double entropy_per_token() const { return entropy / static_cast<double>(tokens); }
    double adaptive_per_token() const { return adaptive / static_cast<double>(tokens); }
};

/// The same model on another backend, with the memory that it needs.
struct SecondModel {
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
};

struct DoctorOptions {
    double seconds = 10;  // after which no check begins
    /// Opens the model once more on the CPU, to compare a GPU with; called by two threads. Empty: it runs on the CPU.
    std::function<SecondModel()> open_on_cpu;
    const std::vector<KnownModel>* known = nullptr;  // null: the built-in ones
};

/// The time was over while an answer was written.
struct TimeOver {};

class Examination {
  public:
    /// The engine's model must have a tokenizer. Nothing else may use the engine meanwhile.
    Examination(Engine& engine, const DoctorOptions& options);
    Examination(const Examination&) = delete;  // a thread has its address
    Examination& operator=(const Examination&) = delete;

    Engine& engine() { return engine_; }
    const Model& model() const { return engine_.model(); }
    const Tokenizer& tokenizer() const { return *model().tokenizer(); }
    const DoctorOptions& options() const { return options_; }
    /// Null: none has this shape and vocabulary.
    const KnownModel* known() const { return known_; }
    double seconds_left() const;
    double seconds() const;

    /// Runs all of them at the same time, as far as the engine has places. No kept states are used or left. Throws
    /// Error(runtime) if one fails.
    std::vector<Result> run(std::vector<Request> requests);
    Result run(Request request);
    /// A greedy continuation of `prompt` that stops for nothing.
    static Request greedy(std::vector<int32_t> prompt, int64_t tokens);
    /// A greedy answer in the model's chat format. Throws TimeOver.
    ChatAnswer answer(const std::vector<Message>& messages, const nlohmann::ordered_json& tools,
                      bool thinking, int64_t tokens);
    std::vector<int32_t> encode_user(const std::string& text, bool thinking) const;

    /// The built-in texts, one after another; read once. Throws Error(too_long) if the context is smaller than they are.
    const std::vector<TextReading>& readings();
    /// A part of all built-in texts, kMaxTraceTokens in all or as many as there is memory for; traced once. Throws
    /// Error(memory).
    const ModelTrace& trace();
    /// That trace if there was one already, else null.
    const ModelTrace* traced() const { return trace_ ? &*trace_ : nullptr; }
    std::vector<int32_t> trace_tokens(int64_t tokens) const;
    /// trace_in_parts of trace_tokens(kMaxTraceTokens) on the CPU, which runs beside the other checks from the beginning.
    /// No value: there is no CPU to compare with.
    std::future<ModelTrace>& reference() { return reference_; }
    /// Prompt tokens a second, as measured by readings().
    double prompt_rate() const { return prompt_rate_; }

  private:
    Engine& engine_;
    const DoctorOptions& options_;
    const KnownModel* known_;
    std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
    std::vector<TextReading> readings_;
    std::optional<ModelTrace> trace_;
    double prompt_rate_ = 0;
    std::future<ModelTrace> reference_;  // last: ends first
};

/// Traces prompts, each as long as all before it together, from 64 tokens on, until `tokens` are traced or the next would
/// take longer than is left; one after another in one trace. The first is always traced.
ModelTrace trace_in_parts(const Model& model, Backend& backend, std::span<const int32_t> tokens,
                          const std::function<double()>& seconds_left);

/// -log of the probability of `token`, natural. Infinite if a logit is NaN.
double surprise(std::span<const float> logits, int32_t token);
/// Of softmax(logits), nats. NaN if a logit is.
double entropy(std::span<const float> logits);

}  // namespace quern
