// The suite of `bench --suite`: what people do with a server, measured through its API, as one table.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/bench/api_client.h"

namespace quern {

struct SuitePlan {
    bool kinds = true, crowd = true, retrieval = true, depths = true;  // sections
    std::vector<int64_t> people = {1, 2, 4, 8, 16, 32, 64};
    std::vector<int64_t> depth_tokens = {2048, 4096, 8192, 16384, 32768, 131072};
    int64_t readers = 25;                                 // of the retrieval section
    int64_t shortest_text = 15000, longest_text = 30000;  // tokens that they read
    int64_t answer_tokens = 256;
    int64_t repetitions = 3;  // of each prompt of a kind, and of each depth
    uint64_t seed = 0;        // of the words that make prompts differ from run to run
};

/// Prompts of one kind of work.
struct PromptKind {
    const char* name;
    std::span<const char* const> prompts;
};
/// Code, mathematics, reasoning, prose, plain questions, JSON.
std::span<const PromptKind> prompt_kinds();

/// A text with a number hidden in it, and the question for that number.
struct Hidden {
    std::string text, number;
};
Hidden hidden_number(uint64_t seed, int64_t words);

/// Runs the sections on a server. One object a row: section, name, people, requests, failed, prompt_tokens (of a request),
/// tokens_per_second (an answer's, in the crowd all together), the times of summary(), acceptance (absent without drafts), correct
/// (retrieval), follow_up_ms (depths: the first token of a next turn), or skipped: why. `tell` is called with each finished row.
/// Throws as `greet`.
nlohmann::ordered_json run_suite(const ServerAddress& server, const SuitePlan& plan,
                                 const std::function<void(const nlohmann::ordered_json&)>& tell);

std::string suite_markdown(const nlohmann::ordered_json& rows);
std::string suite_csv(const nlohmann::ordered_json& rows);
/// Bars of the kinds, lines of the crowd and of the depths: one SVG image.
std::string suite_plot(const nlohmann::ordered_json& rows, const std::string& title);

}  // namespace quern
