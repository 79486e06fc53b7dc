// Measurements of `quern bench`: repeated runs of one test, and the speed of the machine's memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tools/engine/engine.h"
#include "tools/engine/replay_drafter.h"

namespace quern {

/// One row: a prompt of `prompt` tokens, an answer of `answer` tokens, or both, after `depth` tokens. Several sequences have
/// prompts or answers, and prompts no depth.
struct BenchTest {
    int64_t prompt = 0, answer = 0, depth = 0;
    int64_t parallel = 1;  // sequences at the same time
    DraftOptions drafts = {.kind = DrafterKind::none};
    /// "pp512", "tg128", "tg128 x8", "pp512+tg128 @ d4096", "tg128 n=3", "tg128 n=auto"
    std::string name() const;
    /// Whether all runs are one: `depth` tokens are read once, and one answer follows the other.
    bool goes_on() const { return depth > 0 && prompt == 0 && answer > 0; }
    /// The same without drafts, which is measured beside it.
    BenchTest plain() const {
        BenchTest test = *this;
        test.drafts = {.kind = DrafterKind::none};
        return test;
    }
    /// Tokens a sequence may come to in so many runs, in steps of `prompt_rows` rows of prompts while others answer: sequences
    /// that reach their depth early go on answering until all have.
    int64_t context(int64_t prompt_rows, int repetitions) const;
};

/// Tests that answer, with drafts of each length (none: of lengths that the engine chooses); the others as they are. Drafts read
/// the rows of frequent tokens, as random tokens are no text.
std::vector<BenchTest> with_drafts(const std::vector<BenchTest>& tests, const std::vector<int64_t>& lengths);

struct Samples {
    std::vector<double> seconds;
    int64_t tokens = 0;       // counted in each run
    std::string output_hash;  // of the greedy answer, or of its first token if only a prompt runs
    // Tokens of all runs that were measured, and of the first where one answer follows the other.
    int64_t drafted = 0, accepted = 0;
    double plain_rate = 0;  // with drafts: tokens a second of the same test without, median

    int64_t answered = 0;  // tokens of their answers, but the first, which a prompt's step gives

    double mean_rate() const, stddev_rate() const, median_rate() const;
    double gain() const { return plain_rate > 0 ? median_rate() / plain_rate : 0; }
    /// Tokens of a step of one sequence.
    double round_tokens() const {
        return static_cast<double>(answered) / static_cast<double>(std::max<int64_t>(1, answered - accepted));
    }
};

/// Runs a test `repetitions` times after one warm-up. Includes greedy sampling, no tokenization. With drafts: first as
/// often without; `drafter`, where there is one, then knows the answers. `watched`: asked when all runs are over; while it
/// says true, the engine goes on (goes_on(): as long as there is room), so that somebody can look at a device that works.
Samples run_test(Engine& engine, const BenchTest& test, int repetitions, ReplayDrafter* drafter = nullptr,
                 const std::function<bool()>& watched = {});

/// Runs one step of the test's kind node by node: time, bytes and calls of each op, as a markdown table.
std::string op_table(Engine& engine, const BenchTest& test);

struct LinearRow {
    std::string format;
    int64_t rows, columns;
    double seconds;  // median time of a product with one row of activations
    double bytes;    // of the matrix
};

/// Bytes a second that all threads together read from memory: the median of several passes over a block larger than
/// the caches.
double read_bandwidth(int threads);
/// Products with matrices larger than the caches.
std::vector<LinearRow> measure_linear(Backend& backend);

}  // namespace quern
