// Ids of a row of logits in order, against a stable sort.
#include "tools/engine/ranked_ids.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace quern {
namespace {

std::vector<int32_t> sorted(const std::vector<float>& logits) {
    std::vector<int32_t> ids(logits.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::erase_if(ids, [&](int32_t id) { return logits[static_cast<size_t>(id)] == -INFINITY; });
    std::stable_sort(ids.begin(), ids.end(), [&](int32_t a, int32_t b) {
        return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    });
    return ids;
}

std::vector<int32_t> ranked(const std::vector<float>& logits, size_t most) {
    RankedIds ids(logits);
    std::vector<int32_t> out;
    while (out.size() < most) {
        const auto id = ids.next();
        if (!id) break;
        out.push_back(*id);
    }
    if (out.size() < most || most == logits.size()) CHECK_FALSE(ids.next());
    return out;
}

template <typename F>
std::vector<float> row(size_t count, F&& value) {
    std::mt19937 random(7);
    std::vector<float> x(count);
    for (float& v : x) v = value(random);
    return x;
}

TEST_SUITE("cpu") {
    TEST_CASE("ranked ids: the order of a stable sort, of few and of many, to the end") {
        std::normal_distribution<float> normal;
        const auto any = [&](auto& random) { return 4 * normal(random); };
        const auto few = [&](auto& random) { return std::round(normal(random)) / 2; };  // ties, both zeros
        const auto signs = [](auto& random) { return random() % 2 == 0 ? 0.0f : -0.0f; };
        const auto near = [](auto& random) { return 20 + static_cast<float>(random() % 1000) * 1e-5f; };
        const auto none = [&](auto& random) { return random() % 3 == 0 ? -INFINITY : normal(random); };
        const auto rare = [&](auto& random) { return random() % 300 == 0 ? normal(random) : -INFINITY; };
        for (const size_t count : {1u, 2u, 4095u, 4096u, 4097u, 20000u}) {
            CAPTURE(count);
            for (const auto& x : {row(count, any), row(count, few), row(count, signs), row(count, near),
                                  row(count, none), row(count, rare)})
                CHECK(ranked(x, count) == sorted(x));
        }
        const auto large = row(248320, any);
        auto expected = sorted(large);
        CHECK(ranked(large, large.size()) == expected);
        expected.resize(100);
        CHECK(ranked(large, 100) == expected);
        CHECK_FALSE(RankedIds({}).next());
    }
}

}  // namespace
}  // namespace quern
