#include "tools/bench/serve_load.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <numeric>
#include <thread>

#include "ggml-like/check.h"
#include "tools/common/httplib.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

/// What a person asks for; one of each category in turn.
constexpr const char* kQuestions[] = {
    "Write a function that reverses a linked list.",                     // coding
    "What is 17 * 23 + 4?",                                              // math
    "All querns are mills and no mill is a river. Is a quern a river?",  // reasoning
    "Tell a story about a miller and the wind.",                         // prose
    "Explain to a friend why bread needs time.",                         // natural language
    "Give name, height and year of three towers as a JSON list.",        // JSON
};

double ms(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
}

struct Sample {
    bool good = false;
    double first_ms = 0, total_ms = 0;
    std::vector<double> gaps_ms;  // between deltas of the answer
    int64_t prompt = 0, answer = 0, cached = 0;
};

/// Splits a stream into events as it comes.
class Events {
  public:
    Events(Sample& sample, Clock::time_point begun) : sample_(sample), begun_(begun) {}

    bool push(const char* data, size_t size) {
        buffer_.append(data, size);
        for (size_t end; (end = buffer_.find("\n\n")) != std::string::npos; buffer_.erase(0, end + 2))
            if (buffer_.compare(0, 6, "data: ") == 0) take(buffer_.substr(6, end - 6));
        return true;
    }

  private:
    void take(const std::string& text) {
        if (text == "[DONE]") {
            sample_.good = true;
            return;
        }
        const Json event = Json::parse(text, nullptr, false);
        if (!event.is_object() || !event.contains("choices")) return;
        if (event.contains("usage") && event["usage"].is_object()) {
            const Json& usage = event["usage"];
            sample_.prompt = usage.value("prompt_tokens", int64_t{0});
            sample_.answer = usage.value("completion_tokens", int64_t{0});
            if (usage.contains("prompt_tokens_details") && usage["prompt_tokens_details"].is_object())
                sample_.cached = usage["prompt_tokens_details"].value("cached_tokens", int64_t{0});
        }
        if (event["choices"].empty()) return;
        const Json& delta = event["choices"][0]["delta"];
        if (!has_text(delta, "content") && !has_text(delta, "reasoning_content")) return;
        const auto now = Clock::now();
        if (sample_.first_ms == 0)
            sample_.first_ms = ms(begun_, now);
        else
            sample_.gaps_ms.push_back(ms(last_, now));
        last_ = now;
    }
    static bool has_text(const Json& delta, const char* name) {
        return delta.contains(name) && delta[name].is_string() && delta[name] != "";
    }

    Sample& sample_;
    Clock::time_point begun_, last_;
    std::string buffer_;
};

Json request_body(const ServeLoad& load, int64_t number) {
    std::string text = fmt::format("Request {}.", number);  // no two prompts share more than the system block
    for (int64_t i = 0; i < load.prompt_words; ++i) text += " grain";
    text += fmt::format(" {}", kQuestions[static_cast<size_t>(number) % std::size(kQuestions)]);
    return {{"messages", {{{"role", "user"}, {"content", text}}}},
            {"max_tokens", load.answer_tokens},
            {"ignore_eos", true},
            {"stream", true},
            {"stream_options", {{"include_usage", true}}}};
}

Sample ask(const ServeLoad& load, httplib::Client& client, int64_t number) {
    Sample sample;
    const auto begun = Clock::now();
    Events events(sample, begun);
    httplib::Headers headers;
    if (!load.key.empty()) headers.emplace("Authorization", "Bearer " + load.key);
    const auto result =
        client.Post("/v1/chat/completions", headers, request_body(load, number).dump(), "application/json",
                    [&](const char* data, size_t size) { return events.push(data, size); });
    sample.good = sample.good && result && result->status == 200;
    sample.total_ms = ms(begun, Clock::now());
    return sample;
}

double percentile(std::vector<double> values, double p) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(p * static_cast<double>(values.size() - 1) + 0.5)];
}

void add_times(Json& row, const std::string& name, const std::vector<double>& values) {
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    row["mean_" + name + "_ms"] = values.empty() ? 0 : sum / static_cast<double>(values.size());
    row["median_" + name + "_ms"] = percentile(values, 0.5);
    row["p90_" + name + "_ms"] = percentile(values, 0.9);
    row["p95_" + name + "_ms"] = percentile(values, 0.95);
    row["p99_" + name + "_ms"] = percentile(values, 0.99);
}

Json summary(const std::vector<Sample>& samples, int64_t concurrency, double seconds) {
    std::vector<double> first, per_token, gaps;
    int64_t good = 0, prompt = 0, answer = 0, cached = 0;
    for (const Sample& s : samples) {
        if (!s.good) continue;
        ++good;
        prompt += s.prompt;
        answer += s.answer;
        cached += s.cached;
        first.push_back(s.first_ms);
        if (s.answer > 1) per_token.push_back((s.total_ms - s.first_ms) / static_cast<double>(s.answer - 1));
        gaps.insert(gaps.end(), s.gaps_ms.begin(), s.gaps_ms.end());
    }
    Json row = {{"max_concurrency", concurrency},
                {"completed", good},
                {"failed", static_cast<int64_t>(samples.size()) - good},
                {"duration", seconds},
                {"total_input_tokens", prompt},
                {"total_output_tokens", answer},
                {"cached_tokens", cached},
                {"request_throughput", static_cast<double>(good) / seconds},
                {"output_throughput", static_cast<double>(answer) / seconds}};
    add_times(row, "ttft", first);
    add_times(row, "tpot", per_token);
    add_times(row, "itl", gaps);
    return row;
}

Json measure(const ServeLoad& load, int64_t concurrency, int64_t& number) {
    const int64_t total = load.requests > 0 ? load.requests : 4 * concurrency;
    std::vector<Sample> samples(static_cast<size_t>(total));
    std::atomic<int64_t> next = 0;
    std::vector<std::thread> people;
    const auto begun = Clock::now();
    for (int64_t i = 0; i < concurrency; ++i)
        people.emplace_back([&] {
            httplib::Client client(load.url);
            client.set_keep_alive(true);
            client.set_read_timeout(600);
            for (int64_t at; (at = next++) < total;)
                samples[static_cast<size_t>(at)] = ask(load, client, number + at);
        });
    for (std::thread& person : people) person.join();
    number += total;
    return summary(samples, concurrency, ms(begun, Clock::now()) / 1e3);
}

}  // namespace

Json measure_server(const ServeLoad& load) {
    if (load.url.compare(0, 7, "http://") != 0)
        FAIL(usage, "--serve: expected http://HOST:PORT, found '{}'", load.url);
    httplib::Client client(load.url);
    const auto health = client.Get("/health");
    if (!health || health->status != 200)
        FAIL(runtime, "no server is ready at {}: {}", load.url,
             health ? fmt::format("status {}", health->status) : httplib::to_string(health.error()));
    int64_t number = 0;
    Json rows = Json::array();
    for (const int64_t c : load.concurrency) rows.push_back(measure(load, c, number));
    return rows;
}

std::string server_table(const Json& rows) {
    std::string out =
        "| at once | answers | failed | requests/s | tokens/s | cached | TTFT p50 / p90 / p99 ms | TPOT p50 "
        "/ p99 ms | "
        "ITL p50 / p90 / p99 ms |\n| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for (const Json& r : rows) {
        const auto n = [&](const char* name) { return r[name].get<double>(); };
        out += fmt::format(
            "| {} | {} | {} | {:.2f} | {:.1f} | {} | {:.0f} / {:.0f} / {:.0f} | {:.2f} / {:.2f} | {:.2f} / "
            "{:.2f} / {:.2f} |\n",
            n("max_concurrency"), n("completed"), n("failed"), n("request_throughput"),
            n("output_throughput"), n("cached_tokens"), n("median_ttft_ms"), n("p90_ttft_ms"),
            n("p99_ttft_ms"), n("median_tpot_ms"), n("p99_tpot_ms"), n("median_itl_ms"), n("p90_itl_ms"),
            n("p99_itl_ms"));
    }
    return out;
}

}  // namespace quern
