// linear_add with a router, moe_gate_up, moe_down and norm_linear as a model chains them; each against double
// over what it read, and a row's bits, whoever is beside it.
#include <cstdlib>

#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/norm_linear.h"
#include "ops/matrix.h"
#include "ops/moe_layer.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::moe;

namespace {

/// A mixture, the product before it, [model, inner], and one after it.
struct Chain {
    Shape shape;
    int64_t inner;
    Form form = Form::bf16;  // of both products
    bool twins = false;      // experts' router rows are two rows again and again
};

constexpr int64_t kNextRows = 48;

/// Outputs of the graph, in its order.
enum ChainOutput : size_t { kX, kH, kSquares, kLogits, kIds, kY = kIds + 5, kH2, kSquares2, kZ };

class ChainTest {
  public:
    ChainTest(const Device& device, const Chain& chain, unsigned seed, int64_t most)
        : device_(device),
          chain_(chain),
          s_(chain.shape),
          layer_(device, s_, seed),
          router_(device, layer_.store, s_.experts, s_.model, chain.twins),
          norm_(device, seed, s_.model,
                2 / std::sqrt(static_cast<float>(s_.model))),  // logits are a few apart
          first_(random_matrix(layer_.store, {chain.form}, {s_.model}, chain.inner)),
          next_(random_matrix(layer_.store, {chain.form}, {kNextRows}, s_.model)),
          out_proj_(placed(device, first_.weight)),
          last_(placed(device, next_.weight)),
          in_(seed + 1, chain.inner, most),
          residual_(seed + 2, s_.model, most) {
        in_.values() = device.rounded(std::move(in_.values()));
    }

    void check(StepKind kind, const std::vector<int64_t>& counts) {
        CAPTURE(kind_name(kind));
        CAPTURE(s_.name());
        CAPTURE(shape_name({chain_.form}, {s_.model}, chain_.inner));
        AloneRows alone({"x", "h", "squares", "logits", "ids", "weights", "gate", "routed", "shared", "y",
                         "h2", "squares2", "z"},
                        [&](const auto& rows) { return run(kind, rows); });
        for (const int64_t n : counts) {
            CAPTURE(n);
            const StepOutputs out = run(kind, step_rows(n));
            check_values(kind, n, out);
            alone.check(n, out);
        }
    }
    /// The same step twice in one plan: nothing is left of the first one.
    void check_again(StepKind kind, int64_t n) {
        CAPTURE(kind_name(kind));
        CAPTURE(n);
        StepOutputs first = run(kind, step_rows(n)), again = run(kind, step_rows(n), 3);
        first.pop_back(), again.pop_back();  // groups' end is nobody's
        CHECK(first == again);
    }
    /// Of a captured plan.
    int64_t kernels(StepKind kind, int64_t n) {
        device_.backend->weights_complete();  // they are read until then
        return Plan(graph(kind, n), *device_.backend).kernels;
    }

  private:
    Graph graph(StepKind kind, int64_t n) {
        Graph g;
        x_input_ = g.input("in", device_.activation, {n, chain_.inner});
        residual_input_ = g.input("residual", DType::F32, {n, s_.model});
        const NextNorm norm = norm_.next(g, device_, kind);
        const Residual x =
            linear_add(g, "out_proj", x_input_, out_proj_, residual_input_, norm, &router_.weight);
        const auto up = moe_gate_up(g, "up", x, layer_.gate_up, layer_.shared_gate_up,
                                    static_cast<int>(s_.used), kEps, kind);
        const Residual y = moe_down(g, "y", up, x.x, layer_.down, layer_.shared_down, norm);
        Tensor* z = norm_linear(g, "z", y, last_, kEps, kind, DType::F32);
        for (Tensor* t : {x.x, x.h, x.squares, x.logits}) g.output(t);
        add_outputs(g, up, {y.x, y.h, y.squares, z});
        return g;
    }
    StepOutputs run(StepKind kind, const std::vector<int64_t>& rows, int times = 1) {
        const auto n = static_cast<int64_t>(rows.size());
        StepOutputs out = run_graph(
            device_, graph(kind, n),
            [&](Plan& p) {
                set_input(p, x_input_, in_.pick(rows));
                set_input(p, residual_input_, residual_.pick(rows));
            },
            times);
        out[kLogits] = read_logits(device_, kind, out[kLogits], n, s_.experts);
        return by_pair(device_, kind, s_, kIds, std::move(out));
    }

    void check_values(StepKind kind, int64_t n, const StepOutputs& out) {
        const auto rows = step_rows(n);
        const Chosen chosen = Chosen::from(out, kIds);
        check_deferred(device_, kind, norm_, n, out[kX], out[kH], out[kSquares], true);
        check_logits(device_, router_, n, out[kH], out[kLogits]);
        check_groups(device_, chosen, s_.experts);
        check_deferred(device_, kind, norm_, n, out[kY], out[kH2], out[kSquares2]);
        for (int64_t t = 0; t < n; ++t) {
            CAPTURE(t);
            const int64_t row = rows[static_cast<size_t>(t)], width = s_.model;
            check_product("x", first_, in_.row(row), residual_.row(row), n, t, 1, 0, out[kX]);
            const auto [r, error] = factor(out[kSquares], n, t);
            check_choice(device_, s_.used, out[kLogits].data() + t * (s_.experts + 1), s_.experts, r,
                         chosen.ids.data() + t * s_.used, chosen.weights.data() + t * s_.used,
                         chosen.gate[static_cast<size_t>(t)]);
            check_gate_up(device_, layer_, n, t, out[kH].data() + t * width, r, error, chosen);
            check_down(device_, layer_, n, t, out[kX].data() + t * width, chosen, out[kY].data() + t * width);
            const auto [r2, error2] = factor(out[kSquares2], n, t);
            const float* nothing = nullptr;
            check_product("z", next_, out[kH2].data() + t * width, nothing, n, t, r2, error2, out[kZ]);
        }
    }
    /// 1 / rms of row t and how far FP32 may be from it.
    std::pair<double, double> factor(const std::vector<double>& squares, int64_t n, int64_t t) const {
        const auto parts = static_cast<int64_t>(squares.size()) / n;
        return {norm_factor(squares.data() + t * parts, parts, s_.model), factor_error(parts)};
    }
    /// Row t of residual + r x W^T.
    template <typename T>
    void check_product(const char* what, const Matrix& m, const T* x, const float* residual, int64_t n,
                       int64_t t, double r, double r_error, const std::vector<double>& got) {
        const int64_t height = m.weight.rows, cols = m.weight.cols;
        Expected e{height};
        for (const int64_t i : checked_columns(t, n, height, cols)) {
            const Sum sum = row_product(m.values, i, cols, x);
            const double y = (residual != nullptr ? static_cast<double>(residual[i]) : 0) + r * sum.value;
            e.add(i, y,
                  r * sum_bound(sum, cols) + r_error * r * std::fabs(sum.value) + 1.2e-7 * std::fabs(y));
        }
        check_row(device_, what, got.data() + t * height, e, product_tolerance(device_, {chain_.form}));
    }

    const Device& device_;
    const Chain chain_;
    const Shape s_;
    Layer layer_;
    Router router_;
    Norm norm_;
    Matrix first_, next_;
    Weight out_proj_, last_;
    RowPool in_, residual_;
    Tensor *x_input_ = nullptr, *residual_input_ = nullptr;
};

/// Kernels of an answer step of 1 and of 8 rows; 0: not said.
struct Kernels {
    int64_t one = 0, eight = 0;
};
void check_chain(const Device& device, const Chain& chain, unsigned seed, int64_t most,
                 const Kernels& kernels = {}) {
    CAPTURE(seed);
    ChainTest test(device, chain, seed, most);
    for (const StepKind kind : kKinds) {
        test.check(kind, row_counts(device, kind, most));
        test.check_again(kind, std::min<int64_t>(most, 9));
    }
    const bool small = std::getenv("QUERN_TEST_SHARED_BYTES") != nullptr;
    if (kernels.one == 0 || small || device.exact()) return;
    CHECK(test.kernels(StepKind::answer, 1) == kernels.one);
    CHECK(test.kernels(StepKind::answer, 8) == kernels.eight);
}

constexpr Form kFp4 = Form::nvfp4;

/// Products of every form before and after a mixture of every form.
void chain_forms(Device& device) {
    unsigned seed = 90;
    for (const Form form : {Form::bf16, kFp4, Form::f8_row, Form::f8_block})
        check_chain(device, {{512, 48, 80, 40, 4, kFp4, kFp4}, 1040, form}, ++seed, 130, {5, 5});
    check_chain(device, {{512, 48, 80, 9, 3, kFp4, Form::bf16}, 1024}, ++seed, 130);
    check_chain(device, {{512, 48, 80, 9, 3, kFp4, Form::f8_row}, 1024}, ++seed, 130);
    check_chain(device, {{512, 48, 80, 9, 3, Form::bf16, Form::bf16}, 144}, ++seed, 130);
    check_chain(device, {{512, 48, 80, 9, 3, Form::f8_block, Form::f8_block}, 512, Form::f8_block}, ++seed,
                130);
}

/// Many experts, ties, many choices, wide rows.
void chain_shapes(Device& device) {
    unsigned seed = 110;
    check_chain(device, {{512, 16, 32, 256, 8, kFp4, kFp4}, 1024}, ++seed, 64, {4, 5});
    check_chain(device, {{512, 16, 32, 256, 8, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 64, {4, 5});
    check_chain(device, {{80, 48, 80, 5, 4, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 130);
    check_chain(device, {{512, 16, 32, 300, 4, kFp4, kFp4}, 1024}, ++seed, 17);
    check_chain(device, {{512, 16, 32, 40, 10, kFp4, kFp4}, 1024}, ++seed, 51);  // 510 choices
    check_chain(device, {{3072, 16, 32, 20, 4, kFp4, kFp4}, 1024}, ++seed, 17);
    check_chain(device, {{1024, 912, 1024, 10, 8, kFp4, kFp4}, 1024}, ++seed, 9);
}

/// Kernels of 2 to 8 rows: gate and up's alone, down's alone, both; ties, splits that leave warps idle, one expert a row.
void chain_few(Device& device) {
    unsigned seed = 140;
    check_chain(device, {{2048, 16, 32, 256, 8, kFp4, kFp4}, 1024}, ++seed, 9, {4, 5});
    check_chain(device, {{2048, 16, 32, 256, 8, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 9, {4, 5});
    check_chain(device, {{512, 256, 256, 40, 8, kFp4, kFp4}, 1024}, ++seed, 9, {4, 4});
    check_chain(device, {{1280, 256, 256, 40, 5, kFp4, kFp4}, 1024}, ++seed, 9, {4, 4});
    // 35 experts tie: more candidates than are ranked at once, of rows that are left in places' order
    check_chain(device, {{512, 256, 256, 70, 8, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 9, {4, 4});
    check_chain(device, {{1536, 496, 512, 33, 8, kFp4, kFp4}, 1024, Form::bf16, true}, ++seed, 9, {4, 4});
    check_chain(device, {{2048, 512, 512, 3, 1, kFp4, kFp4}, 1024}, ++seed, 9, {4, 4});
    ChainTest(device, {{2048, 256, 256, 24, 8, kFp4, kFp4}, 1024}, ++seed, 9)
        .check(StepKind::answer, {3, 4, 5, 6});
}

/// The 35B's widths.
void chain_model(Device& device) {
    check_chain(device, {{2048, 512, 512, 12, 8, kFp4, kFp4}, 4096}, 130, device.exact() ? 17 : 2100, {4, 4});
}

}  // namespace

DEVICE_TEST_CASE("moe: a mixture between two products, in every form", chain_forms)
DEVICE_TEST_CASE("moe: a mixture between two products, many shapes", chain_shapes)
DEVICE_TEST_CASE("moe: a mixture between two products, kernels of few rows", chain_few)
DEVICE_TEST_CASE("moe: a mixture between two products, as wide as a model's", chain_model)
