// conv_gated_delta_net: a row's bits alone, beside others, and wherever its sequence is cut.
#include <cmath>
#include <cstdlib>

#include "ops/delta_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::delta;

namespace {

/// Everything that a slot keeps.
std::vector<double> state_of(Memory& m, int64_t slot) {
    const Shape& s = m.shape;
    auto all = rows_of(m.delta.values(), s.nv * int64_t{s.dv} * s.dk, slot, 1);
    const auto ring = rows_of(m.inputs.values(), m.ring * s.channels(), slot, 1);
    all.insert(all.end(), ring.begin(), ring.end());
    return all;
}

/// Answer rows of several sequences at once, or every row in a step of its own: the same bits. `spare` rows
/// of the ring: without them a step overwrites what it reads.
void check_alone(const Device& device, const Shape& s, const std::vector<std::vector<int>>& steps,
                 int64_t spare, const std::vector<int>& slots) {
    CAPTURE(s.dk);
    CAPTURE(spare);
    const int all = *std::max_element(slots.begin(), slots.end()) + 1;
    Memory together(device, s, false, spare, all), alone(device, s, false, spare, all);
    std::vector<int> before(steps[0].size(), 0);
    for (const std::vector<int>& rows : steps) {
        const Layout l = layout_of(StepKind::answer, rows, before, slots);
        const auto p = device.rounded(Random(90).normals(l.tokens() * s.columns()));
        const auto y = run_step(device, l, p, together);
        int64_t t = 0;
        for (size_t i = 0; i < rows.size(); ++i)
            for (int r = 0; r < rows[i]; ++r, ++t) {
                const auto got = run_step(device, layout_of(StepKind::answer, {1}, {before[i]++}, {slots[i]}),
                                          rows_of(p, s.columns(), t, 1), alone);
                CHECK(got == rows_of(y, s.out(), t, 1));
            }
    }
    CHECK(together.delta.values() == alone.delta.values());
    CHECK(together.inputs.values() == alone.inputs.values());
}
void check_alone(const Device& device, const Shape& s, const std::vector<std::vector<int>>& steps,
                 int64_t spare = 0) {
    const auto sequences = static_cast<int>(steps[0].size());
    std::vector<int> slots;
    for (int i = 0; i < sequences; ++i) slots.push_back((i + 1) % sequences);
    check_alone(device, s, steps, spare, slots);
}

/// A prompt whole, cut at multiples of 64, and beside others: the same bits of outputs and state. Its first
/// rows without the others: the same bits of outputs.
void check_prompt(const Device& device, const Shape& s, int rows) {
    CAPTURE(s.dk);
    CAPTURE(rows);
    const auto p = device.rounded(Random(91).normals(rows * s.columns()));
    const auto run = [&](const std::vector<int>& ends, const std::vector<int>& beside, Memory& m) {
        std::vector<double> y;
        int from = 0;
        for (const int end : ends) {
            const Layout l =
                layout_of(StepKind::prompt, {beside[0], end - from, beside[1]}, {0, from, 64}, {1, 0, 3});
            std::vector<float> in(static_cast<size_t>(l.tokens() * s.columns()), 0.25f);
            const auto own = rows_of(p, s.columns(), from, end - from);
            std::copy(own.begin(), own.end(), in.begin() + beside[0] * s.columns());
            const auto out = rows_of(run_step(device, l, in, m), s.out(), beside[0], end - from);
            y.insert(y.end(), out.begin(), out.end());
            from = end;
        }
        return y;
    };
    Memory alone(device, s);
    const auto whole = run({rows}, {0, 0}, alone);
    const auto state = state_of(alone, 0);
    std::vector<std::vector<int>> cuts = {{rows}};
    if (rows > 64) cuts.push_back({(rows - 1) / 64 * 64, rows});
    if (rows > 64 && rows < 400) {
        cuts.emplace_back();
        for (int end = 64; end < rows; end += 64) cuts.back().push_back(end);
        cuts.back().push_back(rows);
    }
    for (const auto& ends : cuts)
        for (const std::vector<int>& beside : {std::vector{0, 0}, {1, 70}, {200, 1}}) {
            Memory m(device, s);
            CHECK(run(ends, beside, m) == whole);
            CHECK(state_of(m, 0) == state);
        }
    for (const int first : {1, 2, 3, 17, 63, 64, 100}) {
        if (first >= rows) break;
        CAPTURE(first);
        Memory m(device, s);
        CHECK(run({first}, {0, 0}, m) == rows_of(whole, s.out(), 0, first));
    }
}

/// So many sequences that a GPU's blocks take one after another: some with one row, some with three, some without, some that
/// begin later. Then so many without rows that blocks have more than 32 of them.
void check_in_turn(const Device& device) {
    std::vector<int> first(36, 1), mixed(36, 0);
    const std::vector<int> ones(36, 1);
    for (size_t i = 2; i < first.size(); i += 3) first[i] = 0;
    for (size_t i = 0; i < mixed.size(); ++i) mixed[i] = i % 5 == 0 ? 3 : i % 5 == 2 || i % 10 == 9 ? 1 : 0;
    for (const int64_t spare : {0, 7}) check_alone(device, kWide, {first, mixed, ones}, spare);

    constexpr Shape kOneKeyHead{1, 32, 128, 128};
    std::vector<int> sparse(300, 0), slots(300, 0);
    for (const size_t i : {3, 8, 290, 298}) sparse[i] = 1, slots[i] = static_cast<int>(i % 4);
    slots[290] = 1;
    check_alone(device, kOneKeyHead, {sparse, sparse}, 0, slots);
}

/// Few sequences, and so many that the GPU gives each head one block instead of four.
void delta_alone(Device& device) {
    for (const Shape& s : {kReal, kThree}) {
        check_alone(device, s, {{1, 1, 1}, {3, 1, 8}, {1, 0, 1}, {2, 5, 1}, {0, 1, 1}});
        check_alone(device, s, {{1, 1, 1}, {3, 1, 8}, {1, 0, 1}, {2, 5, 1}, {0, 1, 1}}, 7);
    }
    const std::vector<int> one(64, 1);
    std::vector<int> few(64, 0);
    for (size_t i = 0; i < few.size(); i += 5) few[i] = static_cast<int>(i % 8) + 1;
    check_alone(device, kReal, {one, few, one}, 7);
    check_alone(device, kReal, {few, one});
    for (const int64_t spare : {0, 7})
        check_alone(device, kThree, {one, few, one}, spare);  // S by way of shared memory
    if (!device.exact()) check_in_turn(device);
}

void delta_shapes(Device& device) {
    for (const Shape& s : kOtherShapes) {
        check_alone(device, s, {{3, 1, 4}, {1, 1, 1}, {2, 0, 5}});
        check_prompt(device, s, 130);
    }
}

void delta_prompts(Device& device) {
    for (const Shape& s : {kReal, kThree})
        for (const int rows : {1, 2, 63, 64, 65, 130}) check_prompt(device, s, rows);
    check_prompt(device, kReal, 1000);
    if (!device.exact()) check_prompt(device, kReal, 5000);
    if (!device.exact())
        check_prompt(device, kWide, 2000);  // more units of `prepare` than blocks, some in turns
    if (!device.exact()) check_prompt(device, kThree, 2000);  // more blocks a key head, of eight warps
}

/// A prompt whose last chunk is not full, beside one of which no row is a number: the same bits as alone.
void delta_no_numbers(Device& device) {
    for (const int rows : {1, 65, 100}) {
        CAPTURE(rows);
        const auto p = device.rounded(Random(94).normals(rows * kReal.columns()));
        const auto run = [&](int beside) {
            Memory m(device, kReal);
            const Layout l = layout_of(StepKind::prompt, {rows, beside}, {0, 0}, {1, 3});
            std::vector<float> in = p;
            in.resize(static_cast<size_t>(l.tokens() * kReal.columns()), std::nanf(""));
            auto all = rows_of(run_step(device, l, in, m), kReal.out(), 0, rows);
            const auto state = state_of(m, 1);
            all.insert(all.end(), state.begin(), state.end());
            return all;
        };
        CHECK(run(70) == run(0));
    }
}

/// On the card as it is, and without products of warpgroups: the same bits of outputs and state.
void check_variants(const Shape& s, const std::vector<int>& rows) {
    CAPTURE(s.nv);
    CAPTURE(rows[0]);
    CAPTURE(rows.back());
    std::vector<int> slots = {1, 0, 3};
    slots.resize(rows.size());
    const auto run = [&](const Device& device) {
        Memory m(device, s);
        std::vector<double> all;
        std::vector<int> before(rows.size(), 0);
        for (int step = 0; step < 2; ++step) {
            const Layout l = layout_of(StepKind::prompt, rows, before, slots);
            const auto p =
                device.rounded(Random(92 + static_cast<unsigned>(step)).normals(l.tokens() * s.columns()));
            const auto y = run_step(device, l, p, m);
            all.insert(all.end(), y.begin(), y.end());
            for (size_t i = 0; i < rows.size(); ++i) before[i] += rows[i];
        }
        for (const int64_t slot : slots) {
            const auto state = state_of(m, slot);
            all.insert(all.end(), state.begin(), state.end());
        }
        return all;
    };
    Device small = cuda_device();
    small.backend = make_small_cuda_backend();
    CHECK(run(cuda_device()) == run(small));
}

}  // namespace

TEST_SUITE("cuda") {
    TEST_CASE("conv_gated_delta_net: prompts by warpgroups or not, the same bits") {
        if (std::getenv("QUERN_TEST_SHARED_BYTES") != nullptr) return;  // neither has products of warpgroups
        for (const Shape& s : {kReal, kThree})
            for (const int rows : {1, 63, 64, 65, 200, 1000}) check_variants(s, {70, rows, 3});
        // More units of `prepare` than run at once: the scan begins beside it, on SMs that it leaves if there are enough.
        check_variants(kWide, {2000});
        check_variants(kWide, {1000, 900});
        check_variants(kWide, {1500, 0, 3});
    }
}

DEVICE_TEST_CASE("conv_gated_delta_net: an answer's row alone or beside others, the same bits", delta_alone)
DEVICE_TEST_CASE("conv_gated_delta_net: a prompt's rows cut or whole, alone or not, the same bits",
                 delta_prompts)
DEVICE_TEST_CASE("conv_gated_delta_net: heads of other sizes, the same bits", delta_shapes)
DEVICE_TEST_CASE("conv_gated_delta_net: a prompt beside rows that are no numbers, the same bits",
                 delta_no_numbers)

TEST_SUITE("cpu") {
    TEST_CASE("conv_gated_delta_net: any cut and any ring give the same bits") {
        const Device device = cpu_device();
        check_alone(device, kReal, {{3, 1, 4}, {1, 1, 1}, {2, 0, 5}});
        const auto p = Random(72).normals(33 * kSmall.columns());
        Memory whole(device, kSmall);
        const auto at_once = run_step(device, {.rows = {33}, .before = {0}, .slots = {2}}, p, whole);
        for (const int64_t spare : {0, 1, 2, 13, 60}) {
            Memory parts(device, kSmall, false, spare);
            for (auto [begin, rows] : {std::pair{0, 1}, {1, 7}, {8, 2}, {10, 23}}) {
                const auto y = run_step(device, {.rows = {rows}, .before = {begin}, .slots = {0}},
                                        rows_of(p, kSmall.columns(), begin, rows), parts);
                CHECK(y == rows_of(at_once, kSmall.out(), begin, rows));
            }
        }
        const Device single = cpu_device(1);
        Memory one(single, kSmall);
        CHECK(run_step(single, {.rows = {33}, .before = {0}, .slots = {2}}, p, one) == at_once);
    }
}
