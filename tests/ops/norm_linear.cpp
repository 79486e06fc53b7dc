// norm_linear and norm_gate_up, against sums in double over weights decoded by the test; a row's bits,
// whoever is beside it.
#include "ggml-like/ops/norm_linear.h"

#include "ggml-like/error.h"
#include "ggml-like/ops/norm_gate_up.h"
#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

struct NormCase {
    StepKind kind;
    std::vector<int64_t> counts;  // rows of the steps
    int64_t cols;
    std::vector<int64_t> heights;  // of the segments
    std::vector<Form> forms;
};

/// What both ops read: a weight and rows under a norm.
class NormTest {
  public:
    NormTest(const Device& device, NormCase c, unsigned seed, RowOrder order)
        : device_(device),
          c_(std::move(c)),
          store_(seed),
          matrix_(random_matrix(store_, c_.forms, c_.heights, c_.cols)),
          weight_(placed(device, matrix_.weight, order)),
          norm_(Random(seed + 1).normals(c_.cols)),
          x_(seed, c_.cols, *std::max_element(c_.counts.begin(), c_.counts.end())) {
        for (int64_t i = 0; i < c_.cols; ++i) x_.row(0)[i] *= 1e-3f;  // eps counts in this row
    }
    virtual ~NormTest() = default;

    void check(const std::vector<const char*>& names) {
        CAPTURE(kind_name(c_.kind));
        CAPTURE(shape_name(c_.forms, c_.heights, c_.cols));
        AloneRows alone(names, [&](const auto& rows) { return run(rows); });
        for (const int64_t n : c_.counts) {
            CAPTURE(n);
            const auto rows = step_rows(n);
            const StepOutputs outputs = run(rows);
            const NormedInput in = input(rows);
            for (int64_t t = 0; t < n; ++t) {
                CAPTURE(t);
                check_values(in, t, outputs);
            }
            alone.check(n, outputs);
        }
    }

  protected:
    virtual void add_nodes(Graph& g, const Residual& in) = 0;
    virtual void check_values(const NormedInput& in, int64_t t, const StepOutputs& out) = 0;

    NormedInput input(const std::vector<int64_t>& rows) const {
        return {device_, c_.kind, x_.pick(rows), norm_};
    }
    StepOutputs run(const std::vector<int64_t>& rows) {
        const NormedInput made = input(rows);
        Graph g;
        const Residual in = made.declare(g, device_.activation);
        add_nodes(g, in);
        return run_graph(device_, std::move(g), [&](Plan& p) { made.fill(p, in); });
    }
    /// Row i of the matrix times the norm of row t of `in`.
    Sum product(const NormedInput& in, int64_t t, int64_t i) const {
        Sum sum = row_product(matrix_.values, i, c_.cols, in.h.data() + t * c_.cols);
        const double factor = in.factor(t);
        sum.value *= factor, sum.magnitude *= factor;
        return sum;
    }
    double bound(const NormedInput& in, const Sum& sum) const {
        return sum_bound(sum, c_.cols) + factor_error(in.parts) * std::fabs(sum.value);
    }

    const Device& device_;
    const NormCase c_;
    WeightStore store_;
    Matrix matrix_;
    Weight weight_;
    std::vector<float> norm_;
    RowPool x_;
};

class NormLinearTest final : public NormTest {
  public:
    NormLinearTest(const Device& device, const NormCase& c, unsigned seed)
        : NormTest(device, c, seed, RowOrder::stacked) {}

  private:
    void add_nodes(Graph& g, const Residual& in) override {
        for (const DType dtype : {DType::F32, DType::BF16})
            g.output(norm_linear(g, "y", in, weight_, kEps, c_.kind, dtype));
    }
    void check_values(const NormedInput& in, int64_t t, const StepOutputs& out) override {
        Expected e{weight_.rows}, rounded{weight_.rows};
        for (const int64_t i : checked_columns(t, in.rows, weight_.rows, c_.cols)) {
            const Sum sum = product(in, t, i);
            const double most = bound(in, sum), y = sum.value;
            e.add(i, y, most);
            rounded.add(i, y, most + std::ldexp(std::fabs(y) + most, -8));
        }
        const int64_t begin = t * weight_.rows;
        check_row(device_, "y F32", out[0].data() + begin, e, product_tolerance(device_, c_.forms));
        check_row(device_, "y BF16", out[1].data() + begin, rounded);
    }
};

/// The first rows of a matrix, as a weight in its memory: their part of what the whole gives.
class FirstRowsTest final : public NormTest {
  public:
    FirstRowsTest(const Device& device, const NormCase& c, int64_t rows, unsigned seed)
        : NormTest(device, c, seed, RowOrder::stacked), first_(first_rows(matrix_.weight, rows)) {
        device.backend->share_first_rows(first_, weight_);
    }

  private:
    void add_nodes(Graph& g, const Residual& in) override {
        for (const Weight* w : {&weight_, &first_})
            g.output(norm_linear(g, "y", in, *w, kEps, c_.kind, DType::F32));
    }
    void check_values(const NormedInput&, int64_t t, const StepOutputs& out) override {
        const auto row = [&](size_t i, const Weight& w) {
            const auto begin = out[i].begin() + t * w.rows;
            return std::vector<double>(begin, begin + first_.rows);
        };
        CHECK(row(1, first_) == row(0, weight_));
    }

    Weight first_;
};

class GateUpTest final : public NormTest {
  public:
    GateUpTest(const Device& device, const NormCase& c, unsigned seed)
        : NormTest(device, c, seed, RowOrder::paired) {
        for (float& v : norm_)
            v /= std::sqrt(static_cast<float>(c_.cols));  // gates of about 1, where silu is no line
    }

  private:
    void add_nodes(Graph& g, const Residual& in) override {
        g.output(norm_gate_up(g, "y", in, weight_, kEps, c_.kind));
    }
    void check_values(const NormedInput& in, int64_t t, const StepOutputs& out) override {
        const int64_t width = weight_.rows / 2;
        Expected e{width};
        for (const int64_t i : checked_columns(t, in.rows, width, 2 * c_.cols)) {
            const Sum gate = product(in, t, i), up = product(in, t, width + i);
            const double gate_bound = bound(in, gate), up_bound = bound(in, up);
            const double silu = gate.value / (1 + std::exp(-gate.value));
            // |silu'| < 1.1 carries the error of gate; exp is good to a few units in the last place
            e.add(i, silu * up.value,
                  1.1 * gate_bound * (std::fabs(up.value) + up_bound) + std::fabs(silu) * up_bound +
                      1e-6 * (1 + std::fabs(gate.value)) * std::fabs(up.value));
        }
        check_row(device_, "y", out[0].data() + t * width, e);
    }
};

void check_norm_linear(const Device& device, const NormCase& c, unsigned seed) {
    CAPTURE(seed);
    NormLinearTest(device, c, seed).check({"y F32", "y BF16"});
}

void check_gate_up(const Device& device, StepKind kind, const std::vector<int64_t>& counts, int64_t cols,
                   int64_t width, Form form, unsigned seed) {
    CAPTURE(seed);
    GateUpTest(device, {kind, counts, cols, {width, width}, {form, form}}, seed).check({"y"});
}

void norm_linear_forms(Device& device) {
    unsigned seed = 200;
    for (const StepKind kind : kKinds) {
        const auto counts = row_counts(device, kind, 130);
        for (const Form form : kForms) check_norm_linear(device, {kind, {3, 20}, 272, {150}, {form}}, ++seed);
        check_norm_linear(device, {kind, counts, 512, {16}, {Form::f8_block}}, ++seed);
        check_norm_linear(device, {kind, counts, 144, {37}, {Form::nvfp4}}, ++seed);
        check_norm_linear(device, {kind, counts, 256, {64}, {Form::bf16}}, ++seed);
        check_norm_linear(
            device, {kind, counts, 160, {130, 3, 140}, {Form::bf16, Form::nvfp4, Form::f8_block}}, ++seed);
        check_norm_linear(device, {kind, counts, 160, {64, 33, 5}, {Form::nvfp4, Form::nvfp4, Form::nvfp4}},
                          ++seed);
        check_norm_linear(
            device, {kind, counts, 160, {32, 16, 7}, {Form::f8_tensor, Form::f8_row, Form::f16}}, ++seed);
    }
}

void norm_linear_first_rows(Device& device) {
    unsigned seed = 240;
    for (const StepKind kind : kKinds)
        for (const int64_t rows : {16, 144, 400}) {
            CAPTURE(rows);
            for (const Form form : {Form::bf16, Form::f8_row, Form::nvfp4})
                FirstRowsTest(device, {kind, {1, 3, 8}, 1040, {96, 704}, {form, form}}, rows, ++seed)
                    .check({"y", "y of the first rows"});
        }
}

/// Steps of 9 to 64 rows whose warps hold their columns of x (dense_held.cu): one half or two, full or not, a last tile that is not whole,
/// as many tiles as blocks and one more, and some with more than they add up together.
void norm_linear_held(Device& device) {
    const bool small = device.exact();
    unsigned seed = 280;
    for (const Form form : {Form::f8_tensor, Form::f8_row, Form::f8_block, Form::nvfp4})
        check_norm_linear(device,
                          {StepKind::answer, {9, 16, 17, 32, 33, 50, 64}, 2048, {small ? 90 : 2115}, {form}},
                          ++seed);
    for (const Form form : {Form::f8_row, Form::nvfp4}) {
        check_norm_linear(device, {StepKind::answer, {12, 31, 48}, 2000, {small ? 90 : 2112}, {form}},
                          ++seed);
        check_norm_linear(device, {StepKind::answer, {10, 29, 61}, 2048, {small ? 90 : 12320}, {form}},
                          ++seed);
    }
}

/// The widths of both models, and more rows than a block has.
void norm_linear_large(Device& device) {
    const bool small = device.exact();
    unsigned seed = 250;
    for (const StepKind kind : kKinds) {
        const auto counts = row_counts(device, kind);
        for (const int64_t rows : {int64_t{80}, int64_t{small ? 90 : 2100}, int64_t{small ? 100 : 12350}})
            check_norm_linear(device, {kind, {2, 17}, 2048, {rows}, {Form::nvfp4}}, ++seed);
        for (const Form form : {Form::bf16, Form::f8_row, Form::f8_block, Form::nvfp4})
            check_norm_linear(device, {kind, counts, 1040, {small ? 80 : 600}, {form}}, ++seed);
        check_norm_linear(
            device, {kind, {1, 2, 9, 13, 16, 33, 64}, 2048, {small ? 100 : 12350}, {Form::bf16}}, ++seed);
        for (const Form form : {Form::bf16, Form::f8_tensor, Form::nvfp4})  // the width of the 27B
            check_norm_linear(device, {kind, {1, 8, 10, 16, 20, 64}, 5120, {40}, {form}}, ++seed);
        check_norm_linear(
            device, {kind, counts, 2048, {small ? 96 : 1600, 64, 32}, {Form::nvfp4, Form::nvfp4, Form::bf16}},
            ++seed);
    }
    if (small) return;
    // Few tokens of a tall matrix.
    for (const Form form : {Form::bf16, Form::f8_row, Form::f8_block, Form::nvfp4})
        check_norm_linear(device, {StepKind::prompt, {16, 50, 64}, 192, {17008}, {form}}, ++seed);
    // Prompts of more places than blocks, with fewer columns than a ring holds, and with more; and of tokens that L2 has no room for.
    for (const Form form : {Form::bf16, Form::f8_row, Form::f8_block, Form::nvfp4}) {
        for (const int64_t cols : {192, 1040})
            check_norm_linear(device, {StepKind::prompt, {2100}, cols, {4112}, {form}}, ++seed);
        check_norm_linear(device, {StepKind::prompt, {2100}, 6208, {2064}, {form}}, ++seed);
    }
}

struct HeadForm {
    DType dtype;
    ScaleKind scale;
    int64_t cols;
};

/// As tall as a head, so that a block has many tiles. The weight is the backend's own random one.
void check_head(const Device& device, const HeadForm& form, StepKind kind) {
    constexpr int64_t height = 40016, most = 130;
    CAPTURE(std::string(dtype_name(form.dtype)));
    CAPTURE(kind_name(kind));
    WeightSegment segment;
    segment.dtype = form.dtype, segment.scale_kind = form.scale;
    segment.rows = height, segment.cols = form.cols;
    const Weight w = placed(device, Weight("head", {segment}));
    const RowPool x(23, form.cols, most);
    const auto norm = Random(24).normals(form.cols);
    AloneRows alone({"y"}, [&](const std::vector<int64_t>& rows) {
        const NormedInput made(device, kind, x.pick(rows), norm);
        Graph g;
        const Residual in = made.declare(g, device.activation);
        g.output(norm_linear(g, "y", in, w, kEps, kind, DType::F32));
        return run_graph(device, std::move(g), [&](Plan& p) { made.fill(p, in); });
    });
    for (const int64_t n : row_counts(device, kind, most)) {
        CAPTURE(n);
        const auto y = alone.run(step_rows(n));
        const auto other_than_zero =
            std::count_if(y[0].begin(), y[0].end(), [](double v) { return std::fabs(v) > 1e-6; });
        CHECK(other_than_zero > n * height * 99 / 100);
        alone.check(n, y);
    }
}

void norm_linear_head(Device& device) {
    for (const StepKind kind : kKinds)
        for (const HeadForm& form :
             {HeadForm{DType::BF16, ScaleKind::none, 1024}, HeadForm{DType::BF16, ScaleKind::none, 2048},
              HeadForm{DType::F8_E4M3, ScaleKind::per_row, 2048},
              HeadForm{DType::F8_E4M3, ScaleKind::block128, 2048},
              HeadForm{DType::NVFP4, ScaleKind::nvfp4, 2048}})
            check_head(device, form, kind);
}

void norm_gate_up_cases(Device& device) {
    unsigned seed = 700;
    const bool small = device.exact();
    for (const StepKind kind : kKinds) {
        const auto counts = row_counts(device, kind);
        check_gate_up(device, kind, counts, 144, 37, Form::nvfp4, ++seed);
        check_gate_up(device, kind, counts, 256, 64, Form::bf16, ++seed);
        for (const Form form : kForms) check_gate_up(device, kind, {3, 33}, 272, 150, form, ++seed);
        for (const Form form : {Form::bf16, Form::nvfp4})
            check_gate_up(device, kind, {1, 9, 33, 64}, 2048, small ? 24 : 200, form, ++seed);
        for (const Form form : {Form::bf16, Form::f8_row, Form::f8_block, Form::nvfp4}) {
            check_gate_up(device, kind, {1, 8, 10, 16, 20, 64}, 5120, 24, form, ++seed);
            check_gate_up(device, kind, counts, 1040, small ? 40 : 400, form, ++seed);
        }
    }
}

}  // namespace

DEVICE_TEST_CASE("norm_linear in every form, alone and beside others", norm_linear_forms)
DEVICE_TEST_CASE("norm_linear: the first rows of a matrix", norm_linear_first_rows)
DEVICE_TEST_CASE("norm_linear: 9 to 64 rows of an answer whose columns warps hold", norm_linear_held)
DEVICE_TEST_CASE("norm_linear: many rows and many columns", norm_linear_large)
DEVICE_TEST_CASE("norm_gate_up: factor, both products, silu", norm_gate_up_cases)

TEST_SUITE("cuda") {
    TEST_CASE("norm_linear: as tall as a head, alone and beside others (CUDA)") { on_cuda(norm_linear_head); }
}

TEST_SUITE("cpu") {
    TEST_CASE("norm_linear: y is rounded once to its own type") {
        const Device device = cpu_device();
        WeightStore store(9);
        const Matrix m = random_matrix(store, {Form::nvfp4}, {21}, 48);
        const NormedInput made(device, StepKind::answer, Random(9).normals(5 * 48), Random(10).normals(48));
        Graph g;
        const Residual in = made.declare(g, DType::F32);
        for (const DType dtype : {DType::F32, DType::BF16, DType::F16})
            g.output(norm_linear(g, "y", in, m.weight, kEps, StepKind::answer, dtype));
        const auto y = run_graph(device, std::move(g), [&](Plan& p) { made.fill(p, in); });
        for (size_t i = 0; i < y[0].size(); ++i) {
            const auto exact = static_cast<float>(y[0][i]);
            CHECK(y[1][i] == bf16_to_float(float_to_bf16(exact)));
            CHECK(y[2][i] == f16_to_float(float_to_f16(exact)));
        }
    }

    TEST_CASE("norm_linear, norm_gate_up: shapes that do not fit are errors") {
        WeightStore store(13);
        std::vector<double> values;
        const Weight w("w", {store.segment("a", Form::bf16, 4, 32, values)});
        Graph g;
        Tensor *h = g.input("h", DType::F32, {2, 32}), *narrow = g.input("h", DType::F32, {2, 31}),
               *squares = g.input("squares", DType::F32, {2, 1}),
               *three = g.input("squares", DType::F32, {3, 1}),
               *half = g.input("squares", DType::BF16, {2, 1});
        const auto linear = [&](Tensor* rows, Tensor* of) {
            norm_linear(g, "y", {.h = rows, .squares = of}, w, kEps, StepKind::prompt, DType::F32);
        };
        CHECK_NOTHROW(linear(h, squares));
        CHECK_THROWS_AS(linear(narrow, squares), Error);
        CHECK_THROWS_AS(linear(h, three), Error);
        CHECK_THROWS_AS(linear(h, half), Error);
        CHECK_THROWS_AS(norm_gate_up(g, "y", {.h = h, .squares = squares}, w, kEps, StepKind::prompt),
                        Error);  // one segment
    }
}
