// Tests of what the CUDA backend launches, on a stand-in for CUDA's runtime; and listings of it (kUsage).
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>

#include "launches/listing.h"
#include "launches/step_time.h"

namespace {

using namespace quern;
using namespace quern::test;

constexpr const char* kUsage =
    "quern_launch_tests              the tests; flags: doctest's\n"
    "quern_launch_tests --steps      a line a step of every model on every device: kernels, a hash of the "
    "launches\n"
    "quern_launch_tests --step-time [N...]    what the host costs an answer step of N sequences\n"
    "quern_launch_tests --kernels    a line a kernel: which steps launch it\n"
    "quern_launch_tests --launches SHAPE MIX DEVICE answer|prompt|blocks|tapped ROWS [SEQUENCES]    a line a "
    "node: its "
    "launches\n"
    "  SHAPE and MIX: as of quern bench --synthetic and --mix; or a checkpoint's directory, and \"\"\n"
    "  blocks: a DFlash drafter's pass; tapped: a step of one sequence that makes its keys and values\n"
    "  DEVICE: 0 like an H200, 1 like an RTX 5090, 2 like an A100\n";

std::string launches(const std::vector<std::string>& words) {
    const bool drafter = words[4] == "blocks" || words[4] == "tapped";
    PlacedModel model({.shape = words[1], .mix = words[2], .drafter = drafter ? "new" : ""},
                      std::atoi(words[3].c_str()));
    const int64_t rows = std::atoll(words[5].c_str());
    if (drafter)
        return launches_text(model, words[4] == "blocks" ? model.blocks(1, rows) : model.tapped(rows));
    const int64_t sequences = words.size() > 6 ? std::atoll(words[6].c_str()) : 0;
    return launches_text(model, words[4] == "prompt" ? model.prompt(rows, std::max<int64_t>(sequences, 1))
                                                     : model.answers(rows, sequences));
}

std::string step_time(const std::vector<std::string>& words) {
    std::vector<int64_t> sequences;
    for (size_t i = 1; i < words.size(); ++i) sequences.push_back(std::atoll(words[i].c_str()));
    return step_time_text(sequences.empty() ? std::vector<int64_t>{1, 8, 32, 64} : sequences);
}

/// Empty: no listing is asked for.
std::string listing(const std::vector<std::string>& words) {
    const std::string first = words.empty() ? "" : words[0];
    if (first == "--steps") return steps_text();
    if (first == "--kernels") return kernels_text();
    if (first == "--step-time") return step_time(words);
    if (first == "--launches") return words.size() == 6 || words.size() == 7 ? launches(words) : kUsage;
    return {};
}

}  // namespace

int main(int argc, char** argv) try {
    const std::string text = listing({argv + 1, argv + argc});
    if (text.empty()) return doctest::Context(argc, argv).run();
    return std::fputs(text.c_str(), stdout) < 0;
} catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
