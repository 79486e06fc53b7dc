// A layer of the gated delta rule: random weights, its states on a device, one step of the op, and the convolution
// and the recurrence in double precision.
#pragma once

#include <algorithm>

#include "ggml-like/ops/conv_gated_delta_net.h"
#include "ops/step_rows.h"

namespace quern::test::delta {

inline constexpr float kEps = 1e-6f;
inline constexpr int64_t kTaps = 4, kSlots = 4, kJournal = kMaxJournalEntries;

struct Shape {
    int nk, nv, dk, dv;

    int64_t channels() const { return 2 * nk * int64_t{dk} + nv * int64_t{dv}; }
    /// u, a, b, z; rows begin at multiples of 16 bytes, as they do in a model.
    int64_t columns() const { return (channels() + 2 * nv + out() + 7) / 8 * 8; }
    int64_t out() const { return nv * int64_t{dv}; }
    ConvGatedDeltaNetParams params() const { return {nk, nv, dk, dv, kEps}; }
};

inline constexpr Shape kSmall{2, 4, 8, 6};
inline constexpr Shape kReal{2, 4, 128, 128};
inline constexpr Shape kWide{16, 32, 128, 128};  // the 35B's
inline constexpr Shape kThree{2, 6, 128, 128};   // the 27B's three value heads a key head

/// Heads that no model has: any size up to 256 works.
inline constexpr Shape kOtherShapes[] = {kSmall,       {1, 4, 32, 16},  {2, 6, 16, 24},
                                         {2, 2, 5, 7}, {1, 2, 64, 128}, {1, 1, 256, 200}};

/// Rows of the convolution's ring: the least that will do.
inline constexpr int64_t ring_rows(bool journal) { return kTaps - 1 + (journal ? kJournal : 1); }

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

inline bool journals(const Layout& l) {
    return std::any_of(l.journal.begin(), l.journal.end(), [](int row) { return row != 0; });
}

/// One step over rows p [tokens, columns]. drafts: as in ConvGatedDeltaNetParams.
inline std::vector<double> run_step(const Device& device, const Layout& l, const std::vector<float>& p,
                                    Memory& m, bool drafts) {
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
    ConvGatedDeltaNetParams params = s.params();
    params.drafts = drafts;
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
        state, batch, params));
    return run_graph(device, std::move(g), [&](Plan& plan) {
        fill_batch(plan, batch, l);
        set_input(plan, in, p);
    })[0];
}

inline std::vector<double> run_step(const Device& device, const Layout& l, const std::vector<float>& p,
                                    Memory& m) {
    return run_step(device, l, p, m, journals(l));
}

inline Layout layout_of(StepKind kind, const std::vector<int>& rows, const std::vector<int>& before,
                        const std::vector<int>& slots) {
    const std::vector<int> zeros(rows.size(), 0);
    return {
        .rows = rows, .before = before, .slots = slots, .committed = zeros, .journal = zeros, .kind = kind};
}

struct Reference {
    std::vector<double> out, state;  // y of every row; S[v][k] of every head after the last
};

/// silu of the convolution, in double.
inline std::vector<double> convolved(const std::vector<float>& p, Memory& m, int64_t rows) {
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

inline std::vector<double> normalized(const double* x, int64_t n) {
    double sum = 1e-6;
    for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
    std::vector<double> y;
    for (int64_t i = 0; i < n; ++i) y.push_back(x[i] / std::sqrt(sum));
    return y;
}

/// o of one head becomes y.
inline void norm_and_gate(double* o, const float* z, Memory& m) {
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
inline void reference_head(const std::vector<float>& p, const std::vector<double>& x, Memory& m, int64_t head,
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

inline Reference reference(const std::vector<float>& p, Memory& m) {
    const Shape& s = m.shape;
    const int64_t rows = static_cast<int64_t>(p.size()) / s.columns();
    Reference r;
    r.out.resize(static_cast<size_t>(rows * s.out()));
    r.state.resize(static_cast<size_t>(s.nv * int64_t{s.dv} * s.dk));
    const auto x = convolved(p, m, rows);
    for (int64_t head = 0; head < s.nv; ++head) reference_head(p, x, m, head, rows, r);
    return r;
}

}  // namespace quern::test::delta
