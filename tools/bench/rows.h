// Rows of `quern bench`: what was measured beside what bounds it, as markdown, JSON and CSV.
#pragma once

#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "tools/bench/measure.h"
#include "tools/bench/roofline.h"
#include "tools/engine/token_bytes.h"

namespace quern {

struct BenchRow {
    BenchTest test;
    Samples samples;
    TokenBytes bytes;     // of tests that only decode
    double limit = 0;     // share of the ceiling that was reached; 0: no single ceiling
    int64_t kernels = 0;  // of a step of one row a sequence; 0: unknown
    std::string taint;
};

/// How close a test came to what bounds it: memory while decoding, products while reading a prompt. Without a taint.
BenchRow make_row(const BenchTest& test, const Samples& samples, const Engine& engine,
                  const Ceilings& ceilings);

std::string md_header();
std::string md_row(const BenchRow& row, const Engine& engine);
/// The ceilings, and the bytes of a token of tests that only decode.
std::string md_footer(const std::vector<BenchRow>& rows, const Ceilings& ceilings);
/// What drafts brought; empty without any. A round is a step that may have drafts: it gives one token and what was accepted.
std::string md_drafts(const std::vector<BenchRow>& rows);

/// With llama-bench's names where it has them.
nlohmann::ordered_json json_row(const BenchRow& row, const Engine& engine, const Ceilings& ceilings);
/// A line with the names of a JSON row, or with its numbers.
std::string csv_line(const nlohmann::ordered_json& row, bool header);

}  // namespace quern
