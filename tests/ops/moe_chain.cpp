// linear_add, moe_route, moe_gate_up, moe_down and norm_linear as a model chains them: on a GPU, an op may do
// work of the next one.
#include <cstdlib>

#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/moe_route.h"
#include "ggml-like/ops/norm_linear.h"
#include "ggml-like/planner.h"
#include "ops/moe_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::moe;

namespace {

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

TEST_SUITE("cuda") {
    TEST_CASE("moe: a mixture between two products, as a model chains them (CUDA)") { on_cuda(moe_chains); }
}

TEST_SUITE("cpu") {
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
}
