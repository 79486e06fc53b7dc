// Random layers of a mixture of experts and what their ops should make of them, in double over weights
// decoded by the test.
#pragma once

#include <fmt/format.h>

#include <set>

#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ops/harness.h"
#include "ops/weights.h"

namespace quern::test::moe {

struct Case {
    int64_t tokens, model, width, shared_width, experts, used;
    Form form, shared_form;
    bool crowded = false;  // all tokens choose expert 0

    /// Whether a token's bits on `device` do not depend on the others.
    bool same_bits(const Device& device) const {
        const bool nvfp4 = form == Form::nvfp4 && shared_form == Form::nvfp4;
        return device.same_bits(nvfp4 && tokens <= 64 ? 1 : tokens);
    }
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

/// The same weights on a device.
struct PlacedLayer {
    ExpertWeights gate_up, down;
    Weight shared_gate_up, shared_down;

    PlacedLayer(const Device& device, const Layer& layer)
        : gate_up(placed(device, layer.gate_up, RowOrder::paired)),
          down(placed(device, layer.down)),
          shared_gate_up(placed(device, layer.shared_gate_up, RowOrder::paired)),
          shared_down(placed(device, layer.shared_down)) {}
};

struct Inputs {
    std::vector<float> h, residual, weights, gate;
    std::vector<int32_t> ids;

    Inputs row(const Case& c, int64_t t) const {
        return {rows_of(h, c.model, t, 1), rows_of(residual, c.model, t, 1), rows_of(weights, c.used, t, 1),
                rows_of(gate, 1, t, 1), rows_of(ids, c.used, t, 1)};
    }
};

inline Inputs make_inputs(const Device& device, Layer& layer) {
    const Case& c = layer.c;
    Inputs in;
    Random random(layer.store.below(1000));
    in.h = device.rounded(random.normals(c.tokens * c.model));
    in.residual = random.normals(c.tokens * c.model);
    in.weights = random.normals(c.tokens * c.used);
    for (int64_t t = 0; t < c.tokens; ++t) {
        in.gate.push_back(0.1f + std::fabs(random.normal()));
        std::set<int32_t> chosen;  // different experts, never the last one: it gets no tokens
        if (c.crowded) in.ids.push_back(*chosen.insert(0).first);
        while (static_cast<int64_t>(chosen.size()) < c.used) {
            const auto id = static_cast<int32_t>(
                layer.store.below(static_cast<uint32_t>(std::max<int64_t>(c.experts - 1, 1))));
            if (chosen.insert(id).second) in.ids.push_back(id);
        }
    }
    return in;
}

inline std::vector<int32_t> group(const std::vector<int32_t>& ids, int64_t experts) {
    std::vector<int32_t> groups = {0}, pairs;
    for (int32_t e = 0; e < experts; ++e) {
        for (size_t i = 0; i < ids.size(); ++i)
            if (ids[i] == e) pairs.push_back(static_cast<int32_t>(i));
        groups.push_back(static_cast<int32_t>(pairs.size()));
    }
    groups.insert(groups.end(), pairs.begin(), pairs.end());
    return groups;
}

struct Outputs {
    std::vector<double> routed, shared, y;
    bool operator==(const Outputs&) const = default;
};

template <typename T>
Sum row_product(const std::vector<double>& w, int64_t row, int64_t cols, const T* x) {
    Sum sum;
    for (int64_t k = 0; k < cols; ++k) sum.add(w[static_cast<size_t>(row * cols + k)], x[k]);
    return sum;
}

inline void expect_gate_up(const Case& c, const std::vector<double>& w, int64_t width, const float* h,
                           Expected& e) {
    for (int64_t f = 0; f < width; ++f) {
        const Sum gate = row_product(w, f, c.model, h), up = row_product(w, width + f, c.model, h);
        const double silu = gate.value / (1 + std::exp(-gate.value));
        // |silu'| <= 1.1, and exp is good to a few units in the last place
        e.add(silu * up.value, 1.1 * sum_bound(gate, c.model) * std::fabs(up.value) +
                                   (std::fabs(silu) + 1e-6) * sum_bound(up, c.model) +
                                   1e-6 * (1 + std::fabs(gate.value)) * std::fabs(up.value));
    }
}

/// Row t of y, given what gate_up made.
inline void expect_down(const Layer& layer, const Inputs& in, const Outputs& out, int64_t t, Expected& e) {
    const Case& c = layer.c;
    for (int64_t d = 0; d < c.model; ++d) {
        double value = in.residual[static_cast<size_t>(t * c.model + d)], bound = 1e-7 * std::fabs(value);
        for (int64_t j = 0; j <= c.used; ++j) {
            const bool shared = j == c.used;
            const int64_t place = t * c.used + j, width = shared ? c.shared_width : c.width;
            const int64_t expert = shared ? c.experts : in.ids[static_cast<size_t>(place)];
            const double* act = shared ? out.shared.data() + t * width : out.routed.data() + place * width;
            const double weight =
                shared ? in.gate[static_cast<size_t>(t)] : in.weights[static_cast<size_t>(place)];
            const Sum sum = row_product(layer.down_values[static_cast<size_t>(expert)], d, width, act);
            value += weight * sum.value;
            bound += std::fabs(weight) * (sum_bound(sum, width) + 1e-6 * sum.magnitude);
        }
        e.add(value, bound);
    }
}

}  // namespace quern::test::moe
