// Answers: repetition, the end of thinking and of turns, a tool call and what becomes of its result.
#include <algorithm>

#include <fmt/format.h>

#include "ggml-like/check.h"
#include "models/tokenizer.h"
#include "tools/common/cli_values.h"
#include "tools/common/doctor/checks.h"
#include "tools/common/doctor/measures.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kAnswerTokens = 64;     // of a greedy answer
constexpr int64_t kThinkingTokens = 768;  // what a simple question takes of a thinking model
constexpr int64_t kDirectTokens = 192;    // and of an answer without thinking
constexpr size_t kLongestLoop = 16;       // tokens

const char* const kQuestions[] = {"What is the capital of France?", "What is 7 times 8?",
                                  "Explain the word whale.", "Hello!"};

Json weather_tools() {
    return Json::parse(R"([{"type": "function", "function": {"name": "get_weather",
        "description": "Get the current weather of a city.", "parameters": {"type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"]}}}])");
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

/// Sound models of other kinds may not have learned this.
Verdict missing(const Examination& e) { return e.known() != nullptr ? Verdict::wrong : Verdict::note; }

constexpr const char* kNotTrained =
    "a model that was trained for conversations does this: check its chat template "
    "and the weights";

}  // namespace

int64_t loop_at_end(std::span<const int32_t> tokens) {
    const size_t n = tokens.size();
    for (size_t period = 1; period <= kLongestLoop && 3 * period <= n; ++period) {
        size_t same = 0;  // tokens at the end that equal those one period before
        while (same + period < n && tokens[n - 1 - same] == tokens[n - 1 - same - period]) ++same;
        if (same >= std::max<size_t>(2 * period, 8)) return static_cast<int64_t>(period);
    }
    return 0;
}

void check_repetition(Examination& e, CheckReport& report) {
    std::vector<Request> requests;
    for (const char* question : kQuestions) {
        requests.push_back(Examination::greedy(e.encode_user(question, false), kAnswerTokens));
        requests.back().stop_ids = e.model().generation().eos_ids;
    }
    const size_t count = requests.size();
    const std::vector<Result> results = e.run(std::move(requests));
    size_t loops = 0;
    std::string example;
    for (size_t i = 0; i < count; ++i) {
        const int64_t period = loop_at_end(results[i].tokens);
        report.numbers["loops"].push_back(period);
        if (period == 0) continue;
        ++loops;
        if (example.empty())
            example =
                fmt::format("; '{}': '...{}'", kQuestions[i],
                            printable(e.tokenizer().decode(
                                std::span(results[i].tokens).last(static_cast<size_t>(2 * period)), false)));
    }
    const std::string text = fmt::format("{} of {} greedy answers end in a loop of at most {} tokens{}",
                                         loops, count, kLongestLoop, example);
    if (loops == 0) return report.add(Verdict::ok, text);
    report.add(
        2 * loops > count ? Verdict::wrong : Verdict::note, text,
        "greedy loops in most answers are a sign of damaged weights; in one, sample with a temperature");
}

void check_turn(Examination& e, CheckReport& report) {
    for (const bool thinking : {true, false}) {
        const int64_t most = std::min(thinking ? kThinkingTokens : kDirectTokens, e.engine().context() / 2);
        const ChatAnswer a = e.answer({{.role = "user", .content = kQuestions[0]}}, {}, thinking, most);
        const char* kind = thinking ? "thinking" : "direct";
        report.numbers[kind] = {{"tokens", a.answer_tokens},
                                {"thinking_tokens", a.reasoning_tokens},
                                {"ended", a.reason == FinishReason::stop}};
        if (a.reason != FinishReason::stop) {
            // Some think long; nobody thinks in a loop, or needs so many tokens for a capital.
            const bool loops =
                loop_at_end(e.tokenizer().encode(a.message.reasoning.value_or("") + a.message.content,
                                                 Tokenizer::Markers::literal)) > 0;
            report.add(loops || (!thinking && most == kDirectTokens) ? missing(e) : Verdict::note,
                       fmt::format("{}: no end of {} within {} tokens{}", kind,
                                   thinking && a.message.content.empty() ? "the thinking" : "the turn",
                                   a.answer_tokens, loops ? ", which end in a loop" : ""),
                       kNotTrained);
            continue;
        }
        const bool right = contains(a.message.content, "Paris");
        report.add(right ? Verdict::ok : missing(e),
                   fmt::format("{}: {} tokens{}, turn ended; '{}' is answered '{}'", kind, a.answer_tokens,
                               thinking ? fmt::format(", {} of thinking, closed", a.reasoning_tokens) : "",
                               kQuestions[0], printable(a.message.content, 100)),
                   right ? "" : "a model of this kind knows it: the weights are damaged");
    }
}

void check_tool_call(Examination& e, CheckReport& report) {
    const Json tools = weather_tools();
    std::vector<Message> messages = {{.role = "user", .content = "What is the weather in Paris?"}};
    const ChatAnswer call = e.answer(messages, tools, false, kDirectTokens);
    const auto& calls = call.message.tool_calls;
    report.numbers["calls"] = calls.size();
    if (calls.empty())
        return report.add(
            missing(e),
            fmt::format("asked for the weather with a tool for it, it answers '{}' and calls nothing",
                        printable(call.message.content, 100)),
            kNotTrained);
    const Json arguments = Json::parse(calls[0].arguments, nullptr, false);
    const bool sound =
        calls[0].name == "get_weather" && arguments.is_object() && arguments.value("city", Json()) == "Paris";
    report.add(sound ? Verdict::ok : missing(e),
               fmt::format("it calls {}({}), expected get_weather({{\"city\":\"Paris\"}})",
                           printable(calls[0].name), printable(calls[0].arguments, 100)),
               sound ? "" : kNotTrained);
    messages.push_back(call.message);
    messages.push_back({.role = "tool",
                        .content = R"({"temperature": 17, "condition": "rainy"})",
                        .tool_call_id = calls[0].id});
    const ChatAnswer answer = e.answer(messages, tools, false, kDirectTokens);
    const bool used = contains(answer.message.content, "17");
    report.add(used ? Verdict::ok : missing(e),
               fmt::format("given its result it answers '{}'{}", printable(answer.message.content, 100),
                           used ? "" : ", without the 17 degrees"),
               used ? "" : kNotTrained);
}

}  // namespace quern
