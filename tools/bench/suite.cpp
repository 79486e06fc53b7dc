#include "tools/bench/suite.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <random>

#include "tools/bench/serve_load.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kCalibrationWords = 400, kRetrievalAnswer = 32, kDepthAnswer = 128;
constexpr int64_t kFewestOfCrowd = 24;

Json chat(const std::string& model, std::string text, int64_t answer) {
    return {{"model", model},
            {"messages", {{{"role", "user"}, {"content", std::move(text)}}}},
            {"max_tokens", answer}};
}

/// A word that makes a prompt another one than in the last run.
std::string mark(uint64_t number) { return fmt::format("[{:08x}] ", (number * 0x9e3779b97f4a7c15u) >> 32); }

Json row_of(const char* section, const std::string& name, int64_t people, const Crowd& crowd) {
    const Json all = summary(crowd, people);
    Json row = {{"section", section},
                {"name", name},
                {"people", people},
                {"requests", all["completed"]},
                {"failed", all["failed"]}};
    const double answers = std::max(1.0, all["completed"].get<double>());
    row["prompt_tokens"] = all["total_input_tokens"].get<double>() / answers;
    const double each = all["median_tpot_ms"].get<double>();
    row["tokens_per_second"] = people > 1 ? all["output_throughput"].get<double>()
                               : each > 0 ? 1e3 / each
                                          : 0.0;
    for (const char* name_of_times : {"ttft", "itl"})
        for (const char* share : {"median", "p95", "p99"}) {
            const std::string key = fmt::format("{}_{}_ms", share, name_of_times);
            row[key] = all[key];
        }
    if (all.contains("draft_tokens"))
        row["acceptance"] = all["accepted_tokens"].get<double>() / all["draft_tokens"].get<double>();
    return row;
}

class Suite {
  public:
    Suite(const ServerAddress& server, const SuitePlan& plan, const std::function<void(const Json&)>& tell)
        : server_(server),
          plan_(plan),
          tell_(tell),
          facts_(greet(server)),
          number_(std::mt19937_64(plan.seed)()) {}

    Json run() {
        if (plan_.kinds) kinds();
        if (plan_.crowd) crowd();
        if (plan_.retrieval || plan_.depths) calibrate();
        if (plan_.retrieval) retrieval();
        if (plan_.depths) depths();
        return std::move(rows_);
    }

  private:
    void add(Json row) {
        tell_(row);
        rows_.push_back(std::move(row));
    }
    void skip(const char* section, const std::string& name, int64_t tokens) {
        add({{"section", section},
             {"name", name},
             {"skipped",
              fmt::format("needs {} tokens of context, and there are {}", tokens, facts_.context)}});
    }
    bool fits(int64_t tokens) const { return facts_.context == 0 || tokens <= facts_.context; }

    void kinds() {
        for (const PromptKind& kind : prompt_kinds()) {
            const auto count = static_cast<int64_t>(kind.prompts.size()) * plan_.repetitions;
            const auto body = [&](int64_t i) {
                const char* prompt = kind.prompts[static_cast<size_t>(i) % kind.prompts.size()];
                return chat(facts_.model, mark(number_++) + prompt, plan_.answer_tokens);
            };
            add(row_of("kind", kind.name, 1, ask_all(server_, 1, count, body)));
        }
    }
    void crowd() {
        for (const int64_t people : plan_.people) {
            const int64_t count = std::max(kFewestOfCrowd, 4 * people);
            const auto body = [&](int64_t i) {
                const auto all = prompt_kinds();
                const PromptKind& kind = all[static_cast<size_t>(i) % all.size()];
                const size_t at = static_cast<size_t>(i) / all.size() % kind.prompts.size();
                Json asked = chat(facts_.model, mark(number_++) + kind.prompts[at], plan_.answer_tokens);
                asked["ignore_eos"] = true;
                return asked;
            };
            add(row_of("crowd", fmt::format("{} at once", people), people,
                       ask_all(server_, people, count, body)));
        }
    }
    /// Tokens of a word, and of what stands around the words.
    void calibrate() {
        double tokens[2] = {};
        for (const int64_t times : {1, 2}) {
            const std::string text = random_words(number_++, times * kCalibrationWords);
            tokens[times - 1] =
                static_cast<double>(ApiClient(server_).ask(chat(facts_.model, text, 1)).prompt);
        }
        if (tokens[1] > tokens[0]) tokens_a_word_ = (tokens[1] - tokens[0]) / kCalibrationWords;
        around_ = std::max(0.0, tokens[0] - tokens_a_word_ * kCalibrationWords);
    }
    int64_t words_for(int64_t tokens) const {
        return std::max<int64_t>(
            1, static_cast<int64_t>((static_cast<double>(tokens) - around_) / tokens_a_word_));
    }

    void retrieval() {
        const std::string name =
            fmt::format("{} read {} to {} tokens", plan_.readers, plan_.shortest_text, plan_.longest_text);
        const int64_t room = plan_.longest_text + plan_.longest_text / 20 + kRetrievalAnswer;
        if (!fits(room)) return skip("retrieval", name, room);
        std::vector<Hidden> texts;
        for (int64_t i = 0; i < plan_.readers; ++i) {
            const int64_t more =
                plan_.readers > 1 ? i * (plan_.longest_text - plan_.shortest_text) / (plan_.readers - 1) : 0;
            texts.push_back(hidden_number(number_++, words_for(plan_.shortest_text + more)));
        }
        const Crowd crowd = ask_all(server_, plan_.readers, plan_.readers, [&](int64_t i) {
            Json asked = chat(facts_.model, texts[static_cast<size_t>(i)].text, kRetrievalAnswer);
            asked["chat_template_kwargs"] = {{"enable_thinking", false}};
            asked["temperature"] = 0;
            return asked;
        });
        int64_t correct = 0;
        for (size_t i = 0; i < texts.size(); ++i)
            correct += crowd.samples[i].text.find(texts[i].number) != std::string::npos;
        Json row = row_of("retrieval", name, plan_.readers, crowd);
        row["correct"] = fmt::format("{} of {}", correct, texts.size());
        add(std::move(row));
    }
    void depths() {
        for (const int64_t tokens : plan_.depth_tokens) {
            const std::string name = fmt::format("{} tokens before", tokens);
            const int64_t room = tokens + tokens / 20 + 2 * kDepthAnswer + 100;
            if (!fits(room)) {
                skip("depth", name, room);
                continue;
            }
            std::vector<double> next;
            ApiClient client(server_);
            const auto body = [&](int64_t) {
                Json asked = chat(facts_.model, random_words(number_++, words_for(tokens)), kDepthAnswer);
                asked["ignore_eos"] = true;
                return asked;
            };
            Json last;
            Json row =
                row_of("depth", name, 1,
                       ask_all(server_, 1, plan_.repetitions, [&](int64_t i) { return last = body(i); }));
            for (int64_t i = 0; i < plan_.repetitions; ++i) {  // the same conversation goes on
                Json turn = last;
                turn["messages"].push_back({{"role", "assistant"}, {"content", "Yes."}});
                turn["messages"].push_back({{"role", "user"}, {"content", "And " + mark(number_++)}});
                turn["max_tokens"] = 4;
                next.push_back(client.ask(std::move(turn)).first_ms);
            }
            row["follow_up_ms"] = percentile(next, 0.5);
            add(std::move(row));
        }
    }

    const ServerAddress& server_;
    const SuitePlan& plan_;
    const std::function<void(const Json&)>& tell_;
    ServerFacts facts_;
    std::atomic<uint64_t> number_;
    double tokens_a_word_ = 1, around_ = 0;
    Json rows_ = Json::array();
};

}  // namespace

Json run_suite(const ServerAddress& server, const SuitePlan& plan,
               const std::function<void(const Json&)>& tell) {
    return Suite(server, plan, tell).run();
}

}  // namespace quern
