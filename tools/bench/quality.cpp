#include "tools/bench/quality.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>

#include "ggml-like/check.h"
#include "models/model.h"
#include "models/tokenizer.h"
#include "tools/common/cli_values.h"
#include "tools/common/fields.h"
#include "tools/common/messages.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

Question parse_question(const std::string& text) {
    const Json line = Json::parse(text, nullptr, false);
    if (!line.is_object())
        FAIL(usage,
             "expected a JSON object like {{\"messages\": [{{\"role\": \"user\", \"content\": \"...\"}}], "
             "\"expect\": "
             "\"...\"}}, one a line, found '{}'; see models/demo/eval.jsonl. A plain text can be measured "
             "with --kl, "
             "if its name does not end with .jsonl",
             printable(text));
    Fields f(line);
    const Json* messages = f.list("messages");
    if (messages == nullptr) FAIL(usage, "messages is missing: the conversation that is to be answered");
    const auto expect = f.string("expect");
    if (!expect) FAIL(usage, "expect is missing: the right answer, as a string");
    Question q;
    q.messages = read_messages(*messages);
    q.expect = *expect;
    q.task = f.string("task").value_or(q.task);
    q.thinking = f.boolean("thinking").value_or(q.thinking);
    if (const Json* tools = f.value("tools")) q.tools = read_tools(*tools);
    return q;
}

std::string stripped(const std::string& text) {
    const char* blanks = " \t\r\n";
    const size_t begin = text.find_first_not_of(blanks);
    return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(blanks) + 1 - begin);
}

class QualityRun {
  public:
    QualityRun(Engine& engine, int64_t limit)
        : engine_(engine),
          limit_(limit),
          tokenizer_(*engine.model().tokenizer()),
          format_(engine.model().chat()),
          vocab_(engine.model().info().vocab) {}

    QualityReport run(const std::vector<Question>& questions) {
        std::vector<RequestId> answers;
        for (const Question& q : questions) {
            submit_expected(q);
            answers.push_back(submit_greedy(q));
        }
        while (engine_.step()) {
        }
        for (size_t i = 0; i < questions.size(); ++i) judge(questions[i], engine_.take(answers[i]));
        for (const RequestId id : expected_) check(engine_.take(id));
        return std::move(report_);
    }

  private:
    std::vector<int32_t> prompt_of(const Question& q, bool thinking) const {
        return encode_prompt(format_.render(q.messages, q.tools, {.thinking = thinking}), tokenizer_);
    }

    void submit_expected(const Question& q) {
        Request request;
        request.prompt = prompt_of(q, false);
        const auto begin = static_cast<int64_t>(request.prompt.size());
        const std::vector<int32_t> answer =
            tokenizer_.encode(q.expect + format_.turn_end, Tokenizer::Markers::control);
        request.prompt.insert(request.prompt.end(), answer.begin(), answer.end());
        report_.tokens += static_cast<int64_t>(answer.size());
        request.max_tokens = 1;
        request.sampling.temperature = 0;
        request.on_prompt_logits = [this, begin, answer](const PromptLogits& logits) {
            for (size_t i = 0; i < logits.count(); ++i) {
                const int64_t next = logits.first + static_cast<int64_t>(i) + 1 - begin;
                if (next >= 0 && next < static_cast<int64_t>(answer.size()))
                    report_.nats += surprise(logits.row(i), answer[static_cast<size_t>(next)]);
            }
        };
        expected_.push_back(engine_.submit(std::move(request)));
    }

    /// -log of the probability of a token.
    double surprise(std::span<const float> logits, int32_t token) const {
        const double largest =
            static_cast<double>(*std::max_element(logits.begin(), logits.begin() + vocab_));
        double sum = 0;
        for (int64_t v = 0; v < vocab_; ++v) sum += std::exp(static_cast<double>(logits[v]) - largest);
        return largest + std::log(sum) - static_cast<double>(logits[token]);
    }

    RequestId submit_greedy(const Question& q) {
        Request request;
        request.prompt = prompt_of(q, q.thinking);
        request.sampling.temperature = 0;
        request.max_tokens = limit_;
        request.stop_ids = engine_.model().generation().eos_ids;
        return engine_.submit(std::move(request));
    }

    static void check(const Result& result) {
        if (!result.error.empty()) FAIL(runtime, "a question failed: {}", result.error);
    }

    void judge(const Question& q, const Result& result) {
        check(result);
        std::string text = tokenizer_.decode(result.tokens, false);
        if (q.thinking) {
            const std::string_view tag = format_.thinking_end;
            const size_t end = text.find(tag);
            text = end == std::string::npos ? "" : text.substr(end + tag.size());
        }
        QualityReport::Task& task = report_.tasks[q.task];
        ++task.questions;
        task.right += result.reason == FinishReason::stop && stripped(text) == stripped(q.expect);
    }

    Engine& engine_;
    const int64_t limit_;
    const Tokenizer& tokenizer_;
    const ChatFormat& format_;
    const int64_t vocab_;
    std::vector<RequestId> expected_;
    QualityReport report_;
};

}  // namespace

std::vector<Question> read_questions(const std::string& path) {
    std::ifstream in(path);
    if (!in) FAIL(usage, "{}: expected a file of questions, found none that can be read", path);
    std::vector<Question> out;
    std::string line;
    for (int64_t number = 1; std::getline(in, line); ++number) {
        if (stripped(line).empty()) continue;
        try {
            out.push_back(parse_question(line));
        } catch (const Error& error) {
            FAIL(usage, "{}: line {}: {}", path, number, error.what());
        }
    }
    if (out.empty()) FAIL(usage, "{}: there are no questions in it; expected one a line", path);
    return out;
}

QualityReport::Task QualityReport::all() const {
    Task sum;
    for (const auto& [name, task] : tasks) {
        sum.right += task.right;
        sum.questions += task.questions;
    }
    return sum;
}

QualityReport measure_quality(Engine& engine, const std::vector<Question>& questions, int64_t limit) {
    CHECK(engine.model().tokenizer() != nullptr,
          "[measure_quality] the model was loaded without its tokenizer");
    const auto start = std::chrono::steady_clock::now();
    QualityReport report = QualityRun(engine, limit).run(questions);
    report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return report;
}

std::string describe(const QualityReport& r) {
    std::string text = "| task | right |\n| --- | ---: |\n";
    for (const auto& [name, task] : r.tasks)
        text += fmt::format("| {} | {}/{} |\n", name, task.right, task.questions);
    const QualityReport::Task all = r.all();
    return text +
           fmt::format(
               "| **all** | **{:.1f} % ({}/{})** |\n| nats per token of the expected answers | {:.4f} |\n"
               "\nperplexity {:.4f} over {} tokens; {:.1f} s\n",
               100.0 * static_cast<double>(all.right) / static_cast<double>(all.questions), all.right,
               all.questions, r.nats_per_token(), std::exp(r.nats_per_token()), r.tokens, r.seconds);
}

Json to_json(const QualityReport& r) {
    Json tasks = Json::object();
    for (const auto& [name, task] : r.tasks)
        tasks[name] = {{"right", task.right}, {"questions", task.questions}};
    const QualityReport::Task all = r.all();
    return {{"tasks", std::move(tasks)},
            {"right", all.right},
            {"questions", all.questions},
            {"nats_per_token", r.nats_per_token()},
            {"perplexity", std::exp(r.nats_per_token())},
            {"tokens", r.tokens},
            {"seconds", r.seconds}};
}

}  // namespace quern
