#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "ggml-like/error.h"
#include "tools/engine/sampler.h"

namespace quern {
namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, 3.0f, -1.0f, 0.5f, 9.0f};  // the last row is padding
constexpr int64_t kVocab = 6;

std::vector<int32_t> ids(const std::vector<Candidate>& list) {
    std::vector<int32_t> out;
    for (const Candidate& c : list) out.push_back(c.id);
    return out;
}

TEST_SUITE("cpu") {
    TEST_CASE("greedy: highest logit, ties to the lower id, padding never") {
        Sampling s;
        s.temperature = 0;
        CHECK(sample(kLogits, kVocab, s, {}, 0) == 1);
        s.logit_bias = {{4, 10.0f}};
        CHECK(sample(kLogits, kVocab, s, {}, 0) == 4);
    }

    TEST_CASE("top-k, top-p and min-p keep what their definitions say") {
        Sampling s;
        s.top_k = 3;
        CHECK(ids(candidates(kLogits, kVocab, s, {})) == std::vector<int32_t>{1, 3, 2});
        s = {};
        // Probabilities: e^(x-3) normalised: 1: .3636.., 3: the same, 2: .1337, 0: .0492, 5: .0298, 4: .0067
        s.top_p = 0.8f;
        CHECK(ids(candidates(kLogits, kVocab, s, {})) == std::vector<int32_t>{1, 3, 2});
        s.top_p = 0.5f;
        CHECK(ids(candidates(kLogits, kVocab, s, {})) == std::vector<int32_t>{1, 3});
        s = {};
        s.min_p = 0.3f;  // relative to the likeliest: e^-1 = .37 stays, e^-2 = .14 goes
        CHECK(ids(candidates(kLogits, kVocab, s, {})) == std::vector<int32_t>{1, 3, 2});
    }

    TEST_CASE("penalties") {
        Sampling s;
        s.temperature = 0;
        const std::vector<int32_t> history = {1, 1, 3};
        s.presence_penalty = 0.5f;
        CHECK(sample(kLogits, kVocab, s, history, 3) == 1);  // 2.5 and 2.5: tie, lower id
        s.presence_penalty = 1.5f;
        CHECK(sample(kLogits, kVocab, s, history, 3) == 2);
        s = {};
        s.temperature = 0;
        s.frequency_penalty = 0.6f;  // 1: 1.8, 3: 2.4, 2: 2.0
        CHECK(sample(kLogits, kVocab, s, history, 3) == 3);
        s = {};
        s.temperature = 0;
        s.repetition_penalty = 2.0f;  // 1 and 3: 1.5
        CHECK(sample(kLogits, kVocab, s, history, 3) == 2);
        s.penalty_window = 1;  // only the last 3 counts
        CHECK(sample(kLogits, kVocab, s, history, 3) == 1);
    }

    TEST_CASE("draws follow the distribution and repeat with the seed") {
        Sampling s;
        s.seed = 42;
        std::map<int32_t, int> counts;
        constexpr int kDraws = 40000;
        for (int i = 0; i < kDraws; ++i) ++counts[sample(kLogits, kVocab, s, {}, i)];
        double norm = 0;
        for (int64_t id = 0; id < kVocab; ++id) norm += std::exp(kLogits[static_cast<size_t>(id)]);
        for (int64_t id = 0; id < kVocab; ++id) {
            const double p = std::exp(kLogits[static_cast<size_t>(id)]) / norm;
            const double sigma = std::sqrt(p * (1 - p) / kDraws);
            CHECK(std::abs(counts[static_cast<int32_t>(id)] / double{kDraws} - p) < 5 * sigma);
        }
        CHECK(counts.count(6) == 0);
        CHECK(sample(kLogits, kVocab, s, {}, 17) == sample(kLogits, kVocab, s, {}, 17));
    }

    TEST_CASE("a tiny temperature is greedy, not NaN") {
        Sampling s;
        s.temperature = 1e-6f;
        const int32_t id = sample(kLogits, kVocab, s, {}, 5);
        CHECK((id == 1 || id == 3));
    }

    TEST_CASE("broken logits stop with an error") {
        const float inf = std::numeric_limits<float>::infinity();
        for (float bad : {std::nanf(""), inf}) {
            std::vector<float> logits = kLogits;
            logits[2] = bad;
            CHECK_THROWS_AS(sample(logits, kVocab, {}, {}, 0), Error);
        }
        CHECK_THROWS_AS(sample(std::vector<float>(4, -inf), 4, {}, {}, 0), Error);
        std::vector<float> padding = kLogits;
        padding[6] = std::nanf("");
        CHECK_NOTHROW(sample(padding, kVocab, {}, {}, 0));
        std::vector<float> masked = {-inf, 1.0f, -inf};
        CHECK(sample(masked, 3, {}, {}, 0) == 1);
    }

    TEST_CASE("settings that make no sense are refused by name") {
        const auto refused = [](auto change) {
            Sampling s;
            change(s);
            try {
                check_sampling(s, 100);
            } catch (const Error& e) {
                return e.kind() == ErrorKind::usage;
            }
            return false;
        };
        CHECK(refused([](Sampling& s) { s.temperature = -1; }));
        CHECK(refused([](Sampling& s) { s.temperature = std::nanf(""); }));
        CHECK(refused([](Sampling& s) { s.top_p = 0; }));
        CHECK(refused([](Sampling& s) { s.top_p = 1.1f; }));
        CHECK(refused([](Sampling& s) { s.top_k = -1; }));
        CHECK(refused([](Sampling& s) { s.min_p = 2; }));
        CHECK(refused([](Sampling& s) { s.repetition_penalty = 0; }));
        CHECK(refused([](Sampling& s) { s.logit_bias = {{100, 1.0f}}; }));
        CHECK(refused([](Sampling& s) { s.logit_bias = {{-1, 1.0f}}; }));
        CHECK(refused([](Sampling& s) { s.logit_bias = {{1, 1e30f}}; }));
        CHECK_FALSE(refused([](Sampling&) {}));
    }
}

}  // namespace
}  // namespace quern
