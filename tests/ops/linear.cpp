// linear_add, norm_linear and norm_gate_up, against sums in double over weights decoded by the test.
#include <fmt/format.h>

#include "ggml-like/error.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/norm_gate_up.h"
#include "ggml-like/ops/norm_linear.h"
#include "ggml-like/requantize.h"
#include "ops/harness.h"
#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;
constexpr int64_t kTokens[] = {1, 2, 7, 8, 9, 33, 64, 130};

struct Matrix {
    Weight weight;
    std::vector<double> values;

    Sum product(int64_t row, const double* x) const {
        Sum sum;
        for (int64_t k = 0; k < weight.cols; ++k)
            sum.add(values[static_cast<size_t>(row * weight.cols + k)], x[k]);
        return sum;
    }
};

Matrix random_matrix(WeightStore& store, const std::vector<Form>& forms, const std::vector<int64_t>& rows,
                     int64_t cols) {
    Matrix m;
    std::vector<WeightSegment> segments;
    for (size_t i = 0; i < rows.size(); ++i)
        segments.push_back(store.segment(fmt::format("s{}", i), forms[i], rows[i], cols, m.values));
    m.weight = Weight("w", segments);
    return m;
}

/// residual + h W^T; the error of h relative to its own size adds to that of the sum.
Expected expect_add(const Matrix& m, const std::vector<double>& h, const std::vector<float>& residual,
                    double h_error) {
    Expected e;
    const int64_t tokens = static_cast<int64_t>(h.size()) / m.weight.cols;
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t r = 0; r < m.weight.rows; ++r) {
            const Sum sum = m.product(r, h.data() + t * m.weight.cols);
            const double add =
                residual.empty() ? 0
                                 : static_cast<double>(residual[static_cast<size_t>(t * m.weight.rows + r)]);
            const double y = add + sum.value;
            e.add(y, sum_bound(sum, m.weight.cols) + h_error * sum.magnitude + 1.2e-7 * std::fabs(y));
        }
    return e;
}

std::vector<double> doubles(const std::vector<float>& v) { return {v.begin(), v.end()}; }

// ---- linear_add

struct LinearCase {
    int64_t tokens, cols;
    std::vector<int64_t> rows;  // of the segments
    std::vector<Form> forms;
    int64_t before = 0, after = 0;  // columns around x in its memory
};

std::vector<double> run_linear_add(const Device& device, const Weight& w, const LinearCase& c,
                                   const std::vector<float>& x, const std::vector<float>& residual) {
    const int64_t tokens = static_cast<int64_t>(x.size()) / c.cols, stride = c.before + c.cols + c.after;
    Graph g;
    Tensor* wide = g.input("x", device.activation, {tokens, stride});
    Tensor* add = g.input("residual", DType::F32, {tokens, w.rows});
    g.output(linear_add(g, "y", g.columns("v", wide, c.before, c.cols), w, add));
    return run_graph(device, std::move(g), [&](Plan& p) {
        std::vector<float> padded(static_cast<size_t>(tokens * stride), 99.0f);
        for (int64_t t = 0; t < tokens; ++t)
            std::copy_n(x.data() + t * c.cols, c.cols, padded.data() + t * stride + c.before);
        set_input(p, wide, padded);
        set_input(p, add, residual);
    })[0];
}

void check_linear_add(const Device& device, const LinearCase& c, unsigned seed) {
    CAPTURE(seed);
    CAPTURE(c.tokens);
    CAPTURE(c.cols);
    CAPTURE(std::string(form_name(c.forms[0])));
    WeightStore store(seed);
    const Matrix m = random_matrix(store, c.forms, c.rows, c.cols);
    const Weight w = placed(device, m.weight);
    Random random(seed);
    const auto x = device.rounded(random.normals(c.tokens * c.cols));
    const auto residual = random.normals(c.tokens * w.rows);
    const auto y = run_linear_add(device, w, c, x, residual);
    check_close(device, y, expect_add(m, doubles(x), residual, 0));
    if (!device.same_bits(c.tokens)) return;
    for (const int64_t t : some_rows(c.tokens))
        CHECK(run_linear_add(device, w, c, rows_of(x, c.cols, t, 1), rows_of(residual, w.rows, t, 1)) ==
              rows_of(y, w.rows, t, 1));
}

void linear_add_forms(Device& device) {
    unsigned seed = 100;
    for (const Form form : kForms) {
        for (const int64_t tokens : kTokens) check_linear_add(device, {tokens, 144, {37}, {form}}, ++seed);
        check_linear_add(device, {2, 272, {300}, {form}}, ++seed);  // three row blocks of FP8
        check_linear_add(device, {65, 32, {9}, {form}}, ++seed);
        check_linear_add(device, {3, 32, {20}, {form}, 16, 32}, ++seed);  // a view of some columns
    }
}

void linear_add_segments(Device& device) {
    const Form nvfp4 = Form::nvfp4;
    for (const int64_t tokens : {1, 4, 9, 70}) {
        check_linear_add(device, {tokens, 160, {64, 33, 5}, {nvfp4, nvfp4, nvfp4}}, 1);
        check_linear_add(device, {tokens, 160, {130, 16, 140}, {Form::bf16, nvfp4, Form::f8_block}}, 2);
        check_linear_add(device, {tokens, 160, {32, 16, 7}, {Form::f8_tensor, Form::f8_row, Form::f16}}, 3);
    }
}

/// Widths of the 27B's projections: the GPU's shared memory does not hold 16 such rows, nor 8 of the widest.
void linear_add_wide(Device& device) {
    for (const Form form : {Form::bf16, Form::f8_block, Form::nvfp4})
        for (const int64_t tokens : {1, 3, 5, 8, 12, 16, 20})
            check_linear_add(device, {tokens, 17408, {24}, {form}}, 500 + static_cast<unsigned>(tokens));
}

/// Shapes that GPU kernels cut into large tiles, or share among blocks along the columns.
void linear_add_large(Device& device) {
    unsigned seed = 300;
    for (const Form form : {Form::bf16, Form::nvfp4}) {
        check_linear_add(device, {260, 336, {7700}, {form}}, ++seed);
        check_linear_add(device, {100, 336, {7700}, {form}}, ++seed);
        check_linear_add(device, {40, 1040, {70}, {form}}, ++seed);
        check_linear_add(device, {40, 272, {70}, {form}}, ++seed);
    }
}

/// So many rows that a block of a GPU kernel has many tile groups, some of them finished together.
void linear_add_tall(Device& device) {
    const int64_t rows = device.exact() ? 500 : 19237;
    unsigned seed = 350;
    for (const Form form : {Form::bf16, Form::f8_row, Form::nvfp4}) {
        check_linear_add(device, {1, 1040, {rows}, {form}}, ++seed);
        for (const int64_t tokens : {1, 2, 5, 8, 16})
            check_linear_add(device, {tokens, 272, {rows / 3}, {form}}, ++seed);
        check_linear_add(device, {8, 1040, {rows / 3}, {form}}, ++seed);
        check_linear_add(device, {16, 2048, {rows / 9}, {form}}, ++seed);
        check_linear_add(device, {3, 4096, {rows / 9}, {form}}, ++seed);
    }
    check_linear_add(device, {2, 6144, {rows / 9}, {Form::nvfp4}}, ++seed);
}

/// Requantized bytes take the place of what was there.
void place_again(Device& device) {
    WeightStore store(21);
    Matrix m = random_matrix(store, {Form::bf16, Form::bf16}, {40, 8}, 144);
    Weight stored = m.weight;
    device.backend->place_apart(stored, RowOrder::stacked);
    Random random(21);
    const auto x = device.rounded(random.normals(3 * 144)), residual = random.normals(3 * 48);
    const LinearCase c{3, 144, {40, 8}, {Form::bf16, Form::bf16}};
    check_close(device, run_linear_add(device, stored, c, x, residual),
                expect_add(m, doubles(x), residual, 0));
    for (const DenseFormat format : {DenseFormat::fp8, DenseFormat::nvfp4}) {
        Weight changed = requantized_form(m.weight, format);
        const auto memory = requantize(m.weight, changed, 2);
        Matrix expected{changed, {}};
        std::vector<float> row(144);
        for (int64_t r = 0; r < 48; ++r) {
            dequantize_row(changed, r, row.data());
            expected.values.insert(expected.values.end(), row.begin(), row.end());
        }
        changed.placed = stored.placed;
        device.backend->place_apart(changed, RowOrder::stacked);
        stored = changed;
        check_close(device, run_linear_add(device, stored, c, x, residual),
                    expect_add(expected, doubles(x), residual, 0));
    }
}

// ---- norm_linear

std::vector<double> run_norm_linear(const Device& device, const Weight& w, const Tensor& norm,
                                    const std::vector<float>& x, DType activation, DType dtype) {
    Graph g;
    Tensor* in = g.input("x", DType::F32, {static_cast<int64_t>(x.size()) / w.cols, w.cols});
    g.output(norm_linear(g, "y", in, g.external(norm), w, kEps, activation, dtype));
    return run_graph(device, std::move(g), [&](Plan& p) { set_input(p, in, x); })[0];
}

/// o / rms(o) * norm, in double.
std::vector<double> normed(const std::vector<float>& x, const std::vector<float>& norm) {
    std::vector<double> h;
    for (size_t begin = 0; begin < x.size(); begin += norm.size()) {
        double sum = 0;
        for (size_t i = 0; i < norm.size(); ++i) sum += static_cast<double>(x[begin + i]) * x[begin + i];
        const double rms = std::sqrt(sum / static_cast<double>(norm.size()) + kEps);
        for (size_t i = 0; i < norm.size(); ++i) h.push_back(x[begin + i] / rms * norm[i]);
    }
    return h;
}

/// How far a norm over n elements, summed one by one in FP32, may be off.
double norm_error(int64_t n) { return std::ldexp(static_cast<double>(n) + 8, -24); }

void check_norm_linear(const Device& device, int64_t tokens, int64_t cols, int64_t rows, Form form,
                       unsigned seed) {
    CAPTURE(seed);
    CAPTURE(tokens);
    CAPTURE(cols);
    CAPTURE(std::string(form_name(form)));
    WeightStore store(seed);
    const Matrix m = random_matrix(store, {form}, {rows}, cols);
    const Weight w = placed(device, m.weight);
    Random random(seed);
    auto x = random.normals(tokens * cols);
    for (int64_t i = 0; i < cols; ++i) x[static_cast<size_t>(i)] *= 1e-3f;  // eps counts in the first row
    const auto norm = random.normals(cols);
    Guarded norm_memory(device, "norm", DType::F32, Place::weight, {cols});
    norm_memory.set(norm);
    const auto run = [&](const std::vector<float>& rows_in, DType dtype) {
        return run_norm_linear(device, w, norm_memory.tensor(), rows_in, device.activation, dtype);
    };
    const Expected expected = expect_add(m, normed(x, norm), {}, norm_error(cols));
    const auto y = run(x, DType::F32);
    check_close(device, y, expected);
    const auto rounded = run(x, DType::BF16);
    CHECK(relative_error(rounded, expected.value) < 1e-2);
    if (!device.same_bits(tokens)) return;
    for (const int64_t t : some_rows(tokens)) {
        const auto row = rows_of(x, cols, t, 1);
        CHECK(run(row, DType::F32) == rows_of(y, rows, t, 1));
        CHECK(run(row, DType::BF16) == rows_of(rounded, rows, t, 1));
    }
}

void norm_linear_forms(Device& device) {
    unsigned seed = 200;
    for (const int64_t tokens : kTokens) {
        check_norm_linear(device, tokens, 144, 37, Form::nvfp4, ++seed);
        check_norm_linear(device, tokens, 256, 64, Form::bf16, ++seed);
    }
    for (const Form form : kForms) check_norm_linear(device, 3, 272, 150, form, ++seed);
    for (const int64_t rows : {80, 2100, device.exact() ? 90 : 12350})
        check_norm_linear(device, 2, 2048, rows, Form::nvfp4, ++seed);
    for (const Form form : {Form::bf16, Form::f8_tensor, Form::nvfp4})  // the width of the 27B
        for (const int64_t tokens : {1, 8, 10, 16, 20})
            check_norm_linear(device, tokens, 5120, 40, form, ++seed);
}

/// As tall as a head, so that a block has many tiles: a row has the bits alone that it has beside others,
/// which go through another kernel. Weights are the backend's own random ones.
void norm_linear_tall(Device& device) {
    struct {
        DType dtype;
        ScaleKind scale;
        int64_t cols;
    } constexpr kKinds[] = {{DType::BF16, ScaleKind::none, 1024},
                            {DType::F8_E4M3, ScaleKind::per_row, 2048},
                            {DType::NVFP4, ScaleKind::nvfp4, 2048}};
    constexpr int64_t tokens = 3, rows = 40005;
    for (const auto& kind : kKinds) {
        CAPTURE(static_cast<int>(kind.dtype));
        WeightSegment segment;
        segment.dtype = kind.dtype, segment.scale_kind = kind.scale;
        segment.rows = rows, segment.cols = kind.cols;
        const Weight w = placed(device, Weight("head", {segment}));
        device.backend->weights_complete();
        Random random(23);
        const auto x = random.normals(tokens * kind.cols), norm = random.normals(kind.cols);
        Guarded norm_memory(device, "norm", DType::F32, Place::weight, {kind.cols});
        norm_memory.set(norm);
        const auto y = run_norm_linear(device, w, norm_memory.tensor(), x, device.activation, DType::F32);
        for (int64_t t = 0; t < tokens; ++t) {
            const auto row = rows_of(y, rows, t, 1);
            CHECK(run_norm_linear(device, w, norm_memory.tensor(), rows_of(x, kind.cols, t, 1),
                                  device.activation, DType::F32) == row);
            CHECK(std::count_if(row.begin(), row.end(), [](double v) { return std::abs(v) > 1e-6; }) >
                  rows * 99 / 100);
        }
    }
}

// ---- norm_gate_up

struct GateUpCase {
    int64_t tokens, cols, width;
    Form form;
};

/// silu(gate h) * (up h); |silu'| < 1.1 carries the error of gate.
Expected expect_gate_up(const Matrix& m, const std::vector<double>& h, double h_error) {
    const int64_t width = m.weight.rows / 2;
    const Expected both = expect_add(m, h, {}, h_error);
    Expected e;
    for (size_t t = 0; t < both.value.size(); t += static_cast<size_t>(2 * width))
        for (size_t i = t; i < t + static_cast<size_t>(width); ++i) {
            const size_t j = i + static_cast<size_t>(width);
            const double gate = both.value[i], up = both.value[j], silu = gate / (1 + std::exp(-gate));
            // exp is good to a few units in the last place
            e.add(silu * up, 1.1 * both.bound[i] * (std::fabs(up) + both.bound[j]) +
                                 std::fabs(silu) * both.bound[j] +
                                 1e-6 * (1 + std::fabs(gate)) * std::fabs(up));
        }
    return e;
}

void check_gate_up(const Device& device, const GateUpCase& c, unsigned seed) {
    CAPTURE(seed);
    CAPTURE(c.tokens);
    CAPTURE(c.cols);
    CAPTURE(std::string(form_name(c.form)));
    WeightStore store(seed);
    const Matrix m = random_matrix(store, {c.form, c.form}, {c.width, c.width}, c.cols);
    const Weight w = placed(device, m.weight, RowOrder::paired);
    Random random(seed);
    auto x = random.normals(c.tokens * c.cols), norm = random.normals(c.cols);
    for (float& v : norm)
        v /= std::sqrt(static_cast<float>(c.cols));  // gates of about 1, where silu is no line
    Guarded norm_memory(device, "norm", DType::F32, Place::weight, {c.cols});
    norm_memory.set(norm);
    const auto run = [&](int64_t begin, int64_t count) {
        Graph g;
        Tensor* in = g.input("x", DType::F32, {count, c.cols});
        g.output(norm_gate_up(g, "y", in, g.external(norm_memory.tensor()), w, kEps, device.activation));
        return run_graph(device, std::move(g),
                         [&](Plan& p) { set_input(p, in, rows_of(x, c.cols, begin, count)); })[0];
    };
    const auto y = run(0, c.tokens);
    check_close(device, y, expect_gate_up(m, normed(x, norm), norm_error(c.cols)));
    if (!device.same_bits(c.tokens)) return;
    for (const int64_t t : some_rows(c.tokens)) CHECK(run(t, 1) == rows_of(y, c.width, t, 1));
}

void norm_gate_up_cases(Device& device) {
    unsigned seed = 700;
    for (const int64_t tokens : kTokens) {
        check_gate_up(device, {tokens, 144, 37, Form::nvfp4}, ++seed);
        check_gate_up(device, {tokens, 256, 64, Form::bf16}, ++seed);
    }
    for (const Form form : kForms) check_gate_up(device, {3, 272, 150, form}, ++seed);
    for (const Form form : {Form::bf16, Form::f8_row, Form::nvfp4})
        for (const int64_t tokens : {1, 8, 10, 16, 20})
            check_gate_up(device, {tokens, 5120, 24, form}, ++seed);
}

}  // namespace

DEVICE_TEST_CASE("linear_add in every form, alone and in a batch", linear_add_forms)
DEVICE_TEST_CASE("linear_add: many rows and many columns", linear_add_large)
DEVICE_TEST_CASE("linear_add: few activations, many tiles a block", linear_add_tall)
DEVICE_TEST_CASE("linear_add: a weight placed again in FP8 and NVFP4", place_again)
DEVICE_TEST_CASE("linear_add: stacked segments keep their own formats and scales", linear_add_segments)
DEVICE_TEST_CASE("linear_add: rows wider than shared memory", linear_add_wide)
DEVICE_TEST_CASE("norm_linear: norm, product, one rounding", norm_linear_forms)
DEVICE_TEST_CASE("norm_gate_up: norm, both products, silu", norm_gate_up_cases)

TEST_SUITE("cuda") {
    TEST_CASE("norm_linear: as tall as a head, alone and beside others (CUDA)") { on_cuda(norm_linear_tall); }
}

TEST_SUITE("cpu") {
    TEST_CASE("linear_add: odd shapes, and segments of any mix of formats") {
        const Device device = cpu_device();
        unsigned seed = 400;
        for (const Form form : kForms) {
            check_linear_add(device, {3, 16, {1}, {form}}, ++seed);
            check_linear_add(device, {3, 32, {9}, {form}, 17, 31}, ++seed);
            if (form != Form::nvfp4) check_linear_add(device, {5, 131, {130}, {form}}, ++seed);
        }
        check_linear_add(device,
                         {4, 160, {130, 3, 140, 1}, {Form::bf16, Form::nvfp4, Form::f8_block, Form::f8_row}},
                         ++seed);
        check_linear_add(device, {1, 160, {1, 1, 1}, {Form::f16, Form::f32, Form::f8_tensor}}, ++seed);
    }

    TEST_CASE("norm_linear: h rounded to `activation`, y to its own type") {
        const Device device = cpu_device();
        WeightStore store(9);
        const Matrix m = random_matrix(store, {Form::nvfp4}, {21}, 48);
        Guarded norm(device, "norm", DType::F32, Place::weight, {48});
        norm.fill(1.5f);
        const auto x = Random(9).normals(5 * 48);
        const auto run = [&](DType activation, DType dtype) {
            return run_norm_linear(device, m.weight, norm.tensor(), x, activation, dtype);
        };
        const auto exact = run(DType::F32, DType::F32), to_bf16 = run(DType::F32, DType::BF16),
                   to_f16 = run(DType::F32, DType::F16), from_bf16 = run(DType::BF16, DType::F32);
        for (size_t i = 0; i < exact.size(); ++i) {
            const auto y = static_cast<float>(exact[i]);
            CHECK(to_bf16[i] == bf16_to_float(float_to_bf16(y)));
            CHECK(to_f16[i] == f16_to_float(float_to_f16(y)));
        }
        const double error = relative_error(from_bf16, exact);
        CHECK(error > 1e-5);
        CHECK(error < 4e-3);
    }

    TEST_CASE("linear_add: the number of threads does not change a bit") {
        WeightStore store(11);
        const Matrix m = random_matrix(store, {Form::nvfp4, Form::bf16}, {500, 77}, 512);
        const LinearCase c{3, 512, {500, 77}, {Form::nvfp4, Form::bf16}};
        Random random(11);
        const auto x = random.normals(3 * 512), residual = random.normals(3 * 577);
        const auto one = run_linear_add(cpu_device(1), m.weight, c, x, residual);
        for (const int threads : {2, 5})
            CHECK(run_linear_add(cpu_device(threads), m.weight, c, x, residual) == one);
    }

    TEST_CASE("linear_add, norm_linear: shapes and formats that do not fit are errors") {
        const Device device = cpu_device();
        WeightStore store(13);
        std::vector<double> values;
        const Weight w("w", {store.segment("a", Form::bf16, 4, 32, values)});
        Guarded norm(device, "norm", DType::F32, Place::weight, {32});
        Graph g;
        Tensor *x = g.input("x", DType::F32, {2, 32}), *narrow = g.input("x", DType::F32, {2, 31}),
               *residual = g.input("r", DType::F32, {2, 4}), *half = g.input("h", DType::BF16, {2, 32});
        CHECK_THROWS_AS(linear_add(g, "y", narrow, w, residual), Error);
        CHECK_THROWS_AS(linear_add(g, "y", x, w, x), Error);
        CHECK_THROWS_AS(linear_add(g, "y", x, w, g.input("r", DType::BF16, {2, 4})), Error);
        Tensor* n = g.external(norm.tensor());
        CHECK_THROWS_AS(norm_linear(g, "y", half, n, w, kEps, DType::F32, DType::F32), Error);
        CHECK_THROWS_AS(norm_linear(g, "y", narrow, n, w, kEps, DType::F32, DType::F32), Error);
        CHECK_THROWS_AS(norm_gate_up(g, "y", x, n, w, kEps, DType::F32), Error);  // one segment
        WeightSegment odd = store.segment("a", Form::nvfp4, 4, 32, values);
        odd.cols = 24;
        CHECK_THROWS_AS(linear_add(g, "y", g.input("x", DType::F32, {2, 24}), Weight("w", {odd}), residual),
                        Error);
        WeightSegment no_scale = store.segment("a", Form::nvfp4, 4, 32, values);
        no_scale.scale_kind = ScaleKind::none;
        CHECK_THROWS_AS(linear_add(g, "y", x, Weight("w", {no_scale}), residual), Error);
    }
}
