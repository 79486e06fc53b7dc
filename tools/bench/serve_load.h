// Load on a running server through its HTTP API: throughput, and how long people wait.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/bench/api_client.h"

namespace quern {

struct ServeLoad {
    ServerAddress server;
    std::vector<int64_t> concurrency = {1, 4, 16, 64};
    int64_t requests = 0;         // of each concurrency; 0: eight for each connection, 50 at least
    int64_t prompt_words = 100;   // beside the question
    int64_t answer_tokens = 128;  // of each answer, exactly
    uint64_t seed = 0;            // of the prompts: another one, other prompts
};

/// One object for each concurrency: `summary`. Prompts differ from their first words on. Throws as `greet`.
nlohmann::ordered_json measure_server(const ServeLoad& load);

/// A person who replays a trace of agents' turns: JSON lines, one turn each, of either form:
///
/// {"session": "a", "shared": "agent", "shared_words": 3000, "words": 40, "answer": 200, "wait": 1.5}: the session's history
/// grows by so many words and the answer to them. A session begins with a system message that all with the same `shared` have
/// (left out: none). `wait`: seconds after the answer before.
///
/// {"timestamp": 1500, "input_length": 6800, "output_length": 40, "hash_ids": [0, 1, 7]}: as Mooncake published its traces: at so
/// many milliseconds a prompt of input_length tokens; blocks of 512 tokens with the same id are the same.
struct Trace {
    struct Turn {
        std::string session, shared;
        int64_t shared_words = 0, words = 0, answer = 0;
        double wait = 0;
        int64_t prompt_tokens = 0;  // the second form, of which `wait` is since the beginning
        std::vector<int64_t> blocks;
    };
    std::vector<std::vector<Turn>> sessions;  // in order of their first turns

    /// Throws Error(runtime) if the file cannot be read, and Error(usage) naming the line.
    static Trace read(const std::string& path);
};

/// Replays it, at most `people` sessions at a time. A row as of measure_server.
nlohmann::ordered_json replay(const ServerAddress& server, const Trace& trace, int64_t people, uint64_t seed);

/// Rows as a table.
std::string server_table(const nlohmann::ordered_json& rows);

/// So many words, drawn from a small vocabulary.
std::string random_words(uint64_t seed, int64_t count);

}  // namespace quern
