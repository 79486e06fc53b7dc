// Random layers of a mixture of experts, and what their ops should compute, in double from weights that the test
// decodes.
#pragma once

#include <cstdlib>
#include <numeric>
#include <optional>

#include "ggml-like/ops/moe_down.h"
#include "ops/residual_rows.h"

namespace quern::test::moe {

struct Shape {
    int64_t model, width, shared_width, experts, used;
    Form form, shared_form;
    std::optional<Form> down_form = {};  // of chosen experts, if it is another

    std::string name() const {
        return fmt::format("D {} F {} {} shared {} {} experts {} used {}", model, width, form_name(form),
                           shared_width, form_name(shared_form), experts, used);
    }
};

/// Weights of one MoE layer in random form, on a device, and their values.
struct Layer {
    Shape s;
    WeightStore store;
    ExpertWeights gate_up, down;
    Weight shared_gate_up, shared_down;
    std::vector<std::vector<double>> gate_up_values, down_values;  // by expert, the shared one last

    Layer(const Device& device, const Shape& shape, unsigned seed) : s(shape), store(seed) {
        gate_up = {"gate_up", 2 * s.width, s.model, {}};
        down = {"down", s.model, s.width, {}};
        for (int64_t e = 0; e <= s.experts; ++e) add(e);
        gate_up = placed(device, gate_up, RowOrder::paired);
        down = placed(device, down);
        shared_gate_up = placed(device, shared_gate_up, RowOrder::paired);
        shared_down = placed(device, shared_down);
    }

  private:
    void add(int64_t e) {
        const bool shared = e == s.experts;
        const int64_t width = shared ? s.shared_width : s.width;
        const Form form = shared ? s.shared_form : s.form;
        auto& gu = gate_up_values.emplace_back();
        auto& d = down_values.emplace_back();
        const WeightSegment gate = store.segment("gate", form, width, s.model, gu);
        const WeightSegment up = store.segment("up", form, width, s.model, gu);
        Weight both(fmt::format("gate_up{}", e), {gate, up});
        const Form of_down = shared ? form : s.down_form.value_or(form);
        Weight last(fmt::format("down{}", e), {store.segment("down", of_down, s.model, width, d)});
        if (shared) {
            shared_gate_up = both;
            shared_down = last;
        } else {
            gate_up.expert.push_back(both);
            down.expert.push_back(last);
        }
    }
};

/// Outputs of moe_gate_up: those of each row, then groups.
struct Chosen {
    std::vector<double> ids, weights, gate, routed, shared, groups;

    static Chosen from(const StepOutputs& out, size_t at) {
        return {out[at], out[at + 1], out[at + 2], out[at + 3], out[at + 4], out.back()};
    }
};
inline const std::vector<const char*> kChosenNames = {"ids", "weights", "gate", "routed", "shared"};

/// The outputs of the graph that Chosen::from reads, groups last.
inline void add_outputs(Graph& g, const MoeGateUpResult& up, const std::vector<Tensor*>& before_groups = {}) {
    for (Tensor* t : {up.ids, up.weights, up.shared_gate, up.routed, up.shared}) g.output(t);
    for (Tensor* t : before_groups) g.output(t);
    g.output(up.groups);
}

/// Whether a GPU makes answers of these experts as prompts' (cuda/variants.h: as_prompt).
inline bool as_prompt(const Device& device, const Shape& s) {
    const bool fp8 = s.form == Form::f8_tensor || s.form == Form::f8_row || s.form == Form::f8_block;
    const bool warpgroups = device.backend->description().find("sm_90") != std::string::npos &&
                            std::getenv("QUERN_TEST_SHARED_BYTES") == nullptr;
    return fp8 && warpgroups && s.experts <= 384;
}

/// Rows of routed in the order of pairs, where a GPU has that of groups: in prompt steps, and as_prompt. `at`: of ids in the outputs;
/// groups are last.
inline StepOutputs by_pair(const Device& device, StepKind kind, const Shape& s, size_t at, StepOutputs out) {
    if (device.exact() || (kind != StepKind::prompt && !as_prompt(device, s))) return out;
    const int64_t experts = s.experts;
    const std::vector<double> grouped = out[at + 3];
    const size_t pairs = out[at].size(), width = grouped.size() / pairs;
    for (size_t i = 0; i < pairs; ++i) {
        const double pair = out.back()[static_cast<size_t>(experts) + 1 + i];
        std::copy_n(grouped.data() + i * width, width,
                    out[at + 3].data() + static_cast<size_t>(pair) * width);
    }
    return out;
}

/// Checks ids, weights and gate of one row, from its logits (E and the gate's) and its factor 1 / rms. Enough logits
/// must be numbers; NaN is not chosen.
inline void check_choice(const Device& device, int64_t used, const double* logits, int64_t experts,
                         double factor, const double* ids, const double* weights, double gate) {
    const double most = device.exact() ? 1e-5 : 1e-4;
    CHECK(gate == doctest::Approx(1 / (1 + std::exp(-logits[experts] * factor))).epsilon(most));
    std::vector<int64_t> order;
    for (int64_t e = 0; e < experts; ++e)
        if (!std::isnan(logits[e])) order.push_back(e);
    REQUIRE(static_cast<int64_t>(order.size()) >= used);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
    double total = 0, sum = 0;
    for (int64_t j = 0; j < used; ++j)
        total += std::exp((logits[order[static_cast<size_t>(j)]] - logits[order[0]]) * factor);
    for (int64_t j = 0; j < used; ++j) {
        const int64_t expert = order[static_cast<size_t>(j)];
        CHECK(ids[j] == static_cast<double>(expert));
        CHECK(weights[j] ==
              doctest::Approx(std::exp((logits[expert] - logits[order[0]]) * factor) / total).epsilon(most));
        sum += weights[j];
    }
    CHECK(sum == doctest::Approx(1.0).epsilon(most));
}

/// Offsets of the experts' groups, then the pairs, by expert.
inline std::vector<double> expected_groups(const std::vector<double>& ids, int64_t experts) {
    std::vector<std::vector<double>> own(static_cast<size_t>(experts));
    for (size_t i = 0; i < ids.size(); ++i)
        own[static_cast<size_t>(ids[i])].push_back(static_cast<double>(i));
    std::vector<double> groups = {0}, pairs;
    for (const auto& expert : own) {
        pairs.insert(pairs.end(), expert.begin(), expert.end());
        groups.push_back(static_cast<double>(pairs.size()));
    }
    groups.insert(groups.end(), pairs.begin(), pairs.end());
    return groups;
}

/// A GPU may group slices of rows apart.
inline void check_groups(const Device& device, const Chosen& out, int64_t experts) {
    if (!device.exact()) return;
    const auto expected = expected_groups(out.ids, experts);
    REQUIRE(out.groups.size() >= expected.size());
    CHECK(std::vector<double>(out.groups.begin(),
                              out.groups.begin() + static_cast<std::ptrdiff_t>(expected.size())) == expected);
}

/// Column f of silu(gate r h) * (up r h), whose r is off by `r_error` of itself.
inline void expect_gate_up(const std::vector<double>& w, int64_t f, int64_t width, int64_t cols,
                           const double* h, double r, double r_error, int64_t column, Expected& e) {
    const Sum gates = row_product(w, f, cols, h), ups = row_product(w, width + f, cols, h);
    const double gate = gates.value * r, up = ups.value * r, silu = gate / (1 + std::exp(-gate));
    const double gate_bound = sum_bound(gates, cols) * r + r_error * std::fabs(gate);
    const double up_bound = sum_bound(ups, cols) * r + r_error * std::fabs(up);
    // |silu'| <= 1.1, and exp is good to a few units in the last place
    e.add(column, silu * up,
          1.1 * gate_bound * (std::fabs(up) + up_bound) + (std::fabs(silu) + 1e-6) * up_bound +
              1e-6 * (1 + std::fabs(gate)) * std::fabs(up));
}

/// Rows of routed and shared, given h and the ids that were chosen.
inline void check_gate_up(const Device& device, const Layer& layer, int64_t n, int64_t t, const double* h,
                          double r, double r_error, const Chosen& out) {
    const Shape& s = layer.s;
    Expected routed{s.used * s.width}, shared{s.shared_width};
    for (const int64_t i : checked_columns(t, n, s.used * s.width, 2 * s.model)) {
        const auto expert = static_cast<size_t>(out.ids[static_cast<size_t>(t * s.used + i / s.width)]);
        REQUIRE(expert < static_cast<size_t>(s.experts));
        expect_gate_up(layer.gate_up_values[expert], i % s.width, s.width, s.model, h, r, r_error, i, routed);
    }
    for (const int64_t i : checked_columns(t, n, s.shared_width, 2 * s.model))
        expect_gate_up(layer.gate_up_values.back(), i, s.shared_width, s.model, h, r, r_error, i, shared);
    check_row(device, "routed", out.routed.data() + t * s.used * s.width, routed);
    check_row(device, "shared", out.shared.data() + t * s.shared_width, shared);
}

/// Row t of x', given what moe_gate_up made.
template <typename T>
void check_down(const Device& device, const Layer& layer, int64_t n, int64_t t, const T* residual,
                const Chosen& out, const double* y) {
    const Shape& s = layer.s;
    Expected e{s.model};
    for (const int64_t d : checked_columns(t, n, s.model, s.used * s.width + s.shared_width)) {
        double value = residual[d], bound = 1.2e-7 * std::fabs(value);
        for (int64_t j = 0; j <= s.used; ++j) {
            const bool shared = j == s.used;
            const int64_t place = t * s.used + j, width = shared ? s.shared_width : s.width;
            const auto expert = static_cast<size_t>(shared ? s.experts : out.ids[static_cast<size_t>(place)]);
            const double* act = shared ? out.shared.data() + t * width : out.routed.data() + place * width;
            const double weight =
                shared ? out.gate[static_cast<size_t>(t)] : out.weights[static_cast<size_t>(place)];
            const Sum sum = row_product(layer.down_values[expert], d, width, act);
            value += weight * sum.value;
            bound += std::fabs(weight) * (sum_bound(sum, width) + 1e-6 * sum.magnitude);
        }
        e.add(d, value, bound);
    }
    check_row(device, "x'", y, e);
}

/// Logits [rows, E + 1] of a test: multiples of 1/256, so that there are many ties and no near ties.
inline std::vector<float> make_logits(unsigned seed, int64_t rows, int64_t experts) {
    std::vector<float> logits = Random(seed).normals(rows * (experts + 1));
    for (float& v : logits) v = std::round(512 * v) / 256;
    return logits;
}

inline Tensor* declare_logits(Graph& g, const Device& device, StepKind kind, int64_t rows, int64_t experts) {
    return g.input("logits", fixed_point(device, kind) ? DType::I64 : DType::F32,
                   {rows, (experts + 8) / 8 * 8});
}

/// Columns after the gate's are filled but must not be read.
inline void set_logits(Plan& plan, Tensor* t, const std::vector<float>& logits, int64_t experts) {
    for (int64_t row = 0; row < t->shape[0]; ++row)
        for (int64_t i = 0; i < t->shape[1]; ++i) {
            const int64_t at = row * t->shape[1] + i;
            const float v = i <= experts ? logits[static_cast<size_t>(row * (experts + 1) + i)] : 99.0f;
            if (t->dtype == DType::F32) plan.input<float>(t)[at] = v;
            if (t->dtype == DType::I64)
                plan.input<int64_t>(t)[at] = std::llround(std::ldexp(static_cast<double>(v), 32));
        }
}

}  // namespace quern::test::moe
