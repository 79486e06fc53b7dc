// How long drafts are: in simulated time, against the best fixed length and against none.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <random>

#include "tools/engine/draft_length.h"

namespace quern {
namespace {

/// A machine and a drafter: seconds of a step, and by position the probability that a draft is right so far.
struct World {
    std::function<double(int64_t sequences, int64_t rows)> seconds;
    std::function<std::vector<double>(int64_t round)> chances;
    int64_t sequences = 1;
    double noise = 0;
    int64_t answer = 0;  // rounds after which new sequences take the places of all; 0: never
    std::function<DraftRows(int64_t round)> draft_rows = [](int64_t) { return DraftRows::frequent; };
    double head = 0;  // seconds of a drafted token, for each kind of rows beyond the frequent ones
};

constexpr int64_t kMost = 7, kRows = 64;

/// Tokens a second over `rounds` rounds. `fixed` >= 0: always so many.
double rate(const World& world, int64_t fixed, int64_t rounds = 4000, unsigned seed = 11) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(0, 1);
    AcceptanceRecord all;
    std::vector<AcceptanceRecord> records(static_cast<size_t>(world.sequences));
    StepCosts costs;
    double tokens = 0, seconds = 0;
    for (int64_t round = 0; round < rounds; ++round) {
        if (world.answer > 0 && round % world.answer == 0)
            records.assign(records.size(), AcceptanceRecord());  // others' turn
        std::vector<DraftCandidate> candidates;
        const DraftRows draft_rows = world.draft_rows(round);
        all.fade();
        for (AcceptanceRecord& r : records) {
            r.fade();
            candidates.push_back({r.chances(all.chances()), kMost, draft_rows});
        }
        std::vector<int64_t> lengths(records.size(), fixed);
        if (fixed < 0)
            lengths = draft_lengths(candidates, costs, {world.sequences, world.sequences}, world.sequences,
                                    kRows - world.sequences);
        const StepSize step = with_drafts({world.sequences, world.sequences}, candidates, lengths);
        for (size_t i = 0; i < records.size(); ++i) {
            const std::vector<double> chances = world.chances(round);
            const double drawn = uniform(random);
            int64_t right = 0;
            while (right < lengths[i] && drawn < chances[static_cast<size_t>(right)]) ++right;
            tokens += 1 + static_cast<double>(right);
            records[i].add(lengths[i], right);
            all.add(lengths[i], right);
        }
        double took = world.seconds(world.sequences, step.rows) * (1 + world.noise * uniform(random));
        took += world.head * static_cast<double>(step.draft_rows) *
                static_cast<double>(step.rows - world.sequences);
        if (world.noise > 0 && random() % 50 == 0) took *= 5;  // somebody else had the machine
        costs.add(step, took);
        seconds += took;
    }
    return tokens / seconds;
}

double best_fixed(const World& world) {
    double best = 0;
    for (int64_t n = 0; n <= kMost; ++n) best = std::max(best, rate(world, n));
    return best;
}

const auto kAgents = [](int64_t) { return std::vector<double>{0.85, 0.77, 0.71, 0.67, 0.64, 0.61, 0.59}; };
const auto kChat = [](int64_t) { return std::vector<double>{0.71, 0.48, 0.34, 0.25, 0.20, 0.15, 0.12}; };
const auto kNothing = [](int64_t) { return std::vector<double>(7, 0.0); };

/// Memory-bound: rows are cheap; as a mixture of experts has it; and bound by products: every row costs the same.
const auto kFlat = [](int64_t, int64_t rows) { return 1e-3 * (1 + 0.03 * static_cast<double>(rows)); };
const auto kMixture = [](int64_t, int64_t rows) { return 1e-3 * (0.7 + 0.3 * static_cast<double>(rows)); };
const auto kLinear = [](int64_t, int64_t rows) { return 1e-3 * static_cast<double>(rows); };
/// Beyond 8 rows other kernels run: the first of them costs much, the others little.
const auto kStairs = [](int64_t, int64_t rows) {
    return 1e-3 * (0.8 + 0.3 * static_cast<double>(std::min<int64_t>(rows, 8)) +
                   (rows > 8 ? 1.4 + 0.07 * static_cast<double>(rows - 8) : 0.0));
};

TEST_SUITE("cpu") {
    TEST_CASE("lengths of drafts come near the best fixed one, for any cost of rows and any drafter" *
              doctest::test_suite("slow")) {
        for (const auto& seconds : {+kFlat, +kMixture, +kLinear, +kStairs})
            for (const auto& chances : {+kAgents, +kChat})
                for (const int64_t sequences : {1, 5, 8})
                    for (const double noise : {0.0, 0.1}) {
                        const World world{seconds, chances, sequences, noise};
                        CHECK(rate(world, -1) > 0.93 * best_fixed(world));
                    }
    }

    TEST_CASE("a drafter that is never right costs less than 3 %") {
        for (const auto& seconds : {+kFlat, +kMixture, +kLinear, +kStairs})
            for (const int64_t sequences : {1, 8, 63, 64}) {
                const World world{seconds, kNothing, sequences, 0.0};
                CHECK(rate(world, -1) > 0.97 * rate(world, 0));
            }
    }

    TEST_CASE("a drafter that is never right costs less than 3 %, however short the answers are") {
        for (const auto& seconds : {+kFlat, +kMixture, +kLinear, +kStairs})
            for (const int64_t sequences : {1, 8, 64})
                for (const int64_t answer : {10, 50, 200}) {
                    const World world{seconds, kNothing, sequences, 0.0, answer};
                    CHECK(rate(world, -1, 1000) > 0.97 * rate(world, 0, 1000));
                }
    }

    TEST_CASE("a text that becomes predictable gets drafts, one that ceases to be loses them") {
        const World world{kMixture,
                          [](int64_t round) { return round / 2000 % 2 == 0 ? kNothing(0) : kAgents(0); }};
        CHECK(rate(world, -1, 8000) > 1.15 * rate(world, 0, 8000));
    }

    TEST_CASE("without a measured step there are no drafts, and never more than there is room for") {
        StepCosts costs;
        const auto fresh = AcceptanceRecord().chances();
        const DraftCandidate candidates[] = {{fresh, 7}, {fresh, 2}};
        CHECK(draft_lengths(candidates, costs, {2, 2}, 2, 20) == std::vector<int64_t>{0, 0});
        costs.add({2, 2}, 1.0);
        CHECK(draft_lengths(candidates, costs, {2, 2}, 2, 20) ==
              std::vector<int64_t>{0, 0});  // may be an accident
        costs.add({2, 2}, 1.0);
        CHECK(draft_lengths(candidates, costs, {2, 2}, 2, 20) ==
              std::vector<int64_t>{1, 0});  // to see what it takes
        for (int64_t rows = 6; rows <= 40; ++rows) costs.add({2, rows / 2}, 1.0);
        CHECK(draft_lengths(candidates, costs, {2, 2}, 2, 20) == std::vector<int64_t>{7, 2});
        CHECK(draft_lengths(candidates, costs, {2, 2}, 2, 3) == std::vector<int64_t>{2, 1});
        CHECK(draft_lengths(candidates, costs, {2, 2}, 2, 0) == std::vector<int64_t>{0, 0});
        CHECK(draft_lengths({}, costs, {2, 2}, 2, 20).empty());
    }

    TEST_CASE(
        "costs that were not measured are those of smaller steps, and never more than those of larger ones") {
        StepCosts costs;
        CHECK(costs.seconds({1, 1}) == INFINITY);
        const auto twice = [&](int64_t sequences, int64_t rows, double seconds) {
            costs.add({sequences, rows}, seconds);
            CHECK(!costs.knows({sequences, rows}));
            costs.add({sequences, rows}, seconds + 1);
            CHECK(costs.knows({sequences, rows}));
        };
        twice(1, 1, 1.0);
        twice(1, 5, 1.9);
        twice(2, 2, 7.0);
        twice(2, 3, 6.0);
        CHECK(costs.seconds({1, 3}) == 1.0);
        CHECK(costs.seconds({1, 9}) == 1.9);
        CHECK(costs.seconds({2, 4}) == 6.0);
        CHECK(costs.seconds({2, 1}) == 6.0);
        CHECK(!costs.knows({3, 3}));
        costs.add({1, 2}, 50.0);  // an accident
        CHECK(costs.seconds({1, 2}) == 1.0);
        costs.add({1, 2}, 1.5);
        CHECK(costs.seconds({1, 2}) == 1.5);
        for (int i = 0; i < 1001; ++i) costs.add({2, 2}, 7.0);  // the others are too old to believe
        CHECK(!costs.knows({1, 1}));
        CHECK(costs.seconds({2, 2}) == doctest::Approx(7.0));
    }

    TEST_CASE("what a step costs is learnt by the rows of the head that its drafts read") {
        StepCosts costs;
        const auto twice = [&](const StepSize& size, double seconds) {
            for (int i = 0; i < 2; ++i) costs.add(size, seconds);
        };
        using enum DraftRows;
        twice({1, 1}, 1.0);
        twice({1, 4}, 1.3);
        twice({1, 6}, 1.5);
        CHECK(costs.knows({1, 4, copied}));  // as with fewer rows of the head, until it was measured
        CHECK(costs.seconds({1, 4, copied}) == 1.3);
        twice({1, 4, copied}, 2.0);
        CHECK(costs.seconds({1, 4}) == 1.3);
        CHECK(costs.seconds({1, 4, copied}) == 2.0);
        CHECK(costs.seconds({1, 4, all}) == 2.0);
        CHECK(costs.seconds({1, 5, copied}) == 2.0);
        CHECK(costs.seconds({1, 6}) == 1.5);
        CHECK(!costs.knows({1, 5, all}));
        twice({1, 5, all}, 9.0);  // says nothing of fewer rows
        CHECK(!costs.knows({1, 5, copied}));
        CHECK(costs.seconds({1, 5, copied}) == 2.0);
        CHECK(costs.seconds({1, 5}) == 1.3);
        CHECK(costs.list().size() == 5);
        CHECK(costs.list()[2].draft_rows == copied);
    }

    TEST_CASE("a step reads as many rows of the head as the drafts need that are taken") {
        AcceptanceRecord::Chances high, low;
        high.fill(0.9), low.fill(0.1);
        using enum DraftRows;
        const DraftCandidate candidates[] = {{high, 2, frequent}, {low, 2, all}};
        StepCosts costs;
        for (int i = 0; i < 2; ++i)
            for (const DraftRows rows : {frequent, all})
                for (int64_t drafts = 0; drafts <= 4; ++drafts)
                    costs.add({2, 2 + drafts, rows}, rows == all && drafts > 0 ? 9.0 : 1.0);
        const auto lengths = draft_lengths(candidates, costs, {2, 2}, 2, 4);
        CHECK(lengths == std::vector<int64_t>{2, 0});
        CHECK(with_drafts({2, 2}, candidates, lengths) == StepSize{2, 4, frequent});
        const std::vector<int64_t> both = {1, 2};
        CHECK(with_drafts({2, 2}, candidates, both) == StepSize{2, 5, all});
        // Where the step reads all rows anyway, more drafts cost nothing.
        CHECK(draft_lengths(candidates, costs, {2, 3, all}, 2, 3) == std::vector<int64_t>{2, 1});
    }

    TEST_CASE("texts that take turns get the drafts that pay for each") {
        const auto turns = [](int64_t round) {
            return round / 150 % 2 == 0 ? DraftRows::frequent : DraftRows::all;
        };
        for (const int64_t sequences : {1, 5}) {
            const World world{kFlat, kChat, sequences, 0.0, 150, turns, 0.15e-3};
            CHECK(rate(world, -1) > 1.05 * best_fixed(world));
        }
    }

    TEST_CASE(
        "rows of the head that are new cost little to learn, and nothing where drafts are never right") {
        using enum DraftRows;
        for (const DraftRows first : {frequent, copied, all})
            for (const DraftRows then : {frequent, copied, all})
                for (const int64_t turn : {50, 600, 2000}) {
                    World world{kMixture, kNothing, 1, 0.0, 50};
                    world.draft_rows = [=](int64_t round) { return round / turn % 2 == 0 ? first : then; };
                    world.head = 0.1e-3;
                    CHECK(rate(world, -1) > 0.97 * rate(world, 0));
                    world.chances = kAgents;
                    CHECK(rate(world, -1) > 0.93 * best_fixed(world));
                }
    }

    TEST_CASE("first drafts that happen to fail do not end drafting") {
        // One answer of some 250 tokens of chat; a drafter whose draft takes a third of a step.
        const World world{[](int64_t, int64_t rows) {
                              return 1e-3 * (rows == 1 ? 1.5 : 2.3 + 0.15 * static_cast<double>(rows));
                          },
                          kChat};
        int64_t gained = 0;
        for (unsigned seed = 1; seed <= 200; ++seed)
            gained += rate(world, -1, 110, seed) > 1.1 * rate(world, 0, 110, seed) ? 1 : 0;
        CHECK(gained >= 145);  // 99 where what is expected counts as one trial
    }

    TEST_CASE("one step that took very long does not end drafts") {
        for (int64_t slow = 0; slow < 12; ++slow) {
            int64_t step = 0;
            const World world{[&](int64_t sequences, int64_t rows) {
                                  return kFlat(sequences, rows) * (step++ == slow ? 20 : 1);
                              },
                              kAgents};
            CAPTURE(slow);
            CHECK(rate(world, -1, 1000) > 1.8 * rate({kFlat, kAgents}, 0, 1000));
        }
    }
}

}  // namespace
}  // namespace quern
