// Traces of agents' turns: read, and replayed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include "ggml-like/check.h"
#include "tools/bench/serve_load.h"
#include "tools/common/cli_values.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

constexpr int64_t kBlock = 512;
constexpr int32_t kIds = 1000;  // token ids of blocks are below

int64_t number(const Json& line, const char* name, int64_t low, int64_t otherwise) {
    if (!line.contains(name)) return otherwise;
    if (!line[name].is_number_integer() || line[name].get<int64_t>() < low)
        FAIL(usage, "{} must be an integer, {} or more", name, low);
    return line[name];
}

Trace::Turn turn_of(const Json& line, size_t index) {
    if (!line.is_object()) FAIL(usage, "expected a JSON object");
    Trace::Turn turn;
    if (line.contains("hash_ids")) {
        turn.session = fmt::format("{}", index);  // each on its own
        turn.prompt_tokens = number(line, "input_length", 1, 0);
        turn.answer = number(line, "output_length", 1, 0);
        turn.wait = static_cast<double>(number(line, "timestamp", 0, 0)) / 1e3;
        if (!line["hash_ids"].is_array()) FAIL(usage, "hash_ids must be a list");
        for (const Json& id : line["hash_ids"]) {
            if (!id.is_number_integer()) FAIL(usage, "hash_ids must be integers");
            turn.blocks.push_back(id);
        }
        if (turn.prompt_tokens <= 0 || turn.answer <= 0)
            FAIL(usage, "input_length and output_length are missing");
        return turn;
    }
    if (!line.contains("session") || !line["session"].is_string()) FAIL(usage, "session must be a text");
    turn.session = line["session"];
    turn.shared =
        line.contains("shared") && line["shared"].is_string() ? line["shared"].get<std::string>() : "";
    turn.shared_words = number(line, "shared_words", 0, 0);
    turn.words = number(line, "words", 1, 40);
    turn.answer = number(line, "answer", 1, 128);
    if (line.contains("wait")) {
        if (!line["wait"].is_number() || line["wait"].get<double>() < 0) FAIL(usage, "wait must be seconds");
        turn.wait = line["wait"];
    }
    return turn;
}

uint64_t hash_of(const std::string& text, uint64_t seed) { return std::hash<std::string>{}(text) ^ seed; }

/// The token ids of a prompt of blocks.
std::vector<int32_t> tokens_of(const Trace::Turn& turn, uint64_t seed) {
    std::vector<int32_t> ids;
    for (size_t block = 0; static_cast<int64_t>(ids.size()) < turn.prompt_tokens; ++block) {
        const auto id = block < turn.blocks.size() ? static_cast<uint64_t>(turn.blocks[block])
                                                   : hash_of(turn.session, seed + block);
        std::mt19937_64 random(seed ^ (id * 0x9e3779b97f4a7c15u));
        for (int64_t i = 0; i < kBlock && static_cast<int64_t>(ids.size()) < turn.prompt_tokens; ++i)
            ids.push_back(static_cast<int32_t>(random() % kIds));
    }
    return ids;
}

/// Plays sessions one after another.
class Player {
  public:
    Player(const ServerAddress& server, std::string model, uint64_t seed, Clock::time_point begun)
        : client_(server), model_(std::move(model)), seed_(seed), begun_(begun) {}

    std::vector<Sample> play(const std::vector<Trace::Turn>& session) {
        std::vector<Sample> samples;
        Json messages = Json::array();
        const Trace::Turn& first = session.front();
        if (!first.shared.empty())
            messages.push_back({{"role", "system"},
                                {"content", random_words(hash_of(first.shared, seed_), first.shared_words)}});
        for (size_t i = 0; i < session.size(); ++i) {
            const Trace::Turn& turn = session[i];
            const auto from = turn.prompt_tokens > 0 ? begun_ : Clock::now();
            std::this_thread::sleep_until(
                from + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(turn.wait)));
            Json body = {{"model", model_}, {"max_tokens", turn.answer}, {"ignore_eos", true}};
            if (turn.prompt_tokens > 0) {
                body["prompt"] = tokens_of(turn, seed_);
            } else {
                messages.push_back({{"role", "user"},
                                    {"content", random_words(hash_of(turn.session, seed_ + i), turn.words)}});
                body["messages"] = messages;
                body["prompt_cache_key"] = fmt::format("{:016x}-{}", seed_, turn.session);
            }
            samples.push_back(client_.ask(std::move(body)));
            messages.push_back({{"role", "assistant"}, {"content", samples.back().text}});
        }
        return samples;
    }

  private:
    ApiClient client_;
    std::string model_;
    uint64_t seed_;
    Clock::time_point begun_;
};

}  // namespace

Trace Trace::read(const std::string& path) {
    std::ifstream file(path);
    if (!file) FAIL(runtime, "--trace {}: cannot be read", printable(path));
    Trace trace;
    std::map<std::string, size_t> place;
    std::string text;
    for (size_t line = 1; std::getline(file, text); ++line) {
        if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
        try {
            const Json json = Json::parse(text, nullptr, false);
            if (json.is_discarded()) FAIL(usage, "this is no JSON");
            Turn turn = turn_of(json, line);
            const auto [at, fresh] = place.emplace(turn.session, trace.sessions.size());
            if (fresh) trace.sessions.emplace_back();
            trace.sessions[at->second].push_back(std::move(turn));
        } catch (const Error& error) {
            FAIL(usage, "--trace {}, line {}: {}", printable(path), line, error.what());
        }
    }
    if (trace.sessions.empty()) FAIL(usage, "--trace {}: there are no turns in it", printable(path));
    return trace;
}

Json replay(const ServerAddress& server, const Trace& trace, int64_t people, uint64_t seed) {
    const std::string model = greet(server).model;
    const auto begun = Clock::now();
    std::atomic<size_t> next = 0;
    std::mutex mutex;
    Crowd crowd;
    std::vector<std::thread> threads;
    for (int64_t i = 0; i < std::min(people, static_cast<int64_t>(trace.sessions.size())); ++i)
        threads.emplace_back([&] {
            Player player(server, model, seed, begun);
            for (size_t at; (at = next++) < trace.sessions.size();) {
                std::vector<Sample> samples = player.play(trace.sessions[at]);
                const std::lock_guard lock(mutex);
                std::move(samples.begin(), samples.end(), std::back_inserter(crowd.samples));
            }
        });
    for (std::thread& thread : threads) thread.join();
    crowd.seconds = std::chrono::duration<double>(Clock::now() - begun).count();
    Json row = summary(crowd, static_cast<int64_t>(threads.size()));
    row["sessions"] = trace.sessions.size();
    return row;
}

}  // namespace quern
