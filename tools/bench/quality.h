// How well a checkpoint answers questions with known answers: `bench --perplexity`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "models/chat_format.h"
#include "tools/engine/engine.h"

namespace quern {

/// A line of the file: {"messages": [...], "expect": "..."}, optionally with "task": "...", "tools": [...] and
/// "thinking": false.
struct Question {
    std::string task = "all";
    std::vector<Message> messages;
    nlohmann::ordered_json tools;
    std::string expect;  // the answer as the model writes it, calls of tools included
    bool thinking = false;
};

/// Throws Error(usage) that names the line.
std::vector<Question> read_questions(const std::string& path);

struct QualityReport {
    struct Task {
        int64_t right = 0, questions = 0;
    };
    std::map<std::string, Task> tasks;
    double nats = 0;     // of the expected answers with their end tokens, without thinking
    int64_t tokens = 0;  // in these
    double seconds = 0;

    double nats_per_token() const { return nats / static_cast<double>(tokens); }
    Task all() const;
};

/// Runs every question twice: for the probability of the expected answer, and for the greedy answer of at most `limit`
/// tokens, which is right if it is `expect` after the thinking, apart from blanks around it. The engine needs room for
/// the longest question and `limit`, and its model a tokenizer. Throws Error(too_long), Error(device).
QualityReport measure_quality(Engine& engine, const std::vector<Question>& questions, int64_t limit);

std::string describe(const QualityReport& report);
nlohmann::ordered_json to_json(const QualityReport& report);

}  // namespace quern
