// rms_norm, add_rms_norm, gated_rms_norm, qk_norm_rope, embed, gather_rows against double precision.
#include "ggml-like/error.h"
#include "ggml-like/ops/add_rms_norm.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/gated_rms_norm.h"
#include "ggml-like/ops/gather_rows.h"
#include "ggml-like/ops/qk_norm_rope.h"
#include "ggml-like/ops/rms_norm.h"
#include "ops/harness.h"
#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kEps = 1e-6f;
constexpr double kF32 = 1e-6, kBf16 = 4e-3;  // relative: sums of FP32; one rounding to 8 bits

/// The values that a tensor of this type can hold.
std::vector<float> representable(std::vector<float> v, DType dtype) {
    if (dtype == DType::BF16)
        for (float& x : v) x = bf16_to_float(float_to_bf16(x));
    return v;
}

double rms(const float* x, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
    return std::sqrt(sum / static_cast<double>(n) + kEps);
}

TEST_SUITE("cpu") {
    TEST_CASE("rms_norm and add_rms_norm") {
        for (DType dtype : {DType::F32, DType::BF16}) {
            for (auto [tokens, width] : {std::pair<int64_t, int64_t>{1, 64}, {2, 33}, {7, 256}, {33, 100}}) {
                CAPTURE(tokens);
                CAPTURE(width);
                Random random(11);
                const auto x = representable(random.normals(tokens * width), dtype);
                const auto d = representable(random.normals(tokens * width), dtype);
                Guarded w("w", DType::F32, Place::weight, {width});
                const auto weights = random.normals(width);
                std::copy(weights.begin(), weights.end(), w.data());
                Graph g;
                Tensor *tx = g.input("x", dtype, {tokens, width}), *td = g.input("d", dtype, {tokens, width});
                Tensor* tw = g.external(w.tensor());
                g.output(rms_norm(g, "n", tx, tw, kEps));
                const auto both = add_rms_norm(g, "a", tx, td, tw, kEps);
                g.output(both.sum);
                g.output(both.y);
                const auto out = run_graph(std::move(g), [&](Plan& p) {
                    set_input(p, tx, x);
                    set_input(p, td, d);
                });
                std::vector<double> norm, sum, sum_norm;
                for (int64_t t = 0; t < tokens; ++t) {
                    std::vector<float> s(static_cast<size_t>(width));
                    const float* row = x.data() + t * width;
                    for (int64_t i = 0; i < width; ++i)
                        s[static_cast<size_t>(i)] = row[i] + d[static_cast<size_t>(t * width + i)];
                    s = representable(s, dtype);
                    for (int64_t i = 0; i < width; ++i) {
                        const double wi = weights[static_cast<size_t>(i)];
                        norm.push_back(row[i] / rms(row, width) * wi);
                        sum.push_back(s[static_cast<size_t>(i)]);
                        sum_norm.push_back(s[static_cast<size_t>(i)] / rms(s.data(), width) * wi);
                    }
                }
                const double bound = dtype == DType::F32 ? kF32 : kBf16;
                CHECK(relative_error(out[0], norm) < bound);
                CHECK(relative_error(out[1], sum) < 1e-12);
                CHECK(relative_error(out[2], sum_norm) < bound);
            }
        }
    }

    TEST_CASE("gated_rms_norm over a strided gate") {
        const int64_t tokens = 7, heads = 3, width = 20, stride = heads * width + 5;
        Random random(5);
        const auto x = random.normals(tokens * heads * width), z = random.normals(tokens * stride);
        Guarded w("w", DType::F32, Place::weight, {width});
        for (int64_t i = 0; i < width; ++i) w.data()[i] = 1.0f + 0.1f * random.normal();
        Graph g;
        Tensor *tx = g.input("x", DType::F32, {tokens, heads, width}),
               *tz = g.input("z", DType::F32, {tokens, stride});
        Tensor* gate = g.view("gate", tz, 5, {tokens, heads, width}, {stride, width, 1});
        g.output(gated_rms_norm(g, "n", tx, gate, g.external(w.tensor()), kEps));
        const auto out = run_graph(std::move(g), [&](Plan& p) {
            set_input(p, tx, x);
            set_input(p, tz, z);
        });
        std::vector<double> expected;
        for (int64_t t = 0; t < tokens; ++t)
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t i = 0; i < width; ++i) {
                    const float* row = x.data() + (t * heads + h) * width;
                    const double gz = z[static_cast<size_t>(t * stride + 5 + h * width + i)];
                    expected.push_back(row[i] / rms(row, width) * w.data()[i] * gz / (1 + std::exp(-gz)));
                }
        CHECK(relative_error(out[0], expected) < kF32);
    }

    TEST_CASE("qk_norm_rope: partial rotation, large positions") {
        const int64_t tokens = 3, heads = 2, width = 16, stride = 64;
        const QkNormRopeParams params{.eps = kEps, .theta = 1e7f, .rotary_dims = 8};
        const int32_t positions[] = {0, 5, 262143};
        Random random(8);
        const auto data = random.normals(tokens * stride);
        Guarded wq("wq", DType::F32, Place::weight, {width}), wk("wk", DType::F32, Place::weight, {width});
        for (int64_t i = 0; i < width; ++i) wq.data()[i] = random.normal(), wk.data()[i] = random.normal();
        Graph g;
        const Layout layout{.rows = {3}, .before = {0}, .slots = {0}};
        const Batch batch = declare_batch(g, layout);
        Tensor* p_in = g.input("p", DType::F32, {tokens, stride});
        Tensor* q = g.view("q", p_in, 0, {tokens, heads, width}, {stride, width, 1});
        Tensor* k = g.view("k", p_in, 40, {tokens, 1, width}, {stride, width, 1});
        const auto rope =
            qk_norm_rope(g, "r", q, k, g.external(wq.tensor()), g.external(wk.tensor()), batch, params);
        g.output(rope.q);
        g.output(rope.k);
        const auto out = run_graph(std::move(g), [&](Plan& p) {
            fill_batch(p, batch, layout);
            std::copy(positions, positions + 3, p.input<int32_t>(batch.positions));
            set_input(p, p_in, data);
        });
        const auto expect = [&](int64_t offset, int64_t count, float* w) {
            std::vector<double> all;
            for (int64_t t = 0; t < tokens; ++t)
                for (int64_t h = 0; h < count; ++h) {
                    const float* x = data.data() + t * stride + offset + h * width;
                    std::vector<double> y;
                    for (int64_t i = 0; i < width; ++i) y.push_back(x[i] / rms(x, width) * w[i]);
                    for (int i = 0; i < 4; ++i) {
                        const long double angle = positions[t] * std::pow(1e7L, -2.0L * i / 8);
                        const double c = static_cast<double>(std::cos(angle)),
                                     s = static_cast<double>(std::sin(angle));
                        const double a = y[static_cast<size_t>(i)], b = y[static_cast<size_t>(i) + 4];
                        y[static_cast<size_t>(i)] = a * c - b * s;
                        y[static_cast<size_t>(i) + 4] = b * c + a * s;
                    }
                    all.insert(all.end(), y.begin(), y.end());
                }
            return all;
        };
        CHECK(relative_error(out[0], expect(0, heads, wq.data())) < kF32);
        CHECK(relative_error(out[1], expect(40, 1, wk.data())) < kF32);
    }

    TEST_CASE("embed reads every format; ids outside the table throw") {
        for (Form form : kForms) {
            CAPTURE(std::string(form_name(form)));
            WeightStore store(3);
            std::vector<double> values;
            const Weight table("t", {store.segment("t", form, 9, 32, values)});
            const std::vector<int32_t> ids = {8, 0, 3, 3};
            const auto run = [&](int32_t last) {
                Graph g;
                Tensor* t = g.input("ids", DType::I32, {4});
                g.output(embed(g, "e", table, t, DType::F32));
                return run_graph(std::move(g), [&](Plan& p) {
                    std::copy(ids.begin(), ids.end(), p.input<int32_t>(t));
                    p.input<int32_t>(t)[3] = last;
                });
            };
            std::vector<double> expected;
            for (int32_t id : ids)
                expected.insert(expected.end(), values.begin() + id * 32, values.begin() + id * 32 + 32);
            CHECK(relative_error(run(3)[0], expected) < 1e-6);
            CHECK_THROWS_AS(run(9), Error);
            CHECK_THROWS_AS(run(-1), Error);
        }
    }

    TEST_CASE("gather_rows copies bits; rows outside throw") {
        const auto run = [](int32_t row) {
            Graph g;
            Tensor *x = g.input("x", DType::BF16, {3, 5}), *rows = g.input("rows", DType::I32, {2});
            g.output(gather_rows(g, "y", x, rows));
            return run_graph(std::move(g), [&](Plan& p) {
                for (int i = 0; i < 15; ++i) p.input<uint16_t>(x)[i] = float_to_bf16(static_cast<float>(i));
                p.input<int32_t>(rows)[0] = 2;
                p.input<int32_t>(rows)[1] = row;
            });
        };
        CHECK(run(0)[0] == std::vector<double>{10, 11, 12, 13, 14, 0, 1, 2, 3, 4});
        CHECK_THROWS_AS(run(3), Error);
    }
}

}  // namespace
