// Load on a running server through its HTTP API: throughput, and how long people wait.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace quern {

struct ServeLoad {
    std::string url, key;  // http://HOST:PORT
    std::vector<int64_t> concurrency = {1, 4, 16, 64};
    int64_t requests = 0;         // of each concurrency; 0: four for each connection
    int64_t prompt_words = 100;   // beside the question
    int64_t answer_tokens = 128;  // of each answer, exactly
};

/// One object for each concurrency, with the names of `vllm bench serve`. Throws Error(usage) for an invalid URL and
/// Error(runtime) if nobody answers there.
nlohmann::ordered_json measure_server(const ServeLoad& load);

/// The same as a table.
std::string server_table(const nlohmann::ordered_json& rows);

}  // namespace quern
