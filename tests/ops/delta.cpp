// conv_gated_delta_net against the convolution and the recurrence in double precision.
#include "ggml-like/error.h"
#include "ops/delta_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::delta;

namespace {

/// States of a slot after a sequence: S as the recurrence left it, the ring full of the last inputs.
void check_state(const Device& device, Memory& m, int64_t slot, const std::vector<float>& p,
                 const Reference& r) {
    const Shape& s = m.shape;
    const int64_t elements = s.nv * int64_t{s.dv} * s.dk, rows = static_cast<int64_t>(p.size()) / s.columns();
    CHECK(relative_error(rows_of(m.delta.values(), elements, slot, 1), r.state) < device.bound(1e-5));
    const auto ring = rows_of(m.inputs.values(), m.ring * s.channels(), slot, 1);
    for (int64_t t = std::max<int64_t>(0, rows - m.ring); t < rows; ++t) {
        CAPTURE(t);
        const auto input = p.begin() + t * s.columns();
        CHECK(rows_of(ring, s.channels(), t % m.ring, 1) == std::vector<double>(input, input + s.channels()));
    }
}

/// One sequence in steps of these many rows.
void check_steps(const Device& device, const Shape& s, const std::vector<int>& steps, int64_t spare = 0,
                 StepKind kind = StepKind::prompt) {
    CAPTURE(kind_name(kind));
    CAPTURE(s.dk);
    CAPTURE(s.dv);
    CAPTURE(steps[0]);
    CAPTURE(spare);
    Memory m(device, s, false, spare);
    int64_t total = 0;
    for (const int rows : steps) total += rows;
    const auto p = device.rounded(Random(71).normals(total * s.columns()));
    const Reference r = reference(p, m);
    int before = 0;
    for (const int rows : steps) {
        CAPTURE(before);
        CAPTURE(rows);
        const auto y = run_step(device, {.rows = {rows}, .before = {before}, .slots = {2}, .kind = kind},
                                rows_of(p, s.columns(), before, rows), m);
        CHECK(relative_error(y, rows_of(r.out, s.out(), before, rows)) < device.bound(4e-6));
        before += rows;
    }
    check_state(device, m, 2, p, r);
}

/// Several sequences, one of them empty, padding behind them; other slots stay as they are.
void check_together(const Device& device, const Shape& s, const std::vector<std::vector<int>>& steps,
                    StepKind kind = StepKind::prompt) {
    CAPTURE(kind_name(kind));
    CAPTURE(s.dk);
    Memory m(device, s);
    std::vector<int> before(3, 0), slots = {1, 0, 3};
    std::vector<std::vector<float>> p;
    std::vector<Reference> r;
    for (size_t i = 0; i < 3; ++i) {
        int64_t total = 0;
        for (const auto& rows : steps) total += rows[i];
        p.push_back(device.rounded(Random(80 + static_cast<unsigned>(i)).normals(total * s.columns())));
        r.push_back(reference(p.back(), m));
    }
    for (const auto& rows : steps) {
        const Layout l{.rows = rows, .before = before, .slots = slots, .padding = 2, .kind = kind};
        std::vector<float> step;
        std::vector<double> want;
        for (size_t i = 0; i < 3; ++i) {
            const auto in = rows_of(p[i], s.columns(), before[i], rows[i]);
            const auto out = rows_of(r[i].out, s.out(), before[i], rows[i]);
            step.insert(step.end(), in.begin(), in.end());
            want.insert(want.end(), out.begin(), out.end());
            before[i] += rows[i];
        }
        step.resize(static_cast<size_t>(l.tokens() * s.columns()), 0.0f);
        auto y = run_step(device, l, step, m);
        y.resize(want.size());
        CHECK(relative_error(y, want) < device.bound(4e-6));
    }
    for (size_t i = 0; i < 3; ++i) check_state(device, m, slots[i], p[i], r[i]);
    const auto untouched = rows_of(m.delta.values(), s.nv * int64_t{s.dv} * s.dk, 2, 1);
    CHECK(untouched == std::vector<double>(untouched.size(), 1e3));
}

void delta_steps(Device& device) {
    for (const StepKind kind : kKinds) {
        check_steps(device, kReal, {1, 3, 200}, 0, kind);
        check_steps(device, kReal, {200, 1, 3}, 0, kind);
        check_steps(device, kReal, {1, 2, 7, 8, 9, 33, 64, 130}, 0, kind);
        check_steps(device, kReal, {2}, 0, kind);  // shorter than the window
        check_steps(device, kReal, {1, 3, 70, 1, 1, 1, 1, 1, 1}, 3, kind);
        check_steps(device, {1, 1, 128, 128}, {64, 17}, 0, kind);
        check_steps(device, kThree, {1, 3, 130, 1, 1}, 3, kind);
    }
}

void delta_shapes(Device& device) {
    for (const Shape& s : kOtherShapes) {
        check_steps(device, s, {1, 1, 2, 7, 22});
        check_steps(device, s, {5, 1, 1, 1, 9}, 5);
        check_together(device, s, {{8, 0, 25}, {1, 70, 2}});
    }
}

void delta_together(Device& device) {
    for (const StepKind kind : kKinds)
        for (const Shape& s : {kReal, kThree})
            check_together(device, s, {{8, 0, 25}, {1, 70, 2}, {1, 1, 1}, {0, 129, 64}}, kind);
}

/// Many rows at once leave the state that they leave one by one, also where it hardly decays. Both round x
/// alike, so this sees what the bound to the reference, as wide as that rounding, hides.
void delta_state(Device& device) {
    constexpr int kRows = 400;
    for (const float rate : {-0.2f, -0.001f}) {
        CAPTURE(rate);
        Memory chunks(device, kReal), steps(device, kReal);
        const auto p = device.rounded(Random(77).normals(kRows * kReal.columns()));
        for (Memory* m : {&chunks, &steps})
            m->rate.set(std::vector<float>(static_cast<size_t>(kReal.nv), rate));
        run_step(device, {.rows = {kRows}, .before = {0}, .slots = {0}}, p, chunks);
        for (int t = 0; t < kRows; ++t)
            run_step(device, {.rows = {1}, .before = {t}, .slots = {0}, .kind = StepKind::answer},
                     rows_of(p, kReal.columns(), t, 1), steps);
        const int64_t elements = kReal.nv * int64_t{kReal.dv} * kReal.dk;
        CHECK(relative_error(rows_of(chunks.delta.values(), elements, 0, 1),
                             rows_of(steps.delta.values(), elements, 0, 1)) < 1e-4);
    }
}

}  // namespace

DEVICE_TEST_CASE("conv_gated_delta_net: one sequence in steps", delta_steps)
DEVICE_TEST_CASE("conv_gated_delta_net: rows at once or one by one, the same state", delta_state)
DEVICE_TEST_CASE("conv_gated_delta_net: several sequences and padding", delta_together)
DEVICE_TEST_CASE("conv_gated_delta_net: heads of other sizes", delta_shapes)

TEST_SUITE("cpu") {
    TEST_CASE("conv_gated_delta_net: states that do not fit are errors") {
        const Device device = cpu_device();
        const auto p = Random(75).normals(kSmall.columns());
        for (const bool journal : {false, true}) {
            Memory m(device, kSmall, journal, -1);
            CHECK_THROWS_AS(run_step(device, {.rows = {1}, .before = {0}, .slots = {1}}, p, m), Error);
        }
    }
}
