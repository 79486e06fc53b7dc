// conv_gated_delta_net: drafts, whose rows wait in a journal until they are committed.
#include "ggml-like/error.h"
#include "ops/delta_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::delta;

namespace {

/// Drafts: a step journals m rows, of which the next commits n; that one journals as well, and a last one
/// does not.
void check_journal(const Device& device, const Shape& s, int m, int n, int64_t spare) {
    CAPTURE(s.dk);
    CAPTURE(m);
    CAPTURE(n);
    CAPTURE(spare);
    constexpr int kBefore = 3, kAfter = 2;
    const int second = (m > 5 ? static_cast<int>(kJournal) + 1 : 6) - m, kept = second / 2;
    const auto p = device.rounded(Random(73).normals((kBefore + n + kept + kAfter) * s.columns()));
    const auto wrong = device.rounded(Random(74).normals(kJournal * s.columns()));
    Memory memory(device, s, true, spare);
    const Reference r = reference(p, memory);
    int position = 0;
    /// `good` rows of the sequence, then wrong ones.
    const auto step = [&](int good, int bad, int committed, bool journal) {
        CAPTURE(position);
        auto rows = rows_of(p, s.columns(), position, good);
        rows.insert(rows.end(), wrong.begin(), wrong.begin() + bad * s.columns());
        const Layout l{.rows = {good + bad},
                       .before = {position},
                       .slots = {1},
                       .committed = {committed},
                       .journal = {journal},
                       .kind = StepKind::answer};
        auto y = run_step(device, l, rows, memory);
        y.resize(static_cast<size_t>(good * s.out()));
        if (good > 0) CHECK(relative_error(y, rows_of(r.out, s.out(), position, good)) < device.bound(4e-6));
        position += good;
    };
    step(kBefore, 0, 0, false);
    step(n, m - n, 0, true);
    step(kept, second - kept, n, true);
    step(kAfter, 0, kept, false);
    const auto state = rows_of(memory.delta.values(), s.nv * int64_t{s.dv} * s.dk, 1, 1);
    CHECK(relative_error(state, r.state) < device.bound(1e-5));
}

/// Steps that journal, beside a sequence that does not and one without rows: outputs and S have the bits of
/// rows that come one by one. Then steps that do not, of either kind, which begin with what the journal holds. `empty`: further
/// sequences without rows, which make a step so large that a GPU chooses another kernel than for the same rows alone, and with more of
/// them a third one.
void check_journal_bits(const Device& device, const Shape& s, int empty) {
    CAPTURE(s.dk);
    CAPTURE(empty);
    Memory drafts(device, s, true), plain(device, s, true);
    int position = 0, waiting = 0, other = 0;
    unsigned seed = 300;
    const auto state = [&](Memory& m, int64_t slot) {
        return rows_of(m.delta.values(), s.nv * int64_t{s.dv} * s.dk, slot, 1);
    };
    const auto alone = [&](const std::vector<float>& row, int at, int slot) {
        return run_step(device, layout_of(StepKind::answer, {1}, {at}, {slot}), row, plain);
    };
    const auto random = [&](int64_t rows) {
        return device.rounded(Random(seed++).normals(rows * s.columns()));
    };
    const auto together = [&](StepKind kind, int rows, int others) {
        return layout_of(kind, {rows, 0, others}, {position, 9, other}, {1, 0, 3});
    };
    const auto add_empty = [&](Layout& l) {
        for (std::vector<int>* list : {&l.rows, &l.before, &l.slots, &l.committed, &l.journal})
            list->resize(list->size() + static_cast<size_t>(empty));
    };
    const auto journal = [&](int rows, int good) {
        CAPTURE(position);
        CAPTURE(rows);
        Layout l = together(StepKind::answer, rows, 2);
        l.committed[0] = waiting, l.journal[0] = 1;
        add_empty(l);
        const auto p = random(rows + 2);
        const auto y = run_step(device, l, p, drafts);
        CHECK(state(drafts, 1) ==
              (position > 0 ? state(plain, 1) : std::vector<double>(state(plain, 1).size(), 0.0)));
        for (int r = 0; r < good; ++r)
            CHECK(alone(rows_of(p, s.columns(), r, 1), position + r, 1) == rows_of(y, s.out(), r, 1));
        for (int r = 0; r < 2; ++r)
            CHECK(alone(rows_of(p, s.columns(), rows + r, 1), other + r, 3) ==
                  rows_of(y, s.out(), rows + r, 1));
        position += good, waiting = good, other += 2;
    };
    for (const auto& [rows, good] : {std::pair{5, 3}, {4, 0}, {5, 5}, {1, 1}, {3, 2}, {16, 12}, {9, 9}})
        journal(rows, good);
    for (const StepKind kind : kKinds)
        for (const int rows : {1, 2})
            for (const int good : {0, 3, 16}) {
                journal(16, good);
                CAPTURE(position);
                Layout l = together(kind, rows, rows);
                const auto p = random(2 * rows);
                const auto want = run_step(device, l, p, plain);
                l.committed[0] = waiting;
                add_empty(l);
                CHECK(run_step(device, l, p, drafts) == want);
                CHECK(state(drafts, 1) == state(plain, 1));
                CHECK(state(drafts, 3) == state(plain, 3));
                position += rows, other += rows, waiting = 0;
            }
}

void delta_journal(Device& device) {
    for (const Shape& s : {kSmall, kReal, kThree})
        for (const int m : {1, 2, 3, 4, 5, 9, 16})
            for (int n = 0; n <= m; n += m > 5 ? m / 2 : 1)
                for (const int64_t spare : {0, 4})
                    if (s.dk == kSmall.dk || m % 2 == 1 || m == kJournal)
                        check_journal(device, s, m, n, spare);
    for (const Shape& s : {kSmall, kReal, kThree})
        for (const int empty : {0, 70, 300}) check_journal_bits(device, s, empty);
}

}  // namespace

DEVICE_TEST_CASE("conv_gated_delta_net: any n of m journaled rows may be committed", delta_journal)

TEST_SUITE("cpu") {
    TEST_CASE("conv_gated_delta_net: more than the journal holds is an error") {
        const Device device = cpu_device();
        constexpr int kMore = static_cast<int>(kJournal) + 1;
        const auto p = Random(74).normals(kMore * kSmall.columns());
        Memory with(device, kSmall, true), without(device, kSmall);
        const auto two = rows_of(p, kSmall.columns(), 0, 2);
        CHECK_THROWS_AS(
            run_step(device, {.rows = {2}, .before = {3}, .slots = {1}, .committed = {kMore}}, two, with),
            Error);
        CHECK_THROWS_AS(
            run_step(device, {.rows = {kMore}, .before = {3}, .slots = {1}, .journal = {1}}, p, with), Error);
        CHECK_THROWS_AS(
            run_step(device, {.rows = {2}, .before = {3}, .slots = {1}, .journal = {1}}, two, without),
            Error);
        CHECK_THROWS_WITH_AS(
            run_step(device, {.rows = {2}, .before = {3}, .slots = {1}, .journal = {1}}, two, with, false),
            doctest::Contains("drafts"), Error);
    }
}
