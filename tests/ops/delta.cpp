// conv_gated_delta_net against the convolution and the recurrence in double precision.
#include <algorithm>

#include "ggml-like/error.h"
#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;
constexpr int64_t kTaps = 4, kSlots = 4, kJournal = 5;

struct Shape {
    int nk, nv, dk, dv;

    int64_t channels() const { return 2 * nk * int64_t{dk} + nv * int64_t{dv}; }
    /// u, a, b, z; rows begin at multiples of 16 bytes, as they do in a model.
    int64_t columns() const { return (channels() + 2 * nv + out() + 7) / 8 * 8; }
    int64_t out() const { return nv * int64_t{dv}; }
    ConvGatedDeltaNetParams params() const { return {nk, nv, dk, dv, kEps}; }
};

constexpr Shape kSmall{2, 4, 8, 6};
constexpr Shape kReal{2, 4, 128, 128};
constexpr Shape kThree{2, 6, 128, 128};  // the 27B's three value heads a key head

/// Rows of the convolution's ring: the least that will do.
constexpr int64_t ring_rows(bool journal) { return kTaps - 1 + (journal ? kJournal : 1); }

constexpr StepKind kKinds[] = {StepKind::prompt, StepKind::answer};

/// Weights and states; the journal only if asked for.
struct Memory {
    Shape shape;
    bool journal;
    int64_t ring;
    Guarded conv, rate, bias, norm, inputs, delta, jk, ju, jg;

    Memory(const Device& d, const Shape& s, bool with_journal = false, int64_t spare = 0,
           int64_t slots = kSlots)
        : shape(s),
          journal(with_journal),
          ring(ring_rows(with_journal) + spare),
          conv(d, "conv", DType::F32, Place::weight, {s.channels(), kTaps}),
          rate(d, "rate", DType::F32, Place::weight, {s.nv}),
          bias(d, "bias", DType::F32, Place::weight, {s.nv}),
          norm(d, "norm", DType::F32, Place::weight, {s.dv}),
          inputs(d, "ring", d.activation, Place::state, {slots, ring, s.channels()}),
          delta(d, "S", DType::F32, Place::state, {slots, s.nv, s.dv, s.dk}),
          jk(d, "jk", DType::F32, Place::state, {slots, kJournal, s.nk, s.dk}),
          ju(d, "ju", DType::F32, Place::state, {slots, kJournal, s.nv, s.dv}),
          jg(d, "jg", DType::F32, Place::state, {slots, kJournal, s.nv, 1}) {
        for (Guarded* state : {&inputs, &delta, &jk, &ju, &jg})
            state->fill(1e3f);  // whatever was there before must not shine through
        auto taps = Random(70).normals(s.channels() * kTaps);
        for (float& w : taps) w *= 0.7f;
        conv.set(taps);
        std::vector<float> rates;
        for (int i = 0; i < s.nv; ++i) rates.push_back(-0.2f * static_cast<float>(i + 1));
        rate.set(rates);
        bias.fill(0.3f);
        norm.set(Random(76).normals(s.dv));
    }
};

/// One step over rows p [tokens, columns].
std::vector<double> run_step(const Device& device, const Layout& l, const std::vector<float>& p, Memory& m) {
    const Shape& s = m.shape;
    Graph g;
    const Batch batch = declare_batch(g, l);
    Tensor* in = g.input("p", device.activation, {l.tokens(), s.columns()});
    DeltaState state{.conv = g.external(m.inputs.tensor()), .delta = g.external(m.delta.tensor())};
    if (m.journal) {
        state.journal_k = g.external(m.jk.tensor());
        state.journal_u = g.external(m.ju.tensor());
        state.journal_g = g.external(m.jg.tensor());
    }
    g.output(conv_gated_delta_net(
        g, "d",
        {.u = g.columns("u", in, 0, s.channels()),
         .a = g.columns("a", in, s.channels(), s.nv),
         .b = g.columns("b", in, s.channels() + s.nv, s.nv),
         .conv = g.external(m.conv.tensor()),
         .decay_rate = g.external(m.rate.tensor()),
         .dt_bias = g.external(m.bias.tensor()),
         .z = g.view("z", in, s.channels() + 2 * s.nv, {l.tokens(), s.nv, s.dv}, {s.columns(), s.dv, 1}),
         .norm = g.external(m.norm.tensor())},
        state, batch, s.params()));
    return run_graph(device, std::move(g), [&](Plan& plan) {
        fill_batch(plan, batch, l);
        set_input(plan, in, p);
    })[0];
}

struct Reference {
    std::vector<double> out, state;  // y of every row; S[v][k] of every head after the last
};

/// silu of the convolution, in double.
std::vector<double> convolved(const std::vector<float>& p, Memory& m, int64_t rows) {
    const Shape& s = m.shape;
    const auto w = m.conv.values();
    std::vector<double> x;
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t c = 0; c < s.channels(); ++c) {
            double sum = 0;
            for (int64_t j = 0; j < kTaps; ++j)
                if (const int64_t from = t - (kTaps - 1) + j; from >= 0)
                    sum += w[static_cast<size_t>(c * kTaps + j)] *
                           static_cast<double>(p[static_cast<size_t>(from * s.columns() + c)]);
            x.push_back(sum / (1 + std::exp(-sum)));
        }
    return x;
}

std::vector<double> normalized(const double* x, int64_t n) {
    double sum = 1e-6;
    for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
    std::vector<double> y;
    for (int64_t i = 0; i < n; ++i) y.push_back(x[i] / std::sqrt(sum));
    return y;
}

/// o of one head becomes y.
void norm_and_gate(double* o, const float* z, Memory& m) {
    const auto norm = m.norm.values();
    double sum = 0;
    for (size_t v = 0; v < norm.size(); ++v) sum += o[v] * o[v];
    const double r = 1 / std::sqrt(sum / static_cast<double>(norm.size()) + double{kEps});
    for (size_t v = 0; v < norm.size(); ++v) {
        const double gate = z[v];
        o[v] *= r * norm[v] * gate / (1 + std::exp(-gate));
    }
}

/// One value head of a sequence: the recurrence as the paper has it.
void reference_head(const std::vector<float>& p, const std::vector<double>& x, Memory& m, int64_t head,
                    int64_t rows, Reference& r) {
    const Shape& s = m.shape;
    const double rate = m.rate.values()[static_cast<size_t>(head)],
                 bias = m.bias.values()[static_cast<size_t>(head)];
    const int64_t key_head = head / (s.nv / s.nk), keys = s.nk * int64_t{s.dk};
    double* state = r.state.data() + head * s.dv * s.dk;
    for (int64_t t = 0; t < rows; ++t) {
        const double* row = x.data() + t * s.channels();
        const float* gates = p.data() + t * s.columns() + s.channels();
        const auto q = normalized(row + key_head * s.dk, s.dk),
                   k = normalized(row + keys + key_head * s.dk, s.dk);
        const double alpha = std::exp(rate * std::log1p(std::exp(gates[head] + bias)));
        const double beta = 1 / (1 + std::exp(-static_cast<double>(gates[s.nv + head])));
        for (int64_t v = 0; v < s.dv; ++v) {
            double* to = state + v * s.dk;
            double predicted = 0, o = 0;
            for (int64_t i = 0; i < s.dk; ++i) predicted += (to[i] *= alpha) * k[static_cast<size_t>(i)];
            const double u = beta * (row[2 * keys + head * s.dv + v] - predicted);
            for (int64_t i = 0; i < s.dk; ++i) {
                to[i] += u * k[static_cast<size_t>(i)];
                o += to[i] * q[static_cast<size_t>(i)];
            }
            r.out[static_cast<size_t>(t * s.out() + head * s.dv + v)] =
                o / std::sqrt(static_cast<double>(s.dk));
        }
        norm_and_gate(r.out.data() + t * s.out() + head * s.dv, gates + 2 * s.nv + head * s.dv, m);
    }
}

Reference reference(const std::vector<float>& p, Memory& m) {
    const Shape& s = m.shape;
    const int64_t rows = static_cast<int64_t>(p.size()) / s.columns();
    Reference r;
    r.out.resize(static_cast<size_t>(rows * s.out()));
    r.state.resize(static_cast<size_t>(s.nv * int64_t{s.dv} * s.dk));
    const auto x = convolved(p, m, rows);
    for (int64_t head = 0; head < s.nv; ++head) reference_head(p, x, m, head, rows, r);
    return r;
}

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
    CAPTURE(static_cast<int>(kind));
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
    CAPTURE(static_cast<int>(kind));
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

/// Everything that a slot keeps.
std::vector<double> state_of(Memory& m, int64_t slot) {
    const Shape& s = m.shape;
    auto all = rows_of(m.delta.values(), s.nv * int64_t{s.dv} * s.dk, slot, 1);
    const auto ring = rows_of(m.inputs.values(), m.ring * s.channels(), slot, 1);
    all.insert(all.end(), ring.begin(), ring.end());
    return all;
}

Layout layout_of(StepKind kind, const std::vector<int>& rows, const std::vector<int>& before,
                 const std::vector<int>& slots) {
    const std::vector<int> zeros(rows.size(), 0);
    return {
        .rows = rows, .before = before, .slots = slots, .committed = zeros, .journal = zeros, .kind = kind};
}

/// Answer rows of several sequences at once, or every row in a step of its own: the same bits. `spare` rows
/// of the ring: without them a step overwrites what it reads.
void check_alone(const Device& device, const Shape& s, const std::vector<std::vector<int>>& steps,
                 int64_t spare = 0) {
    CAPTURE(s.dk);
    CAPTURE(spare);
    const auto sequences = static_cast<int>(steps[0].size());
    Memory together(device, s, false, spare, sequences), alone(device, s, false, spare, sequences);
    std::vector<int> before(steps[0].size(), 0), slots;
    for (int i = 0; i < sequences; ++i) slots.push_back((i + 1) % sequences);
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

/// Heads of any size up to 256.
void delta_shapes(Device& device) {
    for (const Shape& s : {kSmall, Shape{1, 4, 32, 16}, Shape{2, 6, 16, 24}, Shape{2, 2, 5, 7},
                           Shape{1, 2, 64, 128}, Shape{1, 1, 256, 200}}) {
        check_steps(device, s, {1, 1, 2, 7, 22});
        check_steps(device, s, {5, 1, 1, 1, 9}, 5);
        check_together(device, s, {{8, 0, 25}, {1, 70, 2}});
        check_alone(device, s, {{3, 1, 4}, {1, 1, 1}, {2, 0, 5}});
        check_prompt(device, s, 130);
    }
}

void delta_together(Device& device) {
    for (const StepKind kind : kKinds)
        for (const Shape& s : {kReal, kThree})
            check_together(device, s, {{8, 0, 25}, {1, 70, 2}, {1, 1, 1}, {0, 129, 64}}, kind);
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
}

void delta_prompts(Device& device) {
    for (const Shape& s : {kReal, kThree})
        for (const int rows : {1, 2, 63, 64, 65, 130}) check_prompt(device, s, rows);
    check_prompt(device, kReal, 1000);
    if (!device.exact()) check_prompt(device, kReal, 5000);
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

/// Drafts: a step journals m rows, of which the next commits n; that one journals as well, and a last one
/// does not.
void check_journal(const Device& device, const Shape& s, int m, int n, int64_t spare) {
    CAPTURE(s.dk);
    CAPTURE(m);
    CAPTURE(n);
    CAPTURE(spare);
    constexpr int kBefore = 3, kAfter = 2;
    const int second = kJournal - m + 1, kept = second / 2;
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
/// rows that come one by one. A prompt's rows may follow.
void check_journal_bits(const Device& device, const Shape& s) {
    CAPTURE(s.dk);
    Memory drafts(device, s, true), plain(device, s, true);
    int position = 0, waiting = 0, other = 0;
    unsigned seed = 300;
    const auto pass = [&](Memory& m, int64_t slot) {
        return rows_of(m.delta.values(), s.nv * int64_t{s.dv} * s.dk, slot, 1);
    };
    const auto alone = [&](const std::vector<float>& row, int at, int slot) {
        return run_step(device, layout_of(StepKind::answer, {1}, {at}, {slot}), row, plain);
    };
    for (const auto& [rows, good] : {std::pair{5, 3}, {4, 0}, {5, 5}, {1, 1}, {3, 2}}) {
        CAPTURE(position);
        CAPTURE(rows);
        Layout l = layout_of(StepKind::answer, {rows, 0, 2}, {position, 9, other}, {1, 0, 3});
        l.committed[0] = waiting, l.journal[0] = 1;
        const auto p = device.rounded(Random(seed++).normals((rows + 2) * s.columns()));
        const auto y = run_step(device, l, p, drafts);
        CHECK(pass(drafts, 1) ==
              (position > 0 ? pass(plain, 1) : std::vector<double>(pass(plain, 1).size(), 0.0)));
        for (int r = 0; r < good; ++r)
            CHECK(alone(rows_of(p, s.columns(), r, 1), position + r, 1) == rows_of(y, s.out(), r, 1));
        for (int r = 0; r < 2; ++r)
            CHECK(alone(rows_of(p, s.columns(), rows + r, 1), other + r, 3) ==
                  rows_of(y, s.out(), rows + r, 1));
        position += good, waiting = good, other += 2;
    }
    for (const StepKind kind : kKinds) {
        Layout l = layout_of(kind, {2}, {position}, {1});
        const auto p = device.rounded(Random(seed++).normals(2 * s.columns()));
        const auto want = run_step(device, l, p, plain);
        l.committed[0] = waiting;
        CHECK(run_step(device, l, p, drafts) == want);
        CHECK(pass(drafts, 1) == pass(plain, 1));
        CHECK(pass(drafts, 3) == pass(plain, 3));
        position += 2, waiting = 0;
    }
}

void delta_journal(Device& device) {
    for (const Shape& s : {kSmall, kReal, kThree})
        for (int m = 1; m <= kJournal; ++m)
            for (int n = 0; n <= m; ++n)
                for (const int64_t spare : {0, 4})
                    if (s.dk == kSmall.dk || m % 2 == 1) check_journal(device, s, m, n, spare);
    for (const Shape& s : {kSmall, kReal, kThree}) check_journal_bits(device, s);
}

}  // namespace

DEVICE_TEST_CASE("conv_gated_delta_net: one sequence in steps", delta_steps)
DEVICE_TEST_CASE("conv_gated_delta_net: rows at once or one by one, the same state", delta_state)
DEVICE_TEST_CASE("conv_gated_delta_net: several sequences and padding", delta_together)
DEVICE_TEST_CASE("conv_gated_delta_net: an answer's row alone or beside others, the same bits", delta_alone)
DEVICE_TEST_CASE("conv_gated_delta_net: a prompt's rows cut or whole, alone or not, the same bits",
                 delta_prompts)
DEVICE_TEST_CASE("conv_gated_delta_net: any n of m journaled rows may be committed", delta_journal)
DEVICE_TEST_CASE("conv_gated_delta_net: heads of other sizes", delta_shapes)

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

    TEST_CASE("conv_gated_delta_net: more than the journal holds is an error") {
        const Device device = cpu_device();
        const auto p = Random(74).normals(6 * kSmall.columns());
        Memory with(device, kSmall, true), without(device, kSmall);
        const auto two = rows_of(p, kSmall.columns(), 0, 2);
        CHECK_THROWS_AS(
            run_step(device, {.rows = {2}, .before = {3}, .slots = {1}, .committed = {6}}, two, with), Error);
        CHECK_THROWS_AS(run_step(device, {.rows = {6}, .before = {3}, .slots = {1}, .journal = {1}}, p, with),
                        Error);
        CHECK_THROWS_AS(
            run_step(device, {.rows = {2}, .before = {3}, .slots = {1}, .journal = {1}}, two, without),
            Error);
    }

    TEST_CASE("conv_gated_delta_net: states that do not fit are errors") {
        const Device device = cpu_device();
        const auto p = Random(75).normals(kSmall.columns());
        for (const bool journal : {false, true}) {
            Memory m(device, kSmall, journal, -1);
            CHECK_THROWS_AS(run_step(device, {.rows = {1}, .before = {0}, .slots = {1}}, p, m), Error);
        }
    }
}
