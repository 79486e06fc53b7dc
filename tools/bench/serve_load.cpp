#include "tools/bench/serve_load.h"

#include <algorithm>
#include <random>

#include "ggml-like/check.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kFewest = 50, kEach = 8;

/// What a person asks for; one of each category in turn.
constexpr const char* kQuestions[] = {
    "Write a function that reverses a linked list.",                     // coding
    "What is 17 * 23 + 4?",                                              // math
    "All querns are mills and no mill is a river. Is a quern a river?",  // reasoning
    "Tell a story about a miller and the wind.",                         // prose
    "Explain to a friend why bread needs time.",                         // natural language
    "Give name, height and year of three towers as a JSON list.",        // JSON
};

constexpr const char* kWords[] = {"grain", "stone",  "water",  "wheel",  "flour",   "bread",
                                  "river", "field",  "wind",   "house",  "morning", "light",
                                  "paper", "table",  "street", "music",  "green",   "quiet",
                                  "seven", "summer", "north",  "market", "glass",   "bridge"};

Json request_body(const ServeLoad& load, const std::string& model, int64_t number) {
    const uint64_t own = std::mt19937_64(load.seed)() + static_cast<uint64_t>(number);
    const std::string text =
        fmt::format("{:016x} {} {}", own * 0x9e3779b97f4a7c15u, random_words(own, load.prompt_words),
                    kQuestions[static_cast<size_t>(number) % std::size(kQuestions)]);
    return {{"model", model},
            {"messages", {{{"role", "user"}, {"content", text}}}},
            {"max_tokens", load.answer_tokens},
            {"ignore_eos", true}};
}

}  // namespace

std::string random_words(uint64_t seed, int64_t count) {
    std::mt19937_64 random(seed);
    std::string text;
    for (int64_t i = 0; i < count; ++i) {
        if (i > 0) text += ' ';
        text += kWords[random() % std::size(kWords)];
    }
    return text;
}

Json measure_server(const ServeLoad& load) {
    const std::string model = greet(load.server).model;
    int64_t number = 0;
    Json rows = Json::array();
    for (const int64_t people : load.concurrency) {
        const int64_t total = load.requests > 0 ? load.requests : std::max(kFewest, kEach * people);
        const Crowd crowd = ask_all(load.server, people, total,
                                    [&](int64_t i) { return request_body(load, model, number + i); });
        rows.push_back(summary(crowd, people));
        number += total;
    }
    return rows;
}

std::string server_table(const Json& rows) {
    std::string out =
        "| at once | answers | failed | requests/s | tokens/s | cached | TTFT p50 / p95 / p99 ms | TPOT p50 "
        "/ p99 ms | "
        "ITL p50 / p95 / p99 ms |\n| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
    for (const Json& r : rows) {
        const auto n = [&](const char* name) { return r[name].get<double>(); };
        out += fmt::format(
            "| {} | {} | {} | {:.2f} | {:.1f} | {} | {:.0f} / {:.0f} / {:.0f} | {:.2f} / {:.2f} | {:.2f} / "
            "{:.2f} / {:.2f} |\n",
            n("max_concurrency"), n("completed"), n("failed"), n("request_throughput"),
            n("output_throughput"), n("cached_tokens"), n("median_ttft_ms"), n("p95_ttft_ms"),
            n("p99_ttft_ms"), n("median_tpot_ms"), n("p99_tpot_ms"), n("median_itl_ms"), n("p95_itl_ms"),
            n("p99_itl_ms"));
    }
    return out;
}

}  // namespace quern
