// AnswerFormat: how an API writes an answer, whole or as a stream. Each request has its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/tokenizer.h"
#include "tools/serve/api_error.h"
#include "tools/serve/engine_loop.h"
#include "tools/serve/generation.h"

namespace quern {

/// What there is of one choice so far.
struct Choice {
    std::string reasoning, content;
    std::vector<ToolCall> calls;
    std::vector<TokenLogprob> logprobs;
    Outcome outcome;

    void add(const AnswerDelta& delta);
    /// stop, length or tool_calls.
    const char* finish_reason() const;
};

class AnswerFormat {
  public:
    virtual ~AnswerFormat() = default;
    virtual nlohmann::ordered_json whole(const std::vector<Choice>& choices) = 0;

    // Parts of the stream, ready to be sent.
    virtual const char* stream_type() const { return "text/event-stream"; }
    /// By which a client may name the answer while it is written; empty: not at all.
    virtual std::string id() const { return {}; }
    virtual std::string begin() = 0;
    virtual std::string delta(int choice, const AnswerDelta& delta) = 0;
    /// Sent before the delta of the same event, if there is one.
    virtual std::string progress(int /*choice*/, const Progress& /*progress*/) { return {}; }
    virtual std::string end(int choice, const Choice& all) = 0;
    virtual std::string close(const std::vector<Choice>& choices) = 0;
    virtual std::string ping() { return ": ping\n\n"; }
    virtual std::string error(const ApiError& error) { return "data: " + dump(error.json()) + "\n\n"; }
};

/// The chat and the completions API of OpenAI.
std::unique_ptr<AnswerFormat> openai_format(bool chat, const GenerationRequest& request,
                                            const Tokenizer& tokenizer);

/// `each`: choices of one prompt, which counts once.
nlohmann::ordered_json usage_json(const std::vector<Choice>& choices, size_t each);
/// Speeds, as llama.cpp reports them.
nlohmann::ordered_json timings_json(const Progress& progress);
/// A prefix and 24 random hex digits.
std::string random_id(const std::string& prefix);

}  // namespace quern
