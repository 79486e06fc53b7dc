// linear_add, against sums in double over weights decoded by the test; a row's bits, whoever is beside it.
#include "ggml-like/ops/linear_add.h"

#include "ggml-like/error.h"
#include "ggml-like/requantize.h"
#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

struct LinearCase {
    StepKind kind;
    std::vector<int64_t> counts;  // rows of the steps
    int64_t cols;
    std::vector<int64_t> heights;  // of the segments
    std::vector<Form> forms;
    int64_t experts = 0;            // of a router; 0: none
    int64_t before = 0, after = 0;  // columns around x in its memory
};

class LinearTest {
  public:
    LinearTest(const Device& device, LinearCase c, unsigned seed)
        : device_(device),
          c_(std::move(c)),
          store_(seed),
          matrix_(random_matrix(store_, c_.forms, c_.heights, c_.cols)),
          weight_(placed(device, matrix_.weight)),
          norm_(device, seed + 2, weight_.rows),
          x_(seed, c_.cols, most()),
          residual_(seed + 1, weight_.rows, most()) {
        x_.values() = device.rounded(std::move(x_.values()));
        if (c_.experts > 0) router_.emplace(device, store_, c_.experts, weight_.rows);
    }

    void check() {
        CAPTURE(kind_name(c_.kind));
        CAPTURE(shape_name(c_.forms, c_.heights, c_.cols));
        std::vector<const char*> names = {"x'", "h", "squares"};
        if (router_) names.push_back("logits");
        AloneRows alone(names, [&](const auto& rows) { return run(rows); });
        for (const int64_t n : c_.counts) {
            CAPTURE(n);
            const StepOutputs outputs = run(step_rows(n));
            check_values(n, outputs);
            alone.check(n, outputs);
        }
    }
    /// x', h, squares and, with a router, logits.
    StepOutputs run(const std::vector<int64_t>& rows) const {
        const auto n = static_cast<int64_t>(rows.size()), stride = c_.before + c_.cols + c_.after;
        Graph g;
        Tensor* wide = g.input("x", device_.activation, {n, stride});
        Tensor* residual = g.input("residual", DType::F32, {n, weight_.rows});
        const Residual y = linear_add(g, "y", g.columns("v", wide, c_.before, c_.cols), weight_, residual,
                                      norm_.next(g, device_, c_.kind), router_ ? &router_->weight : nullptr);
        for (Tensor* t : {y.x, y.h, y.squares}) g.output(t);
        if (router_) g.output(y.logits);
        StepOutputs out = run_graph(device_, std::move(g), [&](Plan& p) {
            set_input(p, wide, padded(x_.pick(rows), n));
            set_input(p, residual, residual_.pick(rows));
        });
        if (router_) out[3] = read_logits(device_, c_.kind, out[3], n, router_->experts);
        return out;
    }
    /// The matrix in another form, from now on.
    void replace(Weight weight, Matrix matrix) {
        weight_ = std::move(weight);
        matrix_ = std::move(matrix);
    }
    void check_values(int64_t n, const StepOutputs& out) {
        const auto rows = step_rows(n);
        const int64_t width = weight_.rows;
        for (int64_t t = 0; t < n; ++t) {
            CAPTURE(t);
            const int64_t row = rows[static_cast<size_t>(t)];
            Expected e{width};
            for (const int64_t i : checked_columns(t, n, width, c_.cols)) {
                const Sum sum = row_product(matrix_.values, i, c_.cols, x_.row(row));
                const double y = static_cast<double>(residual_.row(row)[i]) + sum.value;
                e.add(i, y, sum_bound(sum, c_.cols) + 1.2e-7 * std::fabs(y));
            }
            check_row(device_, "x'", out[0].data() + t * width, e, product_tolerance(device_, c_.forms));
        }
        check_deferred(device_, c_.kind, norm_, n, out[0], out[1], out[2], c_.experts > 0);
        if (router_) check_logits(device_, *router_, n, out[1], out[3]);
    }
    const Matrix& matrix() const { return matrix_; }

  private:
    int64_t most() const { return *std::max_element(c_.counts.begin(), c_.counts.end()); }
    std::vector<float> padded(const std::vector<float>& x, int64_t n) const {
        const int64_t stride = c_.before + c_.cols + c_.after;
        std::vector<float> wide(static_cast<size_t>(n * stride), 99.0f);
        for (int64_t t = 0; t < n; ++t)
            std::copy_n(x.data() + t * c_.cols, c_.cols, wide.data() + t * stride + c_.before);
        return wide;
    }

    const Device& device_;
    const LinearCase c_;
    WeightStore store_;
    Matrix matrix_;
    Weight weight_;
    Norm norm_;
    std::optional<Router> router_;
    RowPool x_, residual_;
};

void check_linear_add(const Device& device, const LinearCase& c, unsigned seed) {
    CAPTURE(seed);
    LinearTest(device, c, seed).check();
}

void linear_add_forms(Device& device) {
    unsigned seed = 100;
    for (const StepKind kind : kKinds)
        for (const Form form : kForms) {
            check_linear_add(device, {kind, row_counts(device, kind, 130), 144, {48}, {form}}, ++seed);
            check_linear_add(device, {kind, {2, 16}, 272, {304}, {form}}, ++seed);  // three row blocks of FP8
            check_linear_add(device, {kind, {33, 64}, 32, {16}, {form}}, ++seed);
            check_linear_add(device, {kind, {3}, 32, {32}, {form}, 0, 16, 32},
                             ++seed);  // a view of some columns
        }
}

void linear_add_segments(Device& device) {
    const Form nvfp4 = Form::nvfp4;
    for (const StepKind kind : kKinds) {
        const auto counts = row_counts(device, kind, 130);
        check_linear_add(device, {kind, counts, 160, {64, 32, 16}, {nvfp4, nvfp4, nvfp4}}, 1);
        check_linear_add(device, {kind, counts, 160, {128, 16, 144}, {Form::bf16, nvfp4, Form::f8_block}, 9},
                         2);
        check_linear_add(device,
                         {kind, counts, 160, {32, 16, 16}, {Form::f8_tensor, Form::f8_row, Form::f16}}, 3);
    }
}

/// A router: experts and their number plus one beside multiples of 8, more of them than a block has threads.
void linear_add_router(Device& device) {
    unsigned seed = 150;
    for (const StepKind kind : kKinds)
        for (const Form form : {Form::bf16, Form::f8_row, Form::nvfp4}) {
            const auto counts = row_counts(device, kind, 130);
            check_linear_add(device, {kind, counts, 144, {80}, {form}, 7}, ++seed);
            check_linear_add(device, {kind, counts, 272, {256}, {form}, 40}, ++seed);
            check_linear_add(device, {kind, {1, 8, 33}, 64, {64}, {form}, 300}, ++seed);
        }
}

/// Widths of the 27B's projections: a GPU's shared memory does not hold 16 such rows, nor 8 of the widest.
void linear_add_wide(Device& device) {
    unsigned seed = 500;
    for (const Form form : {Form::bf16, Form::f8_block, Form::nvfp4}) {
        check_linear_add(device, {StepKind::answer, {1, 3, 5, 8, 12, 16, 20, 64}, 17408, {32}, {form}},
                         ++seed);
        check_linear_add(device, {StepKind::prompt, {1, 20, 65}, 17408, {32}, {form}}, ++seed);
    }
}

/// The widths of a model, with its router; columns that tiles do not divide; more rows than one block has.
void linear_add_large(Device& device) {
    unsigned seed = 300;
    const bool small = device.exact();
    for (const StepKind kind : kKinds) {
        const auto counts = row_counts(device, kind);
        for (const Form form : {Form::nvfp4, Form::bf16})
            check_linear_add(device, {kind, counts, 4096, {small ? 256 : 2048}, {form}, 256}, ++seed);
        for (const Form form : {Form::f8_row, Form::f8_block})
            check_linear_add(device, {kind, counts, 512, {small ? 128 : 2048}, {form}, 256}, ++seed);
        for (const Form form : {Form::bf16, Form::f8_row, Form::f8_block, Form::nvfp4})
            check_linear_add(device, {kind, counts, 1040, {small ? 80 : 400}, {form}}, ++seed);
    }
    // On 132 multiprocessors blocks of the router have 112 tokens.
    check_linear_add(device,
                     {StepKind::prompt, {small ? 20 : 2600}, 512, {small ? 128 : 2048}, {Form::bf16}, 256},
                     ++seed);
    // Products of more than 64 tokens, in every size that a tile can have, and of more than one tile holds, cut evenly: by blocks of
    // all columns, and by blocks that share the columns. On 132 multiprocessors blocks of the first matrix have 80 rows instead of 128
    // up to 256 tokens.
    for (const Form form : {Form::bf16, Form::f8_row, Form::f8_block, Form::nvfp4}) {
        const std::vector<int64_t> tokens = {70, 90, 100, 140, 180, 200, 220, 250, 380};
        check_linear_add(device, {StepKind::prompt, tokens, 336, {small ? 1200 : 8464}, {form}}, ++seed);
        check_linear_add(device,
                         {StepKind::prompt, {193, 300, 380, 520, 1020}, 1040, {small ? 80 : 2048}, {form}},
                         ++seed);
    }
}

/// So many columns of x' that a block of a GPU kernel has many tiles, some of them finished together.
void linear_add_tall(Device& device) {
    const bool small = device.exact();
    unsigned seed = 350;
    const std::vector<int64_t> few = {1, 2, 5, 8, 16};
    for (const Form form : {Form::bf16, Form::f8_row, Form::nvfp4}) {
        check_linear_add(device, {StepKind::answer, {1, 8}, 528, {small ? 496 : 19232}, {form}}, ++seed);
        check_linear_add(device, {StepKind::answer, few, 272, {small ? 160 : 6416}, {form}}, ++seed);
        check_linear_add(device, {StepKind::answer, {3, 17}, 2048, {small ? 64 : 2144}, {form}}, ++seed);
    }
    check_linear_add(device, {StepKind::answer, {1, 2, 9, 40}, 6144, {small ? 64 : 2144}, {Form::nvfp4}},
                     ++seed);
}

/// Requantized bytes take the place of what was there.
void place_again(Device& device) {
    const std::vector<Form> forms = {Form::bf16, Form::bf16};
    LinearTest test(device, {StepKind::answer, {3}, 144, {40, 8}, forms}, 21);
    const Matrix first = test.matrix();
    Weight stored = first.weight;
    device.backend->place_apart(stored, RowOrder::stacked);
    test.replace(stored, first);
    test.check();
    for (const DenseFormat format : {DenseFormat::fp8, DenseFormat::nvfp4}) {
        Weight changed = requantized_form(first.weight, format);
        const auto memory = requantize(first.weight, changed, 2);
        Matrix expected{changed, {}};
        std::vector<float> row(144);
        for (int64_t r = 0; r < 48; ++r) {
            dequantize_row(changed, r, row.data());
            expected.values.insert(expected.values.end(), row.begin(), row.end());
        }
        changed.placed = stored.placed;
        device.backend->place_apart(changed, RowOrder::stacked);
        stored = changed;
        test.replace(stored, expected);
        test.check();
    }
}

/// x' with zeros that are stored, or with no_residual.
std::vector<double> run_without_residual(const Device& device, const Weight& w, const Norm& norm,
                                         StepKind kind, int64_t rows, bool stored) {
    Graph g;
    Tensor* x = g.input("x", device.activation, {rows, w.cols});
    Tensor* zeros =
        stored ? g.input("zeros", DType::F32, {rows, w.rows}) : no_residual(g, "nothing", rows, w.rows, kind);
    g.output(linear_add(g, "y", x, w, zeros, norm.next(g, device, kind)).x);
    return run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, x, device.rounded(Random(4).normals(rows * w.cols)));
        if (stored) set_input(p, zeros, std::vector<float>(static_cast<size_t>(rows * w.rows)));
    })[0];
}

void linear_add_nothing(Device& device) {
    for (const StepKind kind : kKinds)
        for (const Form form : {Form::bf16, Form::f8_row, Form::nvfp4})
            for (const int64_t height : {48, 2048}) {
                CAPTURE(kind_name(kind));
                CAPTURE(shape_name({form}, {height}, 256));
                WeightStore store(14);
                const Weight w = placed(device, random_matrix(store, {form}, {height}, 256).weight);
                const Norm norm(device, 14, height);
                for (const int64_t rows : {1, 3, 9, 33}) {
                    CAPTURE(rows);
                    const auto run = [&](bool stored) {
                        return run_without_residual(device, w, norm, kind, rows, stored);
                    };
                    CHECK(run(false) == run(true));
                }
            }
}

}  // namespace

DEVICE_TEST_CASE("linear_add in every form, alone and beside others", linear_add_forms)
DEVICE_TEST_CASE("linear_add of a sum without a residual", linear_add_nothing)
DEVICE_TEST_CASE("linear_add: stacked segments keep their own formats and scales", linear_add_segments)
DEVICE_TEST_CASE("linear_add: logits of a router", linear_add_router)
DEVICE_TEST_CASE("linear_add: rows wider than shared memory", linear_add_wide)
DEVICE_TEST_CASE("linear_add: many rows and many columns", linear_add_large)
DEVICE_TEST_CASE("linear_add: few activations, many tiles a block", linear_add_tall)
DEVICE_TEST_CASE("linear_add: a weight placed again in FP8 and NVFP4", place_again)

TEST_SUITE("cpu") {
    TEST_CASE("linear_add: odd shapes, and segments of any mix of formats") {
        const Device device = cpu_device();
        unsigned seed = 400;
        for (const StepKind kind : kKinds) {
            for (const Form form : kForms) {
                check_linear_add(device, {kind, {3}, 16, {1}, {form}}, ++seed);
                check_linear_add(device, {kind, {3}, 32, {9}, {form}, 2, 17, 31}, ++seed);
                if (form != Form::nvfp4) check_linear_add(device, {kind, {5}, 131, {130}, {form}}, ++seed);
            }
            const std::vector<Form> mix = {Form::bf16, Form::nvfp4, Form::f8_block, Form::f8_row};
            check_linear_add(device, {kind, {4}, 160, {130, 3, 140, 1}, mix}, ++seed);
            check_linear_add(
                device, {kind, {4, 70}, 160, {64, 33, 5}, {Form::nvfp4, Form::nvfp4, Form::nvfp4}}, ++seed);
            check_linear_add(device, {kind, {1}, 160, {1, 1, 1}, {Form::f16, Form::f32, Form::f8_tensor}},
                             ++seed);
        }
    }

    TEST_CASE("linear_add: the number of threads does not change a bit") {
        const LinearCase c{StepKind::answer, {3}, 512, {500, 77}, {Form::nvfp4, Form::bf16}, 20};
        const Device one = cpu_device(1);
        const StepOutputs expected = LinearTest(one, c, 11).run(step_rows(3));
        for (const int threads : {2, 5}) {
            const Device device = cpu_device(threads);
            CHECK(LinearTest(device, c, 11).run(step_rows(3)) == expected);
        }
    }

    TEST_CASE("linear_add: h is rounded to the next norm's activation, logits are those of the rounded h") {
        const Device device = cpu_device();
        WeightStore store(9);
        const Matrix m = random_matrix(store, {Form::nvfp4}, {48}, 32);
        const Router router(device, store, 5, 48);
        const Norm norm(device, 9, 48);
        const auto x = Random(9).normals(5 * 32), residual = Random(10).normals(5 * 48);
        Graph g;
        Tensor *in = g.input("x", DType::F32, {5, 32}), *add = g.input("residual", DType::F32, {5, 48});
        NextNorm next = norm.next(g, device, StepKind::prompt);
        next.activation = DType::BF16;
        const Residual y = linear_add(g, "y", in, m.weight, add, next, &router.weight);
        for (Tensor* t : {y.x, y.h, y.squares, y.logits}) g.output(t);
        const auto out = run_graph(device, std::move(g), [&](Plan& p) {
            set_input(p, in, x);
            set_input(p, add, residual);
        });
        const Device rounding{.activation = DType::BF16};  // of the test's own h
        check_deferred(rounding, StepKind::prompt, norm, 5, out[0], out[1], out[2], true);
        check_logits(device, router, 5, out[1], read_logits(device, StepKind::prompt, out[3], 5, 5));
    }

    TEST_CASE("linear_add: shapes and formats that do not fit are errors") {
        const Device device = cpu_device();
        WeightStore store(13);
        std::vector<double> values;
        const Weight w("w", {store.segment("a", Form::bf16, 4, 32, values)});
        const Norm norm(device, 13, 4), wide(device, 13, 5);
        Graph g;
        const NextNorm next = norm.next(g, device, StepKind::prompt);
        Tensor *x = g.input("x", DType::F32, {2, 32}), *narrow = g.input("x", DType::F32, {2, 31}),
               *residual = g.input("r", DType::F32, {2, 4});
        CHECK_NOTHROW(linear_add(g, "y", x, w, residual, next));
        Tensor* repeated = no_residual(g, "nothing", 2, 4, StepKind::prompt);
        CHECK_NOTHROW(linear_add(g, "y", x, w, repeated, next));
        CHECK_THROWS_AS(linear_add(g, "y", x, w, repeated, norm.next(g, device, StepKind::answer)), Error);
        Tensor* zeros = g.zeros("zeros", DType::F32, {2, 4});
        CHECK_NOTHROW(linear_add(g, "y", x, w, residual, next, nullptr, {.zeros = zeros}));
        CHECK_THROWS_AS(linear_add(g, "y", x, w, repeated, next, nullptr, {.zeros = zeros}), Error);
        CHECK_THROWS_AS(linear_add(g, "y", narrow, w, residual, next), Error);
        CHECK_THROWS_AS(linear_add(g, "y", x, w, x, next), Error);
        CHECK_THROWS_AS(linear_add(g, "y", x, w, g.input("r", DType::BF16, {2, 4}), next), Error);
        CHECK_THROWS_AS(linear_add(g, "y", x, w, residual, wide.next(g, device, StepKind::prompt)), Error);
        CHECK_THROWS_AS(linear_add(g, "y", x, w, residual, next, &w), Error);  // a router of x, not of x'
        WeightSegment odd = store.segment("a", Form::nvfp4, 4, 32, values);
        odd.cols = 24;
        CHECK_THROWS_AS(
            linear_add(g, "y", g.input("x", DType::F32, {2, 24}), Weight("w", {odd}), residual, next), Error);
        WeightSegment no_scale = store.segment("a", Form::nvfp4, 4, 32, values);
        no_scale.scale_kind = ScaleKind::none;
        CHECK_THROWS_AS(linear_add(g, "y", x, Weight("w", {no_scale}), residual, next), Error);
    }
}
