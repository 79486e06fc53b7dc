#include "tools/run/answer.h"

#include <fmt/format.h>

#include <chrono>

#include "ggml-like/error.h"
#include "models/model.h"

namespace quern {
namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double rate(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0; }

}  // namespace

bool is_yes(const std::string& said) { return said == "y" || said == "Y" || said == "yes"; }

Deadline::Deadline(double seconds) : end_(seconds > 0 ? now() + seconds : 0) {}

bool Deadline::passed() const { return end_ > 0 && now() >= end_; }

std::optional<ToolCommand> tool_command(RunContext& context, AskPerson ask) {
    if (context.options.tool_command.empty()) return {};
    const auto agree = [ask = std::move(ask),
                        always = context.options.tool_yes](const std::string& what) mutable {
        if (always) return true;
        const std::string said = ask(what, "Run it? [y, N, always] ");
        always = said == "always" || said == "a";
        return always || is_yes(said);
    };
    return std::make_optional<ToolCommand>(context.options.tool_command, context.signals, agree);
}

bool run_tools(const std::optional<ToolCommand>& command, const ChatAnswer& answer,
               std::vector<Message>& messages) {
    if (!command || answer.message.tool_calls.empty() || answer.reason != FinishReason::stop) return false;
    bool declined = false;
    for (Message& result : command->answer(answer.message.tool_calls, declined))
        messages.push_back(std::move(result));
    return !declined;
}

ChatSettings chat_settings(RunContext& context) {
    Settings& s = context.settings;
    if (s.random_seed) set_value(s, "seed", "-1", "seed", "random");
    return {.sampling = s.sampling,
            .thinking = s.thinking && s.reasoning_budget != 0,
            .preserve_thinking = context.options.preserve_thinking,
            .effort = context.options.effort,
            .thinking_budget = s.reasoning_budget,
            .max_tokens = s.max_tokens,
            .ignore_eos = context.options.ignore_eos,
            .tools = context.tools,
            .grammar = context.grammar};
}

std::string stats_line(const ChatAnswer& a, const RunContext& context) {
    // The first token comes with the prompt; the rate counts those after it.
    const int64_t decoded = std::max<int64_t>(a.answer_tokens - 1, 0);
    std::string text = fmt::format("{} prompt tokens in {:.2f} s ({:.0f}/s), {} tokens at {:.1f}/s",
                                   a.prompt_tokens, a.timing.prefill_seconds,
                                   rate(a.prompt_tokens - a.cached_tokens, a.timing.prefill_seconds),
                                   a.answer_tokens, rate(decoded, a.timing.decode_seconds));
    if (a.cached_tokens > 0) text += fmt::format(" ({} of the prompt kept from before)", a.cached_tokens);
    if (a.reasoning_tokens > 0) text += fmt::format(" ({} of thinking)", a.reasoning_tokens);
    if (a.drafted > 0) text += fmt::format(", {} of {} drafted accepted", a.accepted, a.drafted);
    text += fmt::format(", {}, context {} of {}", finish_reason_name(a.reason),
                        a.prompt_tokens + a.answer_tokens, context.engine.context());
    if (context.settings.sampling.temperature > 0)
        text += fmt::format(", seed {}", context.settings.sampling.seed);
    return text;
}

nlohmann::ordered_json answer_json(const ChatAnswer& a, const RunContext& context) {
    nlohmann::ordered_json j;
    j["model"] = context.engine.model().info().name;
    j["content"] = a.message.content;
    j["reasoning_content"] = a.message.reasoning ? nlohmann::ordered_json(*a.message.reasoning) : nullptr;
    j["tool_calls"] = nlohmann::ordered_json::array();
    for (const ToolCall& c : a.message.tool_calls)
        j["tool_calls"].push_back({{"id", c.id},
                                   {"type", "function"},
                                   {"function", {{"name", c.name}, {"arguments", c.arguments}}}});
    const bool calls = a.reason == FinishReason::stop && !a.message.tool_calls.empty();
    j["finish_reason"] = calls ? "tool_calls" : finish_reason_name(a.reason);
    j["usage"] = {{"prompt_tokens", a.prompt_tokens},
                  {"completion_tokens", a.answer_tokens},
                  {"total_tokens", a.prompt_tokens + a.answer_tokens},
                  {"prompt_tokens_details", {{"cached_tokens", a.cached_tokens}}},
                  {"completion_tokens_details", {{"reasoning_tokens", a.reasoning_tokens}}}};
    j["timings"] = {{"prompt_ms", a.timing.prefill_seconds * 1e3},
                    {"predicted_ms", a.timing.decode_seconds * 1e3}};
    if (a.drafted > 0) {
        j["timings"]["draft_n"] = a.drafted;
        j["timings"]["draft_n_accepted"] = a.accepted;
    }
    j["seed"] = context.settings.sampling.seed;
    if (!a.error.empty()) j["error"] = a.error;
    return j;
}

int exit_code(const ChatAnswer& a, const RunContext& context, const Printer& printer) {
    if (context.signals.terminated() != 0) return context.signals.terminated();
    if (printer.closed()) return kExitPipe;
    if (a.reason == FinishReason::error) return static_cast<int>(ErrorKind::runtime);
    if (a.reason == FinishReason::cancelled) return kExitInterrupted;
    return a.reason == FinishReason::length && context.options.fail_on_truncation ? kExitTruncated : 0;
}

}  // namespace quern
