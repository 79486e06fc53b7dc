#include "tools/bench/api_client.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"
#include "tools/common/httplib.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

double ms(Clock::time_point from, Clock::time_point to) {
    return std::chrono::duration<double, std::milli>(to - from).count();
}

const Json* object_in(const Json& json, const char* name) {
    const auto found = json.find(name);
    return found != json.end() && found->is_object() ? &*found : nullptr;
}

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
            sample_.good = !failed_;
            return;
        }
        const Json event = Json::parse(text, nullptr, false);
        if (!event.is_object()) return;
        if (event.contains("error")) failed_ = true;
        if (const Json* usage = object_in(event, "usage")) count(*usage);
        const auto choices = event.find("choices");
        if (choices == event.end() || !choices->is_array() || choices->empty()) return;
        const Json& choice = choices->front();
        const Json* delta = object_in(choice, "delta");
        const Json& place = delta != nullptr ? *delta : choice;
        const std::string words = text_in(place, "content") + text_in(place, "text");
        sample_.text += words;
        if (words.empty() && text_in(place, "reasoning_content").empty()) return;
        const auto now = Clock::now();
        if (sample_.first_ms == 0)
            sample_.first_ms = ms(begun_, now);
        else
            sample_.gaps_ms.push_back(ms(last_, now));
        last_ = now;
    }
    void count(const Json& usage) {
        sample_.prompt = usage.value("prompt_tokens", int64_t{0});
        sample_.answer = usage.value("completion_tokens", int64_t{0});
        if (const Json* details = object_in(usage, "prompt_tokens_details"))
            sample_.cached = details->value("cached_tokens", int64_t{0});
        if (const Json* details = object_in(usage, "completion_tokens_details")) {
            sample_.accepted = details->value("accepted_prediction_tokens", int64_t{0});
            sample_.drafted = sample_.accepted + details->value("rejected_prediction_tokens", int64_t{0});
        }
    }
    static std::string text_in(const Json& place, const char* name) {
        const auto found = place.find(name);
        return found != place.end() && found->is_string() ? found->get<std::string>() : "";
    }

    Sample& sample_;
    Clock::time_point begun_, last_;
    std::string buffer_;
    bool failed_ = false;
};

void add_times(Json& row, const std::string& name, const std::vector<double>& values) {
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    row["mean_" + name + "_ms"] = values.empty() ? 0 : sum / static_cast<double>(values.size());
    row["median_" + name + "_ms"] = percentile(values, 0.5);
    for (const int share : {90, 95, 99})
        row[fmt::format("p{}_{}_ms", share, name)] = percentile(values, share / 100.0);
}

}  // namespace

struct ApiClient::Connection {
    explicit Connection(const ServerAddress& server) : client(server.url) {
        client.set_keep_alive(true);
        client.set_read_timeout(600);
        if (!server.key.empty()) headers.emplace("Authorization", "Bearer " + server.key);
    }
    httplib::Client client;
    httplib::Headers headers;
};

ApiClient::ApiClient(const ServerAddress& server) : connection_(std::make_unique<Connection>(server)) {}
ApiClient::~ApiClient() = default;

Sample ApiClient::ask(Json body) {
    body["stream"] = true;
    body["stream_options"] = {{"include_usage", true}};
    const char* path = body.contains("prompt") ? "/v1/completions" : "/v1/chat/completions";
    const std::string text = body.dump();
    Sample sample;
    const auto begun = Clock::now();
    Events events(sample, begun);
    const auto result =
        connection_->client.Post(path, connection_->headers, text, "application/json",
                                 [&](const char* data, size_t size) { return events.push(data, size); });
    sample.good = sample.good && result && result->status == 200;
    sample.total_ms = ms(begun, Clock::now());
    return sample;
}

Json ApiClient::get(const std::string& path) {
    const auto result = connection_->client.Get(path, connection_->headers);
    const Json json = result && result->status == 200 ? Json::parse(result->body, nullptr, false) : Json();
    return json.is_discarded() ? Json() : json;
}

ServerFacts greet(const ServerAddress& server) {
    if (server.url.compare(0, 7, "http://") != 0)
        FAIL(usage, "--serve: expected http://HOST:PORT, found '{}'", printable(server.url));
    httplib::Client client(server.url);
    const auto health = client.Get("/health");
    if (!health || health->status != 200)
        FAIL(runtime, "no server is ready at {}: {}", server.url,
             health ? fmt::format("status {}", health->status) : httplib::to_string(health.error()));
    ServerFacts facts;
    ApiClient api(server);
    const Json models = api.get("/v1/models");
    if (models.is_object() && models.contains("data") && !models["data"].empty()) {
        const Json& card = models["data"][0];
        facts.model = card.value("id", "");
        for (const char* name : {"context_length", "max_model_len"})
            if (card.contains(name) && card[name].is_number_integer()) facts.context = card[name];
    }
    return facts;
}

Crowd ask_all(const ServerAddress& server, int64_t people, int64_t count,
              const std::function<Json(int64_t number)>& body) {
    Crowd crowd;
    crowd.samples.resize(static_cast<size_t>(count));
    std::atomic<int64_t> next = 0;
    std::vector<std::thread> threads;
    const auto begun = Clock::now();
    for (int64_t i = 0; i < std::min(people, count); ++i)
        threads.emplace_back([&] {
            ApiClient client(server);
            for (int64_t at; (at = next++) < count;)
                crowd.samples[static_cast<size_t>(at)] = client.ask(body(at));
        });
    for (std::thread& thread : threads) thread.join();
    crowd.seconds = ms(begun, Clock::now()) / 1e3;
    return crowd;
}

double percentile(std::vector<double> values, double share) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
}

Json summary(const Crowd& crowd, int64_t people) {
    std::vector<double> first, per_token, gaps;
    int64_t good = 0, prompt = 0, answer = 0, cached = 0, drafted = 0, accepted = 0;
    for (const Sample& s : crowd.samples) {
        if (!s.good) continue;
        ++good;
        prompt += s.prompt;
        answer += s.answer;
        cached += s.cached;
        drafted += s.drafted;
        accepted += s.accepted;
        first.push_back(s.first_ms);
        if (s.answer > 1) per_token.push_back((s.total_ms - s.first_ms) / static_cast<double>(s.answer - 1));
        gaps.insert(gaps.end(), s.gaps_ms.begin(), s.gaps_ms.end());
    }
    Json row = {{"max_concurrency", people},
                {"completed", good},
                {"failed", static_cast<int64_t>(crowd.samples.size()) - good},
                {"duration", crowd.seconds},
                {"total_input_tokens", prompt},
                {"total_output_tokens", answer},
                {"cached_tokens", cached},
                {"request_throughput", static_cast<double>(good) / crowd.seconds},
                {"output_throughput", static_cast<double>(answer) / crowd.seconds}};
    if (drafted > 0) {
        row["draft_tokens"] = drafted;
        row["accepted_tokens"] = accepted;
    }
    add_times(row, "ttft", first);
    add_times(row, "tpot", per_token);
    add_times(row, "itl", gaps);
    return row;
}

}  // namespace quern
