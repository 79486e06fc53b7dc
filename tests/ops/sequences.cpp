// Ops that look back in their sequence: kv_write + attention, conv_silu, gated_delta_net, against double
// precision.
#include "ggml-like/error.h"
#include "ggml-like/ops/attention.h"
#include "ggml-like/ops/conv_silu.h"
#include "ggml-like/ops/gated_delta_net.h"
#include "ggml-like/ops/kv_write.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// Attention of whole sequences in one step; lengths around page borders, pages out of order.
void check_attention(int64_t heads, int64_t kv_heads, int64_t width, DType cache_type, double bound) {
    const Layout l{.rows = {1, 65, 130}, .before = {0, 0, 0}, .slots = {0, 1, 2}, .pages_each = 3};
    const int64_t tokens = l.tokens(), group = heads / kv_heads;
    Random random(21);
    const auto q = random.normals(tokens * heads * width), gate = random.normals(tokens * heads * width);
    const auto k = random.normals(tokens * kv_heads * width), v = random.normals(tokens * kv_heads * width);
    Guarded k_cache("k", cache_type, Place::state, {9, kv_heads, 64, width});
    Guarded v_cache("v", cache_type, Place::state, {9, kv_heads, 64, width});
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor *tq = g.input("q", DType::F32, {tokens, heads, width}),
           *tg = g.input("g", DType::F32, {tokens, heads, width});
    Tensor *tk = g.input("k", DType::F32, {tokens, kv_heads, width}),
           *tv = g.input("v", DType::F32, {tokens, kv_heads, width});
    Tensor *kc = g.external(k_cache.tensor()), *vc = g.external(v_cache.tensor());
    kv_write(g, "w", tk, tv, kc, vc, b);
    g.output(attention(g, "a", tq, tg, kc, vc, b));
    const auto out = run_graph(std::move(g), [&](Plan& p) {
        fill_batch(p, b, l);
        set_input(p, tq, q);
        set_input(p, tg, gate);
        set_input(p, tk, k);
        set_input(p, tv, v);
    });
    std::vector<double> expected;
    int64_t begin = 0;
    for (int rows : l.rows) {
        for (int64_t t = begin; t < begin + rows; ++t)
            for (int64_t h = 0; h < heads; ++h) {
                const auto at = [&](const std::vector<float>& x, int64_t row, int64_t i) {
                    return static_cast<double>(
                        x[static_cast<size_t>((row * kv_heads + h / group) * width + i)]);
                };
                std::vector<double> p;
                double sum = 0;
                for (int64_t s = begin; s <= t; ++s) {
                    double score = 0;
                    for (int64_t i = 0; i < width; ++i)
                        score += q[static_cast<size_t>((t * heads + h) * width + i)] * at(k, s, i);
                    p.push_back(std::exp(score / std::sqrt(static_cast<double>(width))));
                    sum += p.back();
                }
                for (int64_t i = 0; i < width; ++i) {
                    double y = 0;
                    for (int64_t s = begin; s <= t; ++s)
                        y += p[static_cast<size_t>(s - begin)] / sum * at(v, s, i);
                    expected.push_back(y * sigmoid(gate[static_cast<size_t>((t * heads + h) * width + i)]));
                }
            }
        begin += rows;
    }
    CHECK(relative_error(out[0], expected) < bound);
}

/// One step of conv_silu over `u` [rows, C].
std::vector<double> run_conv(const Layout& l, const std::vector<float>& u, Guarded& w, Guarded& state,
                             int64_t channels) {
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor* wide = g.input("u", DType::F32, {l.tokens(), channels + 3});
    Tensor* tu = g.columns("cols", wide, 2, channels);
    g.output(conv_silu(g, "c", tu, g.external(w.tensor()), g.external(state.tensor()), b));
    return run_graph(std::move(g), [&](Plan& p) {
        fill_batch(p, b, l);
        std::vector<float> padded(static_cast<size_t>(l.tokens() * (channels + 3)), 99.0f);
        for (int64_t t = 0; t < l.tokens(); ++t)
            std::copy_n(u.data() + t * channels, channels, padded.data() + t * (channels + 3) + 2);
        set_input(p, wide, padded);
    })[0];
}

constexpr GatedDeltaNetParams kDelta{.key_heads = 2, .value_heads = 4, .key_dim = 8, .value_dim = 6};
constexpr int64_t kDeltaColumns = 2 * 2 * 8 + 4 * 6;

struct DeltaInputs {
    std::vector<float> qkv, a, b;
    DeltaInputs rows(int64_t begin, int64_t count) const {
        const auto cut = [&](const std::vector<float>& v, int64_t width) {
            return std::vector<float>(v.begin() + begin * width, v.begin() + (begin + count) * width);
        };
        return {cut(qkv, kDeltaColumns), cut(a, 4), cut(b, 4)};
    }
};

struct DeltaMemory {
    Guarded rate{"rate", DType::F32, Place::weight, {4}}, bias{"bias", DType::F32, Place::weight, {4}};
    Guarded state{"S", DType::F32, Place::state, {3, 4, 6, 8}};
    Guarded jk{"jk", DType::F32, Place::state, {3, 5, 2, 8}},
        ju{"ju", DType::F32, Place::state, {3, 5, 4, 6}}, jg{"jg", DType::F32, Place::state, {3, 5, 4, 1}};
    DeltaMemory() {
        for (int i = 0; i < 4; ++i) rate.data()[i] = -0.2f * static_cast<float>(i + 1), bias.data()[i] = 0.3f;
        for (Guarded* s : {&state, &jk, &ju, &jg})  // whatever was there before must not shine through
            for (int64_t i = 0; i < s->tensor().elements(); ++i) s->data()[i] = 1e3f;
    }
};

std::vector<double> run_delta(const Layout& l, const DeltaInputs& in, DeltaMemory& m, int threads = 2) {
    Graph g;
    const Batch batch = declare_batch(g, l);
    const int64_t tokens = l.tokens();
    Tensor* qkv = g.input("qkv", DType::F32, {tokens, kDeltaColumns});
    Tensor *a = g.input("a", DType::F32, {tokens, 4}), *b = g.input("b", DType::F32, {tokens, 4});
    const DeltaState state{g.external(m.state.tensor()), g.external(m.jk.tensor()), g.external(m.ju.tensor()),
                           g.external(m.jg.tensor())};
    g.output(gated_delta_net(g, "d", qkv, a, b, g.external(m.rate.tensor()), g.external(m.bias.tensor()),
                             state, batch, kDelta));
    return run_graph(
        std::move(g),
        [&](Plan& p) {
            fill_batch(p, batch, l);
            set_input(p, qkv, in.qkv);
            set_input(p, a, in.a);
            set_input(p, b, in.b);
        },
        threads)[0];
}

/// The recurrence as it is written in the paper, in double: state [nv][dk][dv].
std::vector<double> delta_reference(const DeltaInputs& in, int64_t tokens, const DeltaMemory& m) {
    const auto rate = m.rate.values(), bias = m.bias.values();
    std::vector<double> out(static_cast<size_t>(tokens * 4 * 6));
    for (int j = 0; j < 4; ++j) {
        double s[8][6] = {};
        for (int64_t t = 0; t < tokens; ++t) {
            const float* row = in.qkv.data() + t * kDeltaColumns;
            double q[8], k[8], qq = 1e-6, kk = 1e-6;
            for (int i = 0; i < 8; ++i) {
                q[i] = row[j / 2 * 8 + i], k[i] = row[16 + j / 2 * 8 + i];
                qq += q[i] * q[i], kk += k[i] * k[i];
            }
            const double at = in.a[static_cast<size_t>(t * 4 + j)] + bias[static_cast<size_t>(j)];
            const double alpha = std::exp(rate[static_cast<size_t>(j)] * std::log1p(std::exp(at)));
            const double beta = sigmoid(in.b[static_cast<size_t>(t * 4 + j)]);
            for (int v = 0; v < 6; ++v) {
                double predicted = 0, o = 0;
                for (int i = 0; i < 8; ++i) predicted += (s[i][v] *= alpha) * k[i] / std::sqrt(kk);
                const double u = beta * (row[32 + j * 6 + v] - predicted);
                for (int i = 0; i < 8; ++i) {
                    s[i][v] += k[i] / std::sqrt(kk) * u;
                    o += s[i][v] * q[i] / std::sqrt(qq) / std::sqrt(8.0);
                }
                out[static_cast<size_t>((t * 4 + j) * 6 + v)] = o;
            }
        }
    }
    return out;
}

DeltaInputs delta_inputs(int64_t tokens, unsigned seed) {
    Random random(seed);
    return {random.normals(tokens * kDeltaColumns), random.normals(tokens * 4), random.normals(tokens * 4)};
}

TEST_SUITE("cpu") {
    TEST_CASE("attention: grouped heads, page borders, cache types") {
        check_attention(4, 2, 16, DType::F32, 2e-6);
        check_attention(2, 2, 33, DType::F32, 2e-6);
        check_attention(8, 1, 64, DType::F32, 2e-6);
        check_attention(4, 2, 16, DType::BF16, 8e-3);
        check_attention(4, 2, 16, DType::F16, 1e-3);
    }

    TEST_CASE("conv_silu: fresh and continued sequences, any cut") {
        const int64_t channels = 300, taps = 4, tokens = 11;
        Random random(4);
        const auto u = random.normals(tokens * channels);
        Guarded w("w", DType::F32, Place::weight, {channels, taps});
        for (int64_t i = 0; i < channels * taps; ++i) w.data()[i] = random.normal();
        std::vector<double> expected;
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t c = 0; c < channels; ++c) {
                double sum = 0;
                for (int64_t j = 0; j < taps; ++j)
                    if (t - 3 + j >= 0)
                        sum += static_cast<double>(w.data()[c * taps + j]) *
                               u[static_cast<size_t>((t - 3 + j) * channels + c)];
                expected.push_back(sum * sigmoid(sum));
            }
        for (const std::vector<int>& cuts : {std::vector<int>{11}, {1, 1, 1, 8}, {2, 9}, {7, 4}}) {
            Guarded state("s", DType::F32, Place::state, {2, 3, channels});
            for (int64_t i = 0; i < 2 * 3 * channels; ++i) state.data()[i] = 1e6f;
            std::vector<double> got;
            int done = 0;
            for (int rows : cuts) {
                const std::vector<float> part(u.begin() + done * channels,
                                              u.begin() + (done + rows) * channels);
                const auto y =
                    run_conv({.rows = {rows}, .before = {done}, .slots = {1}}, part, w, state, channels);
                got.insert(got.end(), y.begin(), y.end());
                done += rows;
            }
            CHECK(relative_error(got, expected) < 1e-6);
        }
    }

    TEST_CASE("conv_silu: committing n journal entries equals running n rows") {
        const int64_t channels = 5, taps = 4;
        Random random(9);
        const auto u = random.normals(12 * channels);
        const auto part = [&](int begin, int count) {
            return std::vector<float>(u.begin() + begin * channels, u.begin() + (begin + count) * channels);
        };
        Guarded w("w", DType::F32, Place::weight, {channels, taps});
        for (int64_t i = 0; i < channels * taps; ++i) w.data()[i] = random.normal();
        for (int accepted = 0; accepted <= 4; ++accepted) {
            CAPTURE(accepted);
            Guarded plain("p", DType::F32, Place::state, {1, 7, channels}),
                spec("s", DType::F32, Place::state, {1, 7, channels});
            run_conv({.rows = {3}, .before = {0}, .slots = {0}}, part(0, 3), w, plain, channels);
            run_conv({.rows = {3}, .before = {0}, .slots = {0}}, part(0, 3), w, spec, channels);
            // Four drafted rows; `accepted` of them count, then two true ones follow.
            run_conv({.rows = {4}, .before = {3}, .slots = {0}, .journal = {1}}, part(3, 4), w, spec,
                     channels);
            const auto with =
                run_conv({.rows = {2}, .before = {3 + accepted}, .slots = {0}, .committed = {accepted}},
                         part(10, 2), w, spec, channels);
            if (accepted > 0)
                run_conv({.rows = {accepted}, .before = {3}, .slots = {0}}, part(3, accepted), w, plain,
                         channels);
            const auto without = run_conv({.rows = {2}, .before = {3 + accepted}, .slots = {0}}, part(10, 2),
                                          w, plain, channels);
            CHECK(with == without);
        }
    }

    TEST_CASE("gated_delta_net against the recurrence, whole and in parts, several sequences") {
        const DeltaInputs in = delta_inputs(33, 17);
        DeltaMemory reference;
        const auto expected = delta_reference(in, 33, reference);
        DeltaMemory whole;
        const auto at_once = run_delta({.rows = {33}, .before = {0}, .slots = {2}}, in, whole);
        CHECK(relative_error(at_once, expected) < 2e-6);
        DeltaMemory parts, one_thread;
        CHECK(run_delta({.rows = {33}, .before = {0}, .slots = {2}}, in, one_thread, 1) == at_once);
        std::vector<double> got;
        for (auto [begin, rows] : {std::pair{0, 1}, {1, 7}, {8, 25}}) {
            const auto y =
                run_delta({.rows = {rows}, .before = {begin}, .slots = {0}}, in.rows(begin, rows), parts);
            got.insert(got.end(), y.begin(), y.end());
        }
        CHECK(got == at_once);
        // Beside others, with an empty sequence between: the rows of the first are the same bits.
        DeltaMemory together;
        const auto y = run_delta({.rows = {8, 0, 25}, .before = {0, 3, 0}, .slots = {1, 0, 2}}, in, together);
        CHECK(std::equal(y.begin(), y.begin() + 8 * 24, at_once.begin()));
    }

    TEST_CASE("gated_delta_net: committing n journal entries equals running n rows") {
        const DeltaInputs in = delta_inputs(12, 3);
        for (int accepted = 0; accepted <= 4; ++accepted) {
            CAPTURE(accepted);
            DeltaMemory plain, spec;
            run_delta({.rows = {3}, .before = {0}, .slots = {1}}, in.rows(0, 3), plain);
            run_delta({.rows = {3}, .before = {0}, .slots = {1}}, in.rows(0, 3), spec);
            run_delta({.rows = {4}, .before = {3}, .slots = {1}, .journal = {1}}, in.rows(3, 4), spec);
            const auto with =
                run_delta({.rows = {2}, .before = {3 + accepted}, .slots = {1}, .committed = {accepted}},
                          in.rows(10, 2), spec);
            if (accepted > 0)
                run_delta({.rows = {accepted}, .before = {3}, .slots = {1}}, in.rows(3, accepted), plain);
            const auto without =
                run_delta({.rows = {2}, .before = {3 + accepted}, .slots = {1}}, in.rows(10, 2), plain);
            CHECK(relative_error(with, without) < 1e-6);
        }
        DeltaMemory m;
        CHECK_THROWS_AS(
            run_delta({.rows = {2}, .before = {3}, .slots = {1}, .committed = {6}}, in.rows(0, 2), m), Error);
        CHECK_THROWS_AS(
            run_delta({.rows = {6}, .before = {3}, .slots = {1}, .journal = {1}}, in.rows(0, 6), m), Error);
    }
}

}  // namespace
