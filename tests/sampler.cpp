#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>

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

struct Row {
    std::vector<float> logits;
    int64_t vocab;
};

std::vector<float> normals(std::mt19937& random, size_t n, float scale) {
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> v(n);
    for (float& x : v) x = normal(random);
    return v;
}

template <typename T>
T pick(std::mt19937& random, std::initializer_list<T> of) {
    return of.begin()[random() % of.size()];
}

/// Peaked or flat, with ties, masked ids and padding.
Row random_row(std::mt19937& random) {
    const size_t vocab = pick<size_t>(random, {3, 40, 64, 65, 100, 700, 3000}), padding = random() % 3;
    Row row{normals(random, vocab + padding, pick(random, {0.01f, 1.0f, 3.0f, 6.0f, 20.0f})),
            static_cast<int64_t>(vocab)};
    const float grid = pick(random, {0.0f, 0.0f, 0.5f, 8.0f});
    const bool masked = random() % 4 == 0;
    for (size_t i = 0; i < vocab; ++i) {
        float& x = row.logits[i];
        if (grid > 0) x = std::round(x * grid) / grid;
        if (masked && random() % 2 == 0 && i != vocab / 2) x = -std::numeric_limits<float>::infinity();
    }
    std::fill(row.logits.begin() + static_cast<ptrdiff_t>(vocab), row.logits.end(), 1e6f);
    return row;
}

Sampling random_settings(std::mt19937& random) {
    Sampling s;
    s.temperature = pick(random, {0.0f, 1e-6f, 1e-3f, 0.3f, 0.7f, 1.0f, 1.5f, 100.0f});
    s.top_k = pick(random, {0, 0, 0, 1, 2, 20, 63, 64, 65, 1000});
    s.top_p = pick(random, {1.0f, 1.0f, 0.99f, 0.95f, 0.9f, 0.5f, 0.1f, 0.0f});
    s.min_p = pick(random, {0.0f, 0.0f, 1e-3f, 0.05f, 0.3f, 1.0f});
    s.seed = random();
    return s;
}

struct Top {
    std::vector<int32_t> ids;
    std::vector<float> logits;
    double sum = 0;
};

Top top_of(const Row& row, float temperature) {
    Top top;
    for (int32_t id = 0; id < row.vocab; ++id)
        if (std::isfinite(row.logits[static_cast<size_t>(id)])) top.ids.push_back(id);
    const auto logit = [&](int32_t id) { return row.logits[static_cast<size_t>(id)]; };
    std::stable_sort(top.ids.begin(), top.ids.end(),
                     [&](int32_t a, int32_t b) { return logit(a) > logit(b); });
    for (const int32_t id : top.ids)
        top.sum += std::exp((static_cast<double>(logit(id)) - logit(top.ids[0])) /
                            (temperature > 0 ? temperature : 1.0f));
    top.ids.resize(std::min<size_t>(top.ids.size(), 64));
    for (const int32_t id : top.ids) top.logits.push_back(logit(id));
    return top;
}

/// With a sum as good as a device's FP32 may be: off by up to 1e-5 of itself.
std::optional<int32_t> from_top(const Row& row, const Sampling& s, int64_t position) {
    Top top = top_of(row, s.temperature);
    top.sum = static_cast<float>(std::max(1.0, top.sum * (1 + 1e-5 * static_cast<double>(position % 3 - 1))));
    return sample_top({top.ids, top.logits, top.sum}, row.vocab, s, position);
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
        s.top_p = 0;
        CHECK(ids(candidates(kLogits, kVocab, s, {})) == std::vector<int32_t>{1});
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

    TEST_CASE("drawing among allowed ids is drawing from a masked row, with few questions") {
        std::mt19937 random(11);
        for (int i = 0; i < 3000; ++i) {
            const Row row = random_row(random);
            const Sampling s = random_settings(random);
            std::vector<char> allowed(static_cast<size_t>(row.vocab));
            const unsigned one_in = pick(random, {1u, 2u, 50u});
            for (char& a : allowed) a = random() % one_in == 0;
            const auto allow = [&](int32_t id) { return allowed[static_cast<size_t>(id)] != 0; };
            std::vector<float> masked = row.logits;
            bool any = false;
            for (size_t id = 0; id < allowed.size(); ++id) {
                any = any || (allowed[id] && std::isfinite(masked[id]));
                if (!allowed[id]) masked[id] = -INFINITY;
            }
            CAPTURE(i);
            const auto narrow = [&](std::span<float> logits) {  // leaves some that are refused
                for (size_t id = 0; id < logits.size(); ++id)
                    if (!allowed[id] && id % 5 != 0) logits[id] = -INFINITY;
            };
            if (any) {
                CHECK(sample_allowed(row.logits, row.vocab, s, {}, i, allow) ==
                      sample(masked, row.vocab, s, {}, i));
                CHECK(sample_allowed(row.logits, row.vocab, s, {}, i, allow, narrow) ==
                      sample(masked, row.vocab, s, {}, i));
            } else {
                CHECK_THROWS_AS(sample_allowed(row.logits, row.vocab, s, {}, i, allow), Error);
            }
        }
        const std::vector<float> wide = normals(random, 100000, 3.0f);
        int asked = 0;
        sample_allowed(wide, 100000, {.top_k = 20}, {}, 0, [&](int32_t id) { return ++asked, id % 2 == 0; });
        CHECK(asked < 200);
    }

    TEST_CASE("the highest logits alone give the same token, or none") {
        std::mt19937 random(5);
        int answers = 0, total = 0;
        for (int trial = 0; trial < 20000; ++trial) {
            const Row row = random_row(random);
            const Sampling s = random_settings(random);
            const auto got = from_top(row, s, trial);
            ++total;
            if (!got) continue;
            ++answers;
            CAPTURE(trial);
            CAPTURE(s.temperature);
            CAPTURE(s.top_k);
            CAPTURE(s.top_p);
            CAPTURE(s.min_p);
            CHECK(*got == sample(row.logits, row.vocab, s, {}, trial));
        }
        CHECK(answers > total / 3);
    }

    TEST_CASE("among allowed tokens the highest logits alone give the same token, or none") {
        std::mt19937 random(8);
        int answers = 0, total = 0;
        for (int trial = 0; trial < 4000; ++trial) {
            const Row row = random_row(random);
            const Sampling s = random_settings(random);
            const unsigned share = 1 + random() % 9;
            const auto allow = [&](int32_t id) {
                return static_cast<unsigned>(id) * 2654435761u % 10 < share;
            };
            const Top top = top_of(row, s.temperature == 0 ? 1.0f : s.temperature);
            const auto got = sample_allowed_top({top.ids, top.logits, top.sum}, row.vocab, s, trial, allow);
            ++total;
            if (!got) continue;
            ++answers;
            CAPTURE(trial);
            CHECK(allow(*got));
            CHECK(*got == sample_allowed(row.logits, row.vocab, s, {}, trial, allow));
        }
        CHECK(answers > total / 5);
    }
    TEST_CASE("the highest logits: what they must answer, and what they cannot") {
        std::mt19937 random(6);
        Row row = random_row(random);
        row.vocab = 5000;
        row.logits = normals(random, 5000, 3.0f);
        const auto answers = [&](auto change) {
            Sampling s;
            change(s);
            return from_top(row, s, 1).has_value();
        };
        CHECK(answers([](Sampling& s) { s.temperature = 0; }));
        CHECK(answers([](Sampling& s) { s.top_k = 1; }));
        CHECK(answers([](Sampling& s) { s.top_k = 64; }));
        CHECK(answers([](Sampling& s) { s.top_k = 20, s.top_p = 0.95f, s.temperature = 0.6f; }));
        CHECK(answers([](Sampling& s) { s.min_p = 0.3f; }));
        CHECK(answers([](Sampling& s) { s.top_p = 0.1f; }));
        CHECK_FALSE(answers([](Sampling&) {}));
        CHECK_FALSE(answers([](Sampling& s) { s.top_k = 65; }));
        CHECK_FALSE(answers([](Sampling& s) { s.top_p = 0.999f; }));
        for (const float temperature : {0.0f, 1.0f}) {
            const auto adjusted = [&](auto change) {
                return answers([&](Sampling& s) {
                    s.temperature = temperature, s.top_k = 5;
                    change(s);
                });
            };
            CHECK(adjusted([](Sampling&) {}));
            CHECK_FALSE(adjusted([](Sampling& s) { s.repetition_penalty = 1.1f; }));
            CHECK_FALSE(adjusted([](Sampling& s) { s.presence_penalty = 0.5f; }));
            CHECK_FALSE(adjusted([](Sampling& s) { s.frequency_penalty = -0.5f; }));
            CHECK_FALSE(adjusted([](Sampling& s) { s.logit_bias = {{7, 0.0f}}; }));
        }
        // Many small ones make up the last of p, and more of the like are not among the 64.
        std::fill(row.logits.begin(), row.logits.end(), std::log(0.095f / 4936.0f));
        std::fill_n(row.logits.begin(), 64, std::log(0.0015f));
        row.logits[0] = std::log(0.8105f);
        Sampling s;
        s.top_p = 0.9f;
        for (int64_t position = 0; position < 200; ++position) {
            const auto got = from_top(row, s, position);
            if (got) CHECK(*got == sample(row.logits, row.vocab, s, {}, position));
        }
        // A broken sum is no sum.
        Top top = top_of(row, 1.0f);
        top.sum = std::nan("");
        CHECK_FALSE(sample_top({top.ids, top.logits, top.sum}, row.vocab, s, 1).has_value());
    }
}

}  // namespace
}  // namespace quern
