// logits_top against a full sort.
#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

#include "ggml-like/error.h"
#include "ggml-like/ops/logits_top.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Top {
    std::vector<int32_t> ids;
    std::vector<float> values;
    double sum;
    bool enough;
};

/// `rows` logits of this width, each with its temperature.
std::vector<Top> run_top(const Device& device, const std::vector<float>& logits, int64_t width, int64_t vocab,
                         const std::vector<float>& temperature) {
    const auto rows = static_cast<int64_t>(temperature.size());
    Graph g;
    Tensor *in = g.input("logits", DType::F32, {rows, width}),
           *t = g.input("temperature", DType::F32, {rows});
    g.output(logits_top(g, "top", in, t, vocab));
    const auto words = run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, in, logits);
        set_input(p, t, temperature);
    })[0];
    std::vector<Top> all;
    for (int64_t r = 0; r < rows; ++r) {
        const auto row = rows_of(words, kTopWords, r, 1);
        const auto number = [&](int i) { return static_cast<int32_t>(row[static_cast<size_t>(i)]); };
        Top& top = all.emplace_back();
        for (int i = 0; i < kTopLogits; ++i) {
            top.ids.push_back(number(i));
            top.values.push_back(std::bit_cast<float>(number(kTopLogits + i)));
        }
        top.sum = static_cast<double>(std::bit_cast<float>(number(2 * kTopLogits)));
        top.enough = number(2 * kTopLogits + 1) == 1;
    }
    return all;
}

/// One row of logits [width]; ids below `vocab` count, and those of -infinity never.
void check_top(const Top& top, const float* logits, int64_t vocab, float temperature) {
    CAPTURE(vocab);
    CAPTURE(temperature);
    std::vector<int32_t> order;
    for (int32_t id = 0; id < vocab; ++id)
        if (logits[id] > -kInfinity) order.push_back(id);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
    double sum = 0;
    for (const int32_t id : order)
        sum += std::exp((static_cast<double>(logits[id]) - static_cast<double>(logits[order[0]])) /
                        (temperature > 0 ? static_cast<double>(temperature) : 1.0));
    order.resize(std::min<size_t>(order.size(), temperature < 0 ? 1 : kTopLogits));
    std::vector<float> values;
    for (const int32_t id : order) values.push_back(logits[id]);
    order.resize(kTopLogits, -1);
    values.resize(kTopLogits, -kInfinity);
    CHECK(top.ids == order);
    CHECK(top.values == values);
    CHECK(std::fabs(top.sum - sum) <= 1e-5 * sum);
    CHECK(top.enough);
}

struct Size {
    int64_t width, vocab;
};
constexpr Size kSizes[] = {{100, 100}, {3072, 3001}, {248320, 248320}, {40, 33}, {64, 64}};
const std::vector<float> kTemperatures = {0.0f, 0.7f, 1.0f, -1.0f};

/// Rows of every temperature; padding of the head is higher than all that counts.
void check_rows(const Device& device, const Size& size, std::vector<float> logits) {
    for (size_t r = 0; r < kTemperatures.size(); ++r)
        std::fill(logits.begin() + static_cast<ptrdiff_t>(r) * size.width + size.vocab,
                  logits.begin() + static_cast<ptrdiff_t>(r + 1) * size.width, r == 1 ? std::nanf("") : 1e9f);
    const auto top = run_top(device, logits, size.width, size.vocab, kTemperatures);
    for (size_t r = 0; r < kTemperatures.size(); ++r)
        check_top(top[r], logits.data() + static_cast<int64_t>(r) * size.width, size.vocab, kTemperatures[r]);
}

std::vector<float> random_logits(const Size& size, unsigned seed, float scale) {
    auto logits = Random(seed).normals(static_cast<int64_t>(kTemperatures.size()) * size.width);
    for (float& x : logits) x *= scale;
    return logits;
}

void top_sizes(Device& device) {
    for (const Size& size : kSizes) {
        check_rows(device, size, random_logits(size, 1, 4.0f));
        check_rows(device, size, random_logits(size, 2, 0.01f));  // flat
        auto negative = random_logits(size, 3, 1.0f);
        for (float& x : negative) x = -20.0f - std::fabs(x);
        check_rows(device, size, negative);
        const auto with_highest = [&](float highest) {
            for (size_t r = 0; r < kTemperatures.size(); ++r)
                negative[r * static_cast<size_t>(size.width) + 7] = highest;
            check_rows(device, size, negative);
        };
        for (const float highest : {40.0f, 300.0f, 1e5f}) with_highest(highest);  // all others below zero
        for (size_t i = 0; i < negative.size(); i += 3) negative[i] = -3e38f;
        with_highest(40.0f);
        // Farther than numbers go. Where so many are equally far, the whole row is needed.
        if (size.vocab <= 4096) with_highest(3e38f);
    }
}

void top_ties(Device& device) {
    for (const Size& size : kSizes) {
        auto coarse =
            random_logits(size, 4, 2.0f);  // few different values, but not too many ids at the border
        for (float& x : coarse) x = std::round(x * 64) / 64;
        check_rows(device, size, coarse);
        auto equal = std::vector<float>(kTemperatures.size() * static_cast<size_t>(size.width), -3.5f);
        const auto wide = static_cast<size_t>(size.width);
        for (size_t r = 0; r < kTemperatures.size(); ++r)
            for (size_t i = 0; i < wide; ++i)
                if (i >= 2000 && i + 1 != wide) equal[r * wide + i] = -4.0f - static_cast<float>(i % 7);
        check_rows(device, size, equal);
    }
}

void top_infinite(Device& device) {
    for (const Size& size : kSizes) {
        auto some = random_logits(size, 5, 3.0f);
        for (size_t i = 0; i < some.size(); i += 3) some[i] = -kInfinity;
        check_rows(device, size, some);
        auto few = std::vector<float>(some.size(), -kInfinity);  // 11 ids a row
        for (size_t r = 0; r < kTemperatures.size(); ++r)
            for (size_t i = 0; i < 11; ++i)
                few[r * static_cast<size_t>(size.width) + i * static_cast<size_t>(size.vocab) / 11] =
                    static_cast<float>(i * 7 % 5);
        check_rows(device, size, few);
    }
}

/// One bad logit anywhere among the valid ones, or none that is finite.
void top_insane(Device& device) {
    for (const Size& size : {kSizes[0], kSizes[1], kSizes[2]}) {
        for (const float bad : {std::nanf(""), -std::nanf(""), kInfinity}) {
            for (const int64_t at : {int64_t{0}, size.vocab / 2, size.vocab - 1}) {
                CAPTURE(size.vocab);
                CAPTURE(at);
                auto logits = Random(6).normals(static_cast<int64_t>(kTemperatures.size()) * size.width);
                logits[static_cast<size_t>(size.width + at)] = bad;
                const auto top = run_top(device, logits, size.width, size.vocab, kTemperatures);
                CHECK(top[0].enough);
                CHECK_FALSE(top[1].enough);
                CHECK(top[2].enough);
                CHECK(top[3].enough);
            }
        }
        // Where one logit alone is wanted: nothing, a bad one, and as many equal ones as there are.
        const auto wide = static_cast<size_t>(size.width);
        for (const float temperature : {1.0f, -1.0f}) {
            const auto enough = [&](const std::vector<float>& row) {
                return run_top(device, row, size.width, size.vocab, {temperature})[0].enough;
            };
            CHECK_FALSE(enough(std::vector<float>(wide, -kInfinity)));
            std::vector<float> one(wide, -1.0f);
            one[wide / 3] = kInfinity;
            CHECK_FALSE(enough(one));
        }
        const auto equal =
            run_top(device, std::vector<float>(wide, 2.0f), size.width, size.vocab, {-1.0f})[0];
        CHECK((!equal.enough || equal.ids[0] == 0));
    }
}

/// A prompt of which every row's logits are wanted.
void top_many_rows(Device& device) {
    const Size size{100, 90};
    const std::vector<float> temperatures(5000, 1.0f);
    const auto logits = Random(7).normals(static_cast<int64_t>(temperatures.size()) * size.width);
    const auto top = run_top(device, logits, size.width, size.vocab, temperatures);
    for (size_t r = 0; r < top.size(); r += 7)
        check_top(top[r], logits.data() + static_cast<int64_t>(r) * size.width, size.vocab, 1.0f);
}

}  // namespace

DEVICE_TEST_CASE("logits_top: ids, logits and the sum", top_sizes)
DEVICE_TEST_CASE("logits_top: ties go to the lower id", top_ties)
DEVICE_TEST_CASE("logits_top: -infinity is not an id", top_infinite)
DEVICE_TEST_CASE("logits_top: NaN and infinity are told", top_insane)
DEVICE_TEST_CASE("logits_top: thousands of rows", top_many_rows)

TEST_SUITE("cpu") {
    TEST_CASE("logits_top: shapes that do not fit are errors") {
        Graph g;
        Tensor *logits = g.input("logits", DType::F32, {2, 100}), *two = g.input("t", DType::F32, {2}),
               *three = g.input("t", DType::F32, {3});
        CHECK_NOTHROW(logits_top(g, "top", logits, two, 100));
        CHECK_THROWS_AS(logits_top(g, "top", logits, two, 101), Error);
        CHECK_THROWS_AS(logits_top(g, "top", logits, two, 0), Error);
        CHECK_THROWS_AS(logits_top(g, "top", logits, three, 100), Error);
        CHECK_THROWS_AS(logits_top(g, "top", g.input("logits", DType::BF16, {2, 100}), two, 100), Error);
    }
}
