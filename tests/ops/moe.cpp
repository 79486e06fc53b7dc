// moe_gate_up and moe_down, against sums in double over weights decoded by the test.
#include <fmt/format.h>

#include <memory>
#include <set>

#include <doctest/doctest.h>
#include "ggml-like/backend.h"
#include "ggml-like/error.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"

#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

struct Case {
    int64_t tokens, model, width, shared_width, experts, used;
    Form form, shared_form;
};

/// Weights of one MoE layer in random form, and their values.
struct Layer {
    Case c;
    WeightStore store;
    ExpertWeights gate_up, down;
    Weight shared_gate_up, shared_down;
    std::vector<std::vector<double>> gate_up_values, down_values;  // by expert, the shared one last

    Layer(const Case& test_case, unsigned seed) : c(test_case), store(seed) {
        gate_up = {"gate_up", 2 * c.width, c.model, {}};
        down = {"down", c.model, c.width, {}};
        for (int64_t e = 0; e <= c.experts; ++e) {
            const bool shared = e == c.experts;
            const int64_t width = shared ? c.shared_width : c.width;
            const Form form = shared ? c.shared_form : c.form;
            auto& gu = gate_up_values.emplace_back();
            auto& d = down_values.emplace_back();
            const WeightSegment gate = store.segment("gate", form, width, c.model, gu);
            const WeightSegment up = store.segment("up", form, width, c.model, gu);
            Weight both(fmt::format("gate_up{}", e), {gate, up});
            Weight last(fmt::format("down{}", e), {store.segment("down", form, c.model, width, d)});
            if (shared) {
                shared_gate_up = both;
                shared_down = last;
            } else {
                gate_up.expert.push_back(both);
                down.expert.push_back(last);
            }
        }
    }
};

struct Inputs {
    std::vector<float> x, weights, gate;
    std::vector<int32_t> ids;
};

Inputs make_inputs(Layer& layer) {
    const Case& c = layer.c;
    Inputs in;
    for (int64_t i = 0; i < c.tokens * c.model; ++i) in.x.push_back(layer.store.normal());
    for (int64_t t = 0; t < c.tokens; ++t) {
        in.gate.push_back(0.1f + std::fabs(layer.store.normal()));
        std::set<int32_t> chosen;  // different experts, never the last one: it gets no tokens
        while (static_cast<int64_t>(chosen.size()) < c.used) {
            const auto id = static_cast<int32_t>(
                layer.store.below(static_cast<uint32_t>(std::max<int64_t>(c.experts - 1, 1))));
            if (chosen.insert(id).second) in.ids.push_back(id);
        }
        for (int64_t j = 0; j < c.used; ++j) in.weights.push_back(layer.store.normal());
    }
    return in;
}

struct Outputs {
    std::vector<float> routed, shared, y;
};

/// gate_up on x, then down on what came out of it.
Outputs run_moe(Backend& backend, const Layer& layer, const Inputs& in, int64_t tokens, int64_t first = 0) {
    const Case& c = layer.c;
    Graph g;
    Tensor* x = g.input("x", DType::F32, {tokens, c.model});
    Tensor* ids = g.input("ids", DType::I32, {tokens, c.used});
    Tensor* weights = g.input("weights", DType::F32, {tokens, c.used});
    Tensor* gate = g.input("gate", DType::F32, {tokens});
    const auto up = moe_gate_up(g, "up", x, ids, layer.gate_up, layer.shared_gate_up);
    Tensor* y = moe_down(g, "y", {up.routed, up.shared, ids, weights, gate}, layer.down, layer.shared_down);
    for (Tensor* t : {up.routed, up.shared, y}) g.output(t);
    Plan plan(std::move(g), backend);
    std::copy_n(in.x.begin() + first * c.model, tokens * c.model, plan.input<float>(x));
    std::copy_n(in.ids.begin() + first * c.used, tokens * c.used, plan.input<int32_t>(ids));
    std::copy_n(in.weights.begin() + first * c.used, tokens * c.used, plan.input<float>(weights));
    std::copy_n(in.gate.begin() + first, tokens, plan.input<float>(gate));
    plan.run();
    backend.synchronize();
    const auto copy = [](const Tensor& t) {
        return std::vector<float>(t.as<float>(), t.as<float>() + t.elements());
    };
    return {copy(*up.routed), copy(*up.shared), copy(*y)};
}

Sum row_product(const std::vector<double>& w, int64_t row, int64_t cols, const float* x) {
    Sum sum;
    for (int64_t k = 0; k < cols; ++k) sum.add(w[static_cast<size_t>(row * cols + k)], x[k]);
    return sum;
}

void check_gate_up(const Case& c, const std::vector<double>& w, int64_t width, const float* x,
                   const float* out) {
    for (int64_t f = 0; f < width; ++f) {
        const Sum gate = row_product(w, f, c.model, x), up = row_product(w, width + f, c.model, x);
        const double silu = gate.value / (1 + std::exp(-gate.value));
        // |silu'| <= 1.1, and exp is good to a few units in the last place
        const double bound = 1.1 * sum_bound(gate, c.model) * std::fabs(up.value) +
                             (std::fabs(silu) + 1e-6) * sum_bound(up, c.model) +
                             1e-6 * (1 + std::fabs(gate.value)) * std::fabs(up.value);
        if (!(std::fabs(out[f] - silu * up.value) <= bound))
            FAIL_CHECK("column ", f, ": ", out[f], " != ", silu * up.value);
    }
}

void check_down(const Layer& layer, const Inputs& in, const Outputs& out, int64_t t) {
    const Case& c = layer.c;
    for (int64_t d = 0; d < c.model; ++d) {
        double value = 0, bound = 1e-30;
        for (int64_t j = 0; j <= c.used; ++j) {
            const bool shared = j == c.used;
            const int64_t place = t * c.used + j, width = shared ? c.shared_width : c.width;
            const int64_t expert = shared ? c.experts : in.ids[static_cast<size_t>(place)];
            const float* h = shared ? out.shared.data() + t * width : out.routed.data() + place * width;
            const double weight =
                shared ? in.gate[static_cast<size_t>(t)] : in.weights[static_cast<size_t>(place)];
            const Sum sum = row_product(layer.down_values[static_cast<size_t>(expert)], d, width, h);
            value += weight * sum.value;
            bound += std::fabs(weight) * (sum_bound(sum, width) + 1e-6 * sum.magnitude);
        }
        const float found = out.y[static_cast<size_t>(t * c.model + d)];
        if (!(std::fabs(found - value) <= bound))
            FAIL_CHECK("token ", t, " d ", d, ": ", found, " != ", value);
    }
}

void check_case(Backend& backend, const Case& c, unsigned seed) {
    CAPTURE(seed);
    CAPTURE(c.tokens);
    CAPTURE(std::string(form_name(c.form)));
    Layer layer(c, seed);
    const Inputs in = make_inputs(layer);
    const Outputs out = run_moe(backend, layer, in, c.tokens);
    for (int64_t t = 0; t < c.tokens; ++t) {
        const float* x = in.x.data() + t * c.model;
        for (int64_t j = 0; j < c.used; ++j) {
            const int64_t place = t * c.used + j;
            check_gate_up(c, layer.gate_up_values[static_cast<size_t>(in.ids[static_cast<size_t>(place)])],
                          c.width, x, out.routed.data() + place * c.width);
        }
        check_gate_up(c, layer.gate_up_values.back(), c.shared_width, x,
                      out.shared.data() + t * c.shared_width);
        check_down(layer, in, out, t);
        const Outputs alone = run_moe(backend, layer, in, 1, t);  // the same bits without the others
        const auto same = [&](const std::vector<float>& a, const std::vector<float>& all) {
            return std::memcmp(a.data(), all.data() + static_cast<size_t>(t) * a.size(), 4 * a.size()) == 0;
        };
        CHECK(same(alone.routed, out.routed));
        CHECK(same(alone.shared, out.shared));
        CHECK(same(alone.y, out.y));
    }
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("moe: gate_up and down in every form, alone and in a batch") {
        const auto backend = make_cpu_backend(2);
        unsigned seed = 40;
        for (const Form form : kForms) {
            check_case(*backend, {1, 64, 48, 32, 5, 2, form, form}, ++seed);
            check_case(*backend, {7, 48, 16, 80, 9, 3, form, Form::bf16}, ++seed);
        }
        check_case(*backend, {33, 32, 32, 16, 4, 3, Form::nvfp4, Form::nvfp4}, ++seed);
        check_case(*backend, {2, 48, 17, 5, 3, 1, Form::bf16, Form::f8_row}, ++seed);
        check_case(*backend, {3, 256, 144, 272, 20, 8, Form::nvfp4, Form::bf16}, ++seed);
    }

    TEST_CASE("moe: one thread and many give the same bits") {
        Layer layer({5, 144, 96, 64, 6, 3, Form::nvfp4, Form::bf16}, 77);
        const Inputs in = make_inputs(layer);
        const Outputs one = run_moe(*make_cpu_backend(1), layer, in, 5);
        for (const int threads : {2, 4}) {
            const Outputs many = run_moe(*make_cpu_backend(threads), layer, in, 5);
            CHECK(many.routed == one.routed);
            CHECK(many.shared == one.shared);
            CHECK(many.y == one.y);
        }
    }

    TEST_CASE("moe: an expert id out of range is an error, not a crash") {
        const auto backend = make_cpu_backend(2);
        for (const int32_t bad : {-1, 4, 2000000000}) {
            Layer layer({2, 32, 16, 16, 4, 2, Form::bf16, Form::bf16}, 5);
            Inputs in = make_inputs(layer);
            in.ids[3] = bad;
            CHECK_THROWS_AS(run_moe(*backend, layer, in, 2), Error);
        }
    }

    TEST_CASE("moe: weights that do not fit are errors") {
        Layer layer({2, 32, 16, 16, 4, 2, Form::bf16, Form::bf16}, 6);
        Graph g;
        Tensor* x = g.input("x", DType::F32, {2, 31});
        Tensor* fits = g.input("x", DType::F32, {2, 32});
        Tensor* ids = g.input("ids", DType::I32, {2, 2});
        CHECK_THROWS_AS(moe_gate_up(g, "a", x, ids, layer.gate_up, layer.shared_gate_up), Error);
        CHECK_THROWS_AS(moe_gate_up(g, "b", fits, ids, layer.down, layer.shared_gate_up), Error);
        CHECK_THROWS_AS(moe_gate_up(g, "c", fits, fits, layer.gate_up, layer.shared_gate_up), Error);
        const auto up = moe_gate_up(g, "d", fits, ids, layer.gate_up, layer.shared_gate_up);
        Tensor* weights = g.input("weights", DType::F32, {2, 2});
        Tensor* gate = g.input("gate", DType::F32, {2});
        CHECK_THROWS_AS(
            moe_down(g, "e", {up.routed, up.shared, ids, weights, weights}, layer.down, layer.shared_down),
            Error);
        CHECK_THROWS_AS(
            moe_down(g, "f", {up.routed, up.shared, ids, weights, gate}, layer.gate_up, layer.shared_down),
            Error);
        layer.down.expert[2].rows = 31;
        CHECK_THROWS_AS(
            moe_down(g, "g", {up.routed, up.shared, ids, weights, gate}, layer.down, layer.shared_down),
            Error);
    }
}
