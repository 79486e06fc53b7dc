// linear, against sums in double over weights decoded by the test.
#include "ggml-like/ops/linear.h"

#include <fmt/format.h>

#include <memory>

#include <doctest/doctest.h>
#include "ggml-like/backend.h"
#include "ggml-like/error.h"

#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

struct Case {
    int64_t tokens, cols;
    std::vector<int64_t> rows;  // of the segments
    std::vector<Form> forms;
};

/// y [tokens, rows] of one run with x as given.
std::vector<float> run_linear(Backend& backend, const Weight& w, const std::vector<float>& x, int64_t tokens,
                              DType x_type, DType y_type) {
    Graph g;
    Tensor* in = g.input("x", x_type, {tokens, w.cols});
    Tensor* y = linear(g, "y", in, w, y_type);
    g.output(y);
    Plan plan(std::move(g), backend);
    Tensor host = *in;
    host.data = plan.input<void>(in);
    store_floats(host, 0, tokens * w.cols, x.data());
    plan.run();
    backend.synchronize();
    std::vector<float> out(static_cast<size_t>(tokens * w.rows));
    load_floats(*y, 0, tokens * w.rows, out.data());
    return out;
}

void check_case(Backend& backend, const Case& c, unsigned seed) {
    CAPTURE(seed);
    CAPTURE(c.tokens);
    CAPTURE(c.cols);
    CAPTURE(std::string(form_name(c.forms[0])));
    WeightStore store(seed);
    std::vector<double> values;
    std::vector<WeightSegment> segments;
    for (size_t i = 0; i < c.rows.size(); ++i)
        segments.push_back(store.segment(fmt::format("s{}", i), c.forms[i], c.rows[i], c.cols, values));
    const Weight w("w", segments);
    std::vector<float> x(static_cast<size_t>(c.tokens * c.cols));
    for (float& v : x) v = store.normal();
    const std::vector<float> y = run_linear(backend, w, x, c.tokens, DType::F32, DType::F32);
    for (int64_t t = 0; t < c.tokens; ++t) {
        for (int64_t r = 0; r < w.rows; ++r) {
            Sum sum;
            for (int64_t k = 0; k < c.cols; ++k)
                sum.add(values[static_cast<size_t>(r * c.cols + k)], x[static_cast<size_t>(t * c.cols + k)]);
            const float found = y[static_cast<size_t>(t * w.rows + r)];
            if (!(std::fabs(found - sum.value) <= sum_bound(sum, c.cols)))
                FAIL_CHECK("token ", t, " row ", r, ": ", found, " != ", sum.value);
        }
    }
    // each token alone: the same bits
    for (int64_t t = 0; t < c.tokens; ++t) {
        const std::vector<float> row(x.begin() + t * c.cols, x.begin() + (t + 1) * c.cols);
        const auto alone = run_linear(backend, w, row, 1, DType::F32, DType::F32);
        CHECK(std::memcmp(alone.data(), y.data() + t * w.rows, alone.size() * sizeof(float)) == 0);
    }
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("linear: every form of weight, odd shapes, alone and in a batch") {
        const auto backend = make_cpu_backend(2);
        unsigned seed = 100;
        for (const Form form : kForms) {
            for (const int64_t tokens : {1, 2, 7, 33})
                check_case(*backend, {tokens, 144, {37}, {form}}, ++seed);
            check_case(*backend, {3, 16, {1}, {form}}, ++seed);
            check_case(*backend, {2, 272, {300}, {form}}, ++seed);  // three row blocks of FP8
            check_case(*backend, {65, 32, {9}, {form}}, ++seed);
            if (form != Form::nvfp4) check_case(*backend, {5, 131, {130}, {form}}, ++seed);
        }
    }

    TEST_CASE("linear: stacked segments keep their own formats and scales") {
        const auto backend = make_cpu_backend(2);
        check_case(*backend, {4, 160, {64, 33, 5}, {Form::nvfp4, Form::nvfp4, Form::nvfp4}}, 1);
        check_case(*backend,
                   {4, 160, {130, 3, 140, 1}, {Form::bf16, Form::nvfp4, Form::f8_block, Form::f8_row}}, 2);
        check_case(*backend, {1, 160, {1, 1, 1}, {Form::f16, Form::f32, Form::f8_tensor}}, 3);
    }

    TEST_CASE("linear: one rounding to the output's type, inputs of 16 bits") {
        const auto backend = make_cpu_backend(2);
        WeightStore store(9);
        std::vector<double> values;
        const Weight w("w", {store.segment("s", Form::nvfp4, 21, 48, values)});
        std::vector<float> x(5 * 48);
        for (float& v : x) v = bf16_to_float(float_to_bf16(store.normal()));
        const auto exact = run_linear(*backend, w, x, 5, DType::F32, DType::F32);
        const auto from16 = run_linear(*backend, w, x, 5, DType::BF16, DType::F32);
        const auto to_bf16 = run_linear(*backend, w, x, 5, DType::BF16, DType::BF16);
        const auto to_f16 = run_linear(*backend, w, x, 5, DType::F32, DType::F16);
        for (size_t i = 0; i < exact.size(); ++i) {
            CHECK(from16[i] == exact[i]);
            CHECK(to_bf16[i] == bf16_to_float(float_to_bf16(exact[i])));
            CHECK(to_f16[i] == f16_to_float(float_to_f16(exact[i])));
        }
    }

    TEST_CASE("linear: the number of threads does not change a bit") {
        WeightStore store(11);
        std::vector<double> values;
        const Weight w("w", {store.segment("a", Form::nvfp4, 500, 512, values),
                             store.segment("b", Form::bf16, 77, 512, values)});
        std::vector<float> x(3 * 512);
        for (float& v : x) v = store.normal();
        const auto one = run_linear(*make_cpu_backend(1), w, x, 3, DType::F32, DType::F32);
        for (const int threads : {2, 5})
            CHECK(run_linear(*make_cpu_backend(threads), w, x, 3, DType::F32, DType::F32) == one);
    }

    TEST_CASE("linear: a view of some columns as input") {
        const auto backend = make_cpu_backend(2);
        WeightStore store(12);
        std::vector<double> values;
        const Weight w("w", {store.segment("a", Form::nvfp4, 9, 32, values)});
        Graph g;
        Tensor* wide = g.input("x", DType::F32, {3, 80});
        Tensor* y = linear(g, "y", g.columns("v", wide, 17, 32), w, DType::F32);
        g.output(y);
        Plan plan(std::move(g), *backend);
        float* x = plan.input<float>(wide);
        for (int i = 0; i < 240; ++i) x[i] = store.normal();
        std::vector<float> dense;
        for (int t = 0; t < 3; ++t) dense.insert(dense.end(), x + t * 80 + 17, x + t * 80 + 49);
        plan.run();
        const auto expected = run_linear(*backend, w, dense, 3, DType::F32, DType::F32);
        for (size_t i = 0; i < expected.size(); ++i) CHECK(y->as<float>()[i] == expected[i]);
    }

    TEST_CASE("linear: shapes and formats that do not fit are errors") {
        WeightStore store(13);
        std::vector<double> values;
        const Weight w("w", {store.segment("a", Form::bf16, 4, 32, values)});
        Graph g;
        CHECK_THROWS_AS(linear(g, "y", g.input("x", DType::F32, {2, 31}), w, DType::F32), Error);
        WeightSegment odd = store.segment("a", Form::nvfp4, 4, 32, values);
        odd.cols = 24;
        CHECK_THROWS_AS(linear(g, "y", g.input("x", DType::F32, {2, 24}), Weight("w", {odd}), DType::F32),
                        Error);
        WeightSegment no_scale = store.segment("a", Form::nvfp4, 4, 32, values);
        no_scale.scale_kind = ScaleKind::none;
        CHECK_THROWS_AS(
            linear(g, "y", g.input("x", DType::F32, {2, 32}), Weight("w", {no_scale}), DType::F32), Error);
    }
}
