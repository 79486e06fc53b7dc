// moe_gate_up and moe_down, against sums in double over weights decoded by the test.
#include <fmt/format.h>

#include <cstdlib>
#include <set>

#include "ggml-like/error.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"
#include "ggml-like/ops/moe_route.h"
#include "ggml-like/ops/norm_linear.h"
#include "ops/harness.h"
#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

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

Inputs make_inputs(const Device& device, Layer& layer) {
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

std::vector<int32_t> group(const std::vector<int32_t>& ids, int64_t experts) {
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

/// gate_up on h, then down on what came out of it. `groups`: those of the ids unless given.
Outputs run_moe(const Device& device, const Case& c, const PlacedLayer& w, const Inputs& in,
                std::vector<int32_t> groups = {}) {
    if (groups.empty()) groups = group(in.ids, c.experts);
    const int64_t tokens = static_cast<int64_t>(in.gate.size());
    Graph g;
    Tensor* h = g.input("h", device.activation, {tokens, c.model});
    Tensor* residual = g.input("residual", DType::F32, {tokens, c.model});
    Tensor* ids = g.input("ids", DType::I32, {tokens, c.used});
    Tensor* weights = g.input("weights", DType::F32, {tokens, c.used});
    Tensor* gate = g.input("gate", DType::F32, {tokens});
    Tensor* grouped = g.input("groups", DType::I32, {c.experts + 1 + tokens * c.used});
    const auto up = moe_gate_up(g, "up", h, ids, grouped, w.gate_up, w.shared_gate_up);
    Tensor* y = moe_down(g, "y", {up.routed, up.shared, ids, weights, gate, grouped, residual}, w.down,
                         w.shared_down);
    for (Tensor* t : {up.routed, up.shared, y}) g.output(t);
    auto out = run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, h, in.h);
        set_input(p, residual, in.residual);
        set_input(p, weights, in.weights);
        set_input(p, gate, in.gate);
        std::copy(in.ids.begin(), in.ids.end(), p.input<int32_t>(ids));
        std::copy(groups.begin(), groups.end(), p.input<int32_t>(grouped));
    });
    return {out[0], out[1], out[2]};
}

template <typename T>
Sum row_product(const std::vector<double>& w, int64_t row, int64_t cols, const T* x) {
    Sum sum;
    for (int64_t k = 0; k < cols; ++k) sum.add(w[static_cast<size_t>(row * cols + k)], x[k]);
    return sum;
}

void expect_gate_up(const Case& c, const std::vector<double>& w, int64_t width, const float* h, Expected& e) {
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
void expect_down(const Layer& layer, const Inputs& in, const Outputs& out, int64_t t, Expected& e) {
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

void check_case(const Device& device, const Case& c, unsigned seed) {
    CAPTURE(seed);
    CAPTURE(c.tokens);
    CAPTURE(std::string(form_name(c.form)));
    Layer layer(c, seed);
    const PlacedLayer w(device, layer);
    const Inputs in = make_inputs(device, layer);
    const Outputs out = run_moe(device, c, w, in);
    Expected routed, shared, y;
    for (int64_t t = 0; t < c.tokens; ++t) {
        const float* h = in.h.data() + t * c.model;
        for (int64_t j = 0; j < c.used; ++j) {
            const auto expert = static_cast<size_t>(in.ids[static_cast<size_t>(t * c.used + j)]);
            expect_gate_up(c, layer.gate_up_values[expert], c.width, h, routed);
        }
        expect_gate_up(c, layer.gate_up_values.back(), c.shared_width, h, shared);
        expect_down(layer, in, out, t, y);
    }
    check_close(device, out.routed, routed);
    check_close(device, out.shared, shared);
    check_close(device, out.y, y);
    if (!c.same_bits(device)) return;
    for (const int64_t t : some_rows(c.tokens)) {  // the same bits without the others
        const Outputs alone = run_moe(device, c, w, in.row(c, t));
        CHECK(alone.routed == rows_of(out.routed, c.used * c.width, t, 1));
        CHECK(alone.shared == rows_of(out.shared, c.shared_width, t, 1));
        CHECK(alone.y == rows_of(out.y, c.model, t, 1));
    }
}

void moe_forms(Device& device) {
    unsigned seed = 40;
    for (const Form form : kForms) {
        check_case(device, {1, 64, 48, 32, 5, 2, form, form}, ++seed);
        check_case(device, {7, 48, 16, 80, 9, 3, form, Form::bf16}, ++seed);
        check_case(device, {33, 64, 48, 32, 6, 2, form, form}, ++seed);
    }
    for (const int64_t tokens : {1, 2, 7, 8, 9, 33, 64, 130})
        check_case(device, {tokens, 144, 48, 80, 7, 3, Form::nvfp4, Form::nvfp4}, ++seed);
    check_case(device, {33, 32, 32, 16, 4, 3, Form::nvfp4, Form::nvfp4}, ++seed);
    check_case(device, {3, 256, 144, 272, 20, 8, Form::nvfp4, Form::bf16}, ++seed);
    check_case(device, {130, 256, 144, 272, 20, 8, Form::nvfp4, Form::bf16}, ++seed);
    for (const Form form : {Form::bf16, Form::nvfp4})  // few rows of each expert, more than a ring of columns
        check_case(device, {40, 656, 208, 80, 24, 3, form, form}, ++seed);
    for (const int64_t tokens : {16, 17, 32, 64})
        check_case(device, {tokens, 208, 80, 336, 9, 4, Form::nvfp4, Form::nvfp4, true}, ++seed);
    // more experts than a block of a GPU has rows of
    check_case(device, {64, 64, 16, 16, 500, 8, Form::nvfp4, Form::nvfp4}, ++seed);
}

// ---- linear_add, moe_route, moe_gate_up, moe_down and norm_linear as a model chains them ----

/// A mixture, the product before it, [c.model, inner], and one after it. twins: experts are two rows again
/// and again.
struct Chain {
    Case c;
    int64_t inner;
    Form out_form = Form::bf16;
    bool twins = false;
};

constexpr int64_t kNextRows = 48;

struct ChainOutputs {
    std::vector<double> x, ids, weights, gate, groups, routed, shared, y, z;

    ChainOutputs row(const Case& c, int64_t t) const {
        return {rows_of(x, c.model, t, 1),
                rows_of(ids, c.used, t, 1),
                rows_of(weights, c.used, t, 1),
                rows_of(gate, 1, t, 1),
                {},
                rows_of(routed, c.used * c.width, t, 1),
                rows_of(shared, c.shared_width, t, 1),
                rows_of(y, c.model, t, 1),
                rows_of(z, kNextRows, t, 1)};
    }
};

class ChainTest {
  public:
    ChainTest(const Device& device, const Chain& chain, unsigned seed)
        : device_(device),
          chain_(chain),
          c_(chain.c),
          layer_(c_, seed),
          placed_(device, layer_),
          norm_(device, "norm", DType::F32, Place::weight, {c_.model}) {
        auto& store = layer_.store;
        std::vector<double> values;
        out_proj_ = placed(
            device,
            Weight("out_proj", {store.segment("out_proj", chain.out_form, c_.model, chain.inner, values)}));
        next_ = placed(
            device,
            Weight("next", {store.segment("next", chain.out_form, kNextRows, c_.model, next_values_)}));
        std::vector<WeightSegment> rows;
        for (int64_t e = 0; e < c_.experts; ++e) {
            if (chain.twins && e >= 2) {
                rows.push_back(rows[static_cast<size_t>(e % 2)]);
                router_values_.insert(router_values_.end(), router_values_.begin() + e % 2 * c_.model,
                                      router_values_.begin() + (e % 2 + 1) * c_.model);
            } else {
                rows.push_back(store.segment("gate", Form::bf16, 1, c_.model, router_values_));
            }
        }
        rows.push_back(store.segment("shared_gate", Form::bf16, 1, c_.model, router_values_));
        router_ = placed(device, Weight("router", rows));
        norm_values_ = Random(seed).normals(c_.model);  // so that logits are a few apart
        for (float& v : norm_values_) v *= 2 / std::sqrt(static_cast<float>(c_.model));
        norm_.set(norm_values_);
    }

    void check(unsigned seed) {
        const auto in = device_.rounded(Random(seed).normals(c_.tokens * chain_.inner)),
                   residual = Random(seed + 1).normals(c_.tokens * c_.model);
        const ChainOutputs all = run(in, residual);
        Expected routed, shared, y, z;
        Inputs seen{{}, floats(all.x), floats(all.weights), floats(all.gate), ints(all.ids)};
        for (int64_t t = 0; t < c_.tokens; ++t) {
            const std::vector<float> h = normed(all.x.data() + t * c_.model);
            check_choice(all, t, h);
            for (int64_t j = 0; j < c_.used; ++j)
                expect_gate_up(c_, layer_.gate_up_values[static_cast<size_t>(seen.ids[at(t, j)])], c_.width,
                               h.data(), routed);
            expect_gate_up(c_, layer_.gate_up_values.back(), c_.shared_width, h.data(), shared);
            expect_down(layer_, seen, {all.routed, all.shared, all.y}, t, y);
            const std::vector<float> next = normed(all.y.data() + t * c_.model);
            for (int64_t n = 0; n < kNextRows; ++n) {
                const Sum sum = row_product(next_values_, n, c_.model, next.data());
                z.add(sum.value, sum_bound(sum, c_.model));
            }
        }
        const std::vector<int32_t> groups = group(seen.ids, c_.experts);
        CHECK(all.groups == std::vector<double>(groups.begin(), groups.end()));
        check_close(device_, all.routed, routed);
        check_close(device_, all.shared, shared);
        check_close(device_, all.y, y);
        check_close(device_, all.z, z);
        if (!device_.same_bits(c_.tokens) || c_.form != Form::nvfp4 || c_.shared_form != Form::nvfp4) return;
        for (const int64_t t : some_rows(c_.tokens)) {
            const ChainOutputs alone =
                                   run(rows_of(in, chain_.inner, t, 1), rows_of(residual, c_.model, t, 1)),
                               beside = all.row(c_, t);
            CHECK(alone.x == beside.x);
            CHECK(alone.ids == beside.ids);
            CHECK(alone.weights == beside.weights);
            CHECK(alone.gate == beside.gate);
            CHECK(alone.routed == beside.routed);
            CHECK(alone.shared == beside.shared);
            CHECK(alone.y == beside.y);
            CHECK(alone.z == beside.z);
        }
    }
    /// Of a captured plan.
    int64_t kernels() {
        device_.backend->weights_complete();  // they are read until then
        return Plan(graph(c_.tokens), *device_.backend).kernels;
    }

  private:
    Graph graph(int64_t tokens) {
        Graph g;
        in_ = g.input("in", device_.activation, {tokens, chain_.inner});
        residual_ = g.input("residual", DType::F32, {tokens, c_.model});
        Tensor* x = linear_add(g, "out_proj", in_, out_proj_, residual_);
        const auto r = moe_route(g, "route", x, g.external(norm_.tensor()), router_,
                                 static_cast<int>(c_.used), 1e-6f, device_.activation);
        const auto up = moe_gate_up(g, "up", r.h, r.ids, r.groups, placed_.gate_up, placed_.shared_gate_up);
        Tensor* y = moe_down(g, "y", {up.routed, up.shared, r.ids, r.weights, r.shared, r.groups, x},
                             placed_.down, placed_.shared_down);
        Tensor* z = norm_linear(g, "z", y, g.external(norm_.tensor()), next_, 1e-6f, device_.activation,
                                device_.activation);
        for (Tensor* t : {x, r.ids, r.weights, r.shared, r.groups, up.routed, up.shared, y, z}) g.output(t);
        return g;
    }
    ChainOutputs run(const std::vector<float>& in, const std::vector<float>& residual) {
        Graph g = graph(static_cast<int64_t>(residual.size()) / c_.model);
        auto out = run_graph(device_, std::move(g), [&](Plan& p) {
            set_input(p, in_, in);
            set_input(p, residual_, residual);
        });
        return {out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7], out[8]};
    }

    std::vector<float> normed(const double* x) const {
        double sum = 0;
        for (int64_t k = 0; k < c_.model; ++k) sum += x[k] * x[k];
        const double factor = 1 / std::sqrt(sum / static_cast<double>(c_.model) + 1e-6);
        std::vector<float> h;
        for (int64_t k = 0; k < c_.model; ++k)
            h.push_back(static_cast<float>(x[k] * factor * norm_values_[static_cast<size_t>(k)]));
        return h;
    }
    /// The best logits, in falling order, as far as BF16 rows can tell; of equal ones the lower id.
    void check_choice(const ChainOutputs& out, int64_t t, const std::vector<float>& h) const {
        constexpr double kNear = 0.03;  // logits are 2 apart
        std::vector<double> logits;
        for (int64_t e = 0; e <= c_.experts; ++e)
            logits.push_back(row_product(router_values_, e, c_.model, h.data()).value);
        CHECK(out.gate[static_cast<size_t>(t)] ==
              doctest::Approx(1 / (1 + std::exp(-logits.back()))).epsilon(0.02));
        logits.pop_back();
        double total = 0;
        std::vector<bool> chosen(logits.size());
        for (int64_t j = 0; j < c_.used; ++j) {
            const auto id = static_cast<size_t>(out.ids[at(t, j)]);
            REQUIRE(id < logits.size());
            CHECK_FALSE(chosen[id]);
            chosen[id] = true;
            total += std::exp(logits[id]);
        }
        for (int64_t j = 0; j < c_.used; ++j) {
            const auto id = static_cast<size_t>(out.ids[at(t, j)]);
            CHECK(out.weights[at(t, j)] == doctest::Approx(std::exp(logits[id]) / total).epsilon(kNear));
            for (size_t e = 0; e < logits.size(); ++e)
                if (!chosen[e])
                    CHECK((logits[e] < logits[id] + kNear && (logits[e] != logits[id] || e > id)));
            if (j == 0) continue;
            const auto before = static_cast<size_t>(out.ids[at(t, j - 1)]);
            CHECK((logits[id] < logits[before] + kNear && (logits[id] != logits[before] || id > before)));
        }
    }
    size_t at(int64_t t, int64_t j) const { return static_cast<size_t>(t * c_.used + j); }
    static std::vector<float> floats(const std::vector<double>& v) { return {v.begin(), v.end()}; }
    static std::vector<int32_t> ints(const std::vector<double>& v) { return {v.begin(), v.end()}; }

    const Device& device_;
    Chain chain_;
    Case c_;
    Layer layer_;
    PlacedLayer placed_;
    Guarded norm_;
    Weight out_proj_, router_, next_;
    std::vector<double> router_values_, next_values_;
    std::vector<float> norm_values_;
    Tensor *in_ = nullptr, *residual_ = nullptr;
};

void check_chain(const Device& device, const Chain& chain, unsigned seed, int64_t kernels = 0) {
    CAPTURE(seed);
    CAPTURE(chain.c.tokens);
    CAPTURE(chain.c.experts);
    CAPTURE(std::string(form_name(chain.out_form)));
    ChainTest test(device, chain, seed);
    const bool small = std::getenv("QUERN_TEST_SHARED_BYTES") != nullptr;
    if (kernels > 0 && !small) CHECK(test.kernels() == kernels);
    for (unsigned turn = 0; turn < 2; ++turn) test.check(seed + 10 * turn);  // nothing is left of a step
}

void moe_chains(Device& device) {
    constexpr Form kFp4 = Form::nvfp4;
    unsigned seed = 90;
    // no kernel of its own for the router, with a product of every kind before it
    for (const int64_t tokens : {1, 2, 7, 8}) {
        check_chain(device, {{tokens, 512, 48, 80, 40, 4, kFp4, kFp4}, 1024}, ++seed, 4);
        check_chain(device, {{tokens, 512, 48, 80, 40, 4, kFp4, kFp4}, 2048, kFp4}, ++seed, 4);
        check_chain(device, {{tokens, 512, 48, 80, 40, 4, kFp4, kFp4}, 2048, Form::f8_row}, ++seed, 4);
        // all experts a block has room for, and twice the columns it has SMs for
        check_chain(device, {{tokens, 1024, 16, 32, 256, 8, kFp4, kFp4}, 1024}, ++seed, 4);
        check_chain(device, {{tokens, 3072, 16, 32, 20, 4, kFp4, kFp4}, 1024}, ++seed, 4);
        check_chain(device, {{tokens, 1024, 16, 32, 256, 8, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 4);
        check_chain(device, {{tokens, 80, 48, 80, 5, 4, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 4);
    }
    // the 35B's widths; one row also with less shared memory
    for (const int64_t tokens : {1, 8}) {
        const Chain chain{{tokens, 2048, 512, 512, 20, 8, kFp4, kFp4}, 4096};
        check_chain(device, chain, ++seed, 4);
        if (tokens == 1) CHECK(ChainTest(device, chain, seed).kernels() == 4);
    }
    // one row with so many parts that down has the kernel of more rows
    check_chain(device, {{1, 1024, 912, 1024, 20, 8, kFp4, kFp4}, 1024}, ++seed);
    // a router that does its own work: experts beyond those, choices beyond those, another product, other
    // forms
    for (const int64_t tokens : {1, 8}) {
        check_chain(device, {{tokens, 512, 16, 32, 300, 4, kFp4, kFp4}, 1024}, ++seed, 5);
        check_chain(device, {{tokens, 512, 16, 32, 40, 10, kFp4, kFp4}, 1024}, ++seed, 5);
        check_chain(device, {{tokens, 512, 16, 32, 40, 4, kFp4, kFp4}, 144}, ++seed, 5);
        check_chain(device, {{tokens, 512, 48, 80, 9, 3, kFp4, Form::bf16}, 1024}, ++seed);
        check_chain(device, {{tokens, 512, 48, 80, 9, 3, Form::bf16, Form::bf16}, 1024}, ++seed);
    }
    check_chain(device, {{16, 512, 48, 80, 40, 4, kFp4, kFp4}, 1024}, ++seed);
}

}  // namespace

DEVICE_TEST_CASE("moe: gate_up and down in every form, alone and in a batch", moe_forms)

TEST_SUITE("cuda") {  // other kernels than for one op alone
    TEST_CASE("moe: a mixture between two products, as a model chains them (CUDA)") { on_cuda(moe_chains); }

    TEST_CASE("moe: so many tiles that warps share them (CUDA)") {
        on_cuda([](Device& device) {
            // 10 columns of chunks, 8, and 32
            check_case(device, {64, 640, 336, 400, 20, 8, Form::nvfp4, Form::nvfp4}, 70);
            check_case(device, {64, 512, 512, 512, 20, 8, Form::nvfp4, Form::nvfp4}, 71);
            check_case(device, {40, 2048, 512, 512, 8, 6, Form::nvfp4, Form::nvfp4}, 72);
        });
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("moe: odd widths") {
        check_case(cpu_device(), {2, 48, 17, 5, 3, 1, Form::bf16, Form::f8_row}, 90);
    }

    TEST_CASE("moe: one thread and many give the same bits") {
        const Case c{5, 144, 96, 64, 6, 3, Form::nvfp4, Form::bf16};
        Layer layer(c, 77);
        const Device first = cpu_device(1);
        const PlacedLayer w(first, layer);
        const Inputs in = make_inputs(first, layer);
        const Outputs one = run_moe(first, c, w, in);
        for (const int threads : {2, 4}) CHECK((run_moe(cpu_device(threads), c, w, in) == one));
    }

    TEST_CASE("moe: the linear_add before a router may write the router's rows while it reads its own") {
        Layer layer({8, 64, 64, 16, 16, 1, Form::bf16, Form::bf16}, 5);
        std::vector<double> values;
        const Weight router("router", {layer.store.segment("gate", Form::bf16, 17, 64, values)});
        const Weight gate_up("gate_up", {layer.store.segment("gate_up", Form::bf16, 64, 64, values)});
        Graph g;
        Tensor *x = g.input("x", DType::F32, {8, 64}), *norm = g.input("norm", DType::F32, {64});
        Tensor* y = linear_add(g, "y", x, gate_up, x);
        Tensor* z = linear_add(g, "z", y, gate_up, x);  // y ends here
        const auto r = moe_route(g, "route", z, norm, router, 1, 1e-6f, DType::F32);
        const auto up = moe_gate_up(g, "up", r.h, r.ids, r.groups, layer.gate_up, layer.shared_gate_up);
        g.output(moe_down(g, "y", {up.routed, up.shared, r.ids, r.weights, r.shared, r.groups, z}, layer.down,
                          layer.shared_down));
        const ArenaPlan plan = plan_memory(g);
        const auto begin = [&](const Tensor* t) {
            size_t i = 0;
            while (&g.tensors()[i] != t) ++i;
            return plan.offset[i];
        };
        CHECK((begin(y) + y->bytes() <= begin(r.h) || begin(r.h) + r.h->bytes() <= begin(y)));
    }

    TEST_CASE("moe: groups that are none are errors, not crashes") {
        const Device device = cpu_device();
        const Case c{2, 32, 16, 16, 4, 2, Form::bf16, Form::bf16};
        Layer layer(c, 5);
        const PlacedLayer w(device, layer);
        const Inputs in = make_inputs(device, layer);
        const std::vector<int32_t> good = group(in.ids, c.experts);
        CHECK_NOTHROW(run_moe(device, c, w, in, good));
        for (size_t at = 0; at < good.size(); ++at) {
            for (const int32_t bad : {-1, 5, 2000000000}) {
                CAPTURE(at);
                std::vector<int32_t> groups = good;
                groups[at] = bad;
                CHECK_THROWS_AS(run_moe(device, c, w, in, groups), Error);
            }
        }
    }

    TEST_CASE("moe: weights that do not fit are errors") {
        Layer layer({2, 32, 16, 16, 4, 2, Form::bf16, Form::bf16}, 6);
        Graph g;
        Tensor* narrow = g.input("h", DType::F32, {2, 31});
        Tensor* h = g.input("h", DType::F32, {2, 32});
        Tensor* ids = g.input("ids", DType::I32, {2, 2});
        Tensor* groups = g.input("groups", DType::I32, {4 + 1 + 4});
        const auto up_of = [&](Tensor* in, Tensor* chosen, Tensor* grouped, const ExpertWeights& w) {
            return moe_gate_up(g, "up", in, chosen, grouped, w, layer.shared_gate_up);
        };
        CHECK_THROWS_AS(up_of(narrow, ids, groups, layer.gate_up), Error);
        CHECK_THROWS_AS(up_of(h, ids, groups, layer.down), Error);
        CHECK_THROWS_AS(up_of(h, h, groups, layer.gate_up), Error);
        CHECK_THROWS_AS(up_of(h, ids, ids, layer.gate_up), Error);
        const auto up = up_of(h, ids, groups, layer.gate_up);
        Tensor* weights = g.input("weights", DType::F32, {2, 2});
        Tensor* gate = g.input("gate", DType::F32, {2});
        const auto down = [&](Tensor* shared_gate, Tensor* residual, const ExpertWeights& w) {
            return moe_down(g, "y", {up.routed, up.shared, ids, weights, shared_gate, groups, residual}, w,
                            layer.shared_down);
        };
        CHECK_NOTHROW(down(gate, h, layer.down));
        CHECK_THROWS_AS(down(weights, h, layer.down), Error);
        CHECK_THROWS_AS(down(gate, narrow, layer.down), Error);
        CHECK_THROWS_AS(down(gate, h, layer.gate_up), Error);
        layer.down.expert[2].rows = 31;
        CHECK_THROWS_AS(down(gate, h, layer.down), Error);
    }
}
