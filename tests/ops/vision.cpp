// The ops of a vision tower, against double precision.
#include <algorithm>
#include <numbers>

#include "ggml-like/ops/grid_attention.h"
#include "ggml-like/ops/layer_norm.h"
#include "ggml-like/ops/linear_bias.h"
#include "ggml-like/ops/patches.h"
#include "ops/harness.h"
#include "ops/weights.h"

using namespace quern;
using namespace quern::test;

namespace {

std::vector<double> doubles(const std::vector<float>& v) { return {v.begin(), v.end()}; }

void test_layer_norm(Device& device) {
    for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 72}, {7, 144}, {33, 1152}}) {
        const auto& this_width = width;
        CAPTURE(this_width);
        Random random(3);
        std::vector<float> x = random.normals(rows * width), w = random.normals(width),
                           b = random.normals(width);
        for (float& v : x) v = 3 * v + 5;  // a mean that must go
        Guarded weight(device, "w", DType::F32, Place::weight, {width}),
            bias(device, "b", DType::F32, Place::weight, {width});
        weight.set(w);
        bias.set(b);
        Graph g;
        Tensor* in = g.input("x", DType::F32, {rows, width});
        g.output(layer_norm(g, "norm", in, g.external(weight.tensor()), g.external(bias.tensor()), 1e-6f,
                            device.activation));
        const auto got = run_graph(device, std::move(g), [&](Plan& plan) { set_input(plan, in, x); });
        std::vector<double> expected;
        for (int64_t t = 0; t < rows; ++t) {
            const std::vector<double> row = doubles(rows_of(x, width, t, 1));
            double mean = 0, variance = 0;
            for (const double v : row) mean += v / static_cast<double>(width);
            for (const double v : row) variance += (v - mean) * (v - mean) / static_cast<double>(width);
            for (size_t i = 0; i < row.size(); ++i)
                expected.push_back((row[i] - mean) / std::sqrt(variance + 1e-6) * double{w[i]} +
                                   double{b[i]});
        }
        CHECK(relative_error(got[0], expected) < device.bound(1e-6));
    }
}

double apply(Activation activation, double v) {
    if (activation == Activation::gelu_tanh)
        return v / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
    return activation == Activation::gelu_erf ? v / 2 * (1 + std::erf(v / std::sqrt(2.0))) : v;
}

struct Product {
    int64_t rows, in, out;
    Activation activation;
    bool add;
    bool narrow;  // stored as activations are
    Form form = Form::bf16;
};

void test_linear_bias(Device& device) {
    for (const Product& p : {Product{1, 72, 40, Activation::none, false, true},
                             {33, 144, 208, Activation::gelu_tanh, false, true},
                             {70, 208, 144, Activation::none, true, false},
                             {300, 1536, 96, Activation::none, true, false},
                             {20, 576, 320, Activation::gelu_erf, false, true},
                             {9, 4304, 64, Activation::none, true, false},
                             {40, 1152, 208, Activation::gelu_tanh, false, true, Form::f8_row},
                             {9, 4304, 64, Activation::none, true, false, Form::f8_row},
                             // more places than a GPU has blocks
                             {2100, 192, 4112, Activation::none, false, true},
                             {2100, 192, 4112, Activation::none, false, true, Form::f8_row}}) {
        if (device.exact() && p.rows > 2000) continue;
        CAPTURE(p.in);
        CAPTURE(p.rows);
        Random random(5);
        WeightStore store(6);
        std::vector<double> w;
        const Weight weight = placed(device, Weight("w", {store.segment("w", p.form, p.out, p.in, w)}));
        const std::vector<float> x = device.rounded(random.normals(p.rows * p.in)), b = random.normals(p.out),
                                 add = random.normals(p.rows * p.out);
        Guarded bias(device, "b", DType::F32, Place::weight, {p.out});
        bias.set(b);
        Graph g;
        Tensor* in = g.input("x", device.activation, {p.rows, p.in});
        Tensor* more = p.add ? g.input("add", DType::F32, {p.rows, p.out}) : nullptr;
        g.output(linear_bias(g, "y", in, weight, g.external(bias.tensor()), p.activation, more,
                             p.narrow ? device.activation : DType::F32));
        const auto got = run_graph(device, std::move(g), [&](Plan& plan) {
            set_input(plan, in, x);
            if (more != nullptr) set_input(plan, more, add);
        });
        std::vector<double> expected;
        for (int64_t t = 0; t < p.rows; ++t)
            for (int64_t o = 0; o < p.out; ++o) {
                double sum = double{b[static_cast<size_t>(o)]};
                for (int64_t k = 0; k < p.in; ++k)
                    sum +=
                        double{x[static_cast<size_t>(t * p.in + k)]} * w[static_cast<size_t>(o * p.in + k)];
                sum = apply(p.activation, sum);
                expected.push_back(sum + (p.add ? double{add[static_cast<size_t>(t * p.out + o)]} : 0));
            }
        CHECK(relative_error(got[0], expected) < device.bound(2e-6));
    }
}

/// Patches of grids, one after the other, in reading order.
std::vector<int32_t> places(const std::vector<std::pair<int, int>>& grids) {
    std::vector<int32_t> place;
    for (const auto& [height, width] : grids)
        for (int r = 0; r < height; ++r)
            for (int c = 0; c < width; ++c) place.insert(place.end(), {r, c, height, width});
    return place;
}

void test_patches(Device& device) {
    const std::vector<std::pair<int, int>> grids = {{4, 6}, {1, 1}, {2, 9}, {60, 3}};
    const std::vector<int32_t> place = places(grids);
    const auto rows = static_cast<int64_t>(place.size() / 4);
    const int64_t side = 8, width = 24, values = 12;
    Random random(8);
    const std::vector<float> table = random.normals(side * side * width);
    Guarded t(device, "table", DType::F32, Place::weight, {side * side, width});
    t.set(table);
    Graph g;
    Tensor* bytes = g.input("bytes", DType::U8, {rows, values});
    Tensor* at = g.input("place", DType::I32, {rows, 4});
    g.output(patch_values(g, "values", bytes, device.activation));
    g.output(grid_embedding(g, "positions", at, g.external(t.tensor())));
    const auto got = run_graph(device, std::move(g), [&](Plan& plan) {
        for (int64_t i = 0; i < rows * values; ++i)
            plan.input<uint8_t>(bytes)[i] = static_cast<uint8_t>(i * 7);
        std::copy(place.begin(), place.end(), plan.input<int32_t>(at));
    });
    std::vector<double> numbers, positions;
    for (int64_t i = 0; i < rows * values; ++i)
        numbers.push_back((static_cast<double>(i * 7 % 256) - 127.5) / 127.5);
    for (int64_t n = 0; n < rows; ++n) {
        const int32_t* p = place.data() + 4 * n;
        // a hat of width 1 over each entry of the axis
        const auto hat = [&](int i, int count, int64_t entry) {
            const double s = count > 1 ? i * static_cast<double>(side - 1) / (count - 1) : 0;
            return std::max(0.0, 1 - std::abs(s - static_cast<double>(entry)));
        };
        for (int64_t k = 0; k < width; ++k) {
            double sum = 0;
            for (int64_t y = 0; y < side; ++y)
                for (int64_t x = 0; x < side; ++x)
                    sum += hat(p[0], p[2], y) * hat(p[1], p[3], x) *
                           double{table[static_cast<size_t>((y * side + x) * width + k)]};
            positions.push_back(sum);
        }
    }
    CHECK(relative_error(got[0], numbers) < device.bound(1e-7));
    CHECK(relative_error(got[1], positions) < 3e-6);
}

struct Grids {
    int heads;
    int64_t width;
    std::vector<std::pair<int, int>> grids;
};

std::vector<double> attention_in_double(const Grids& s, const std::vector<float>& qkv,
                                        const std::vector<int32_t>& place) {
    const int64_t columns = s.heads * s.width, quarter = s.width / 4, half = s.width / 2;
    const auto head = [&](int64_t row, int64_t h, int part) {
        std::vector<double> v = doubles(rows_of(qkv, s.width, (row * 3 + part) * s.heads + h, 1));
        if (part == 2) return v;
        std::vector<double> out = v;
        for (int64_t j = 0; j < half; ++j) {
            const double angle =
                place[static_cast<size_t>(4 * row + (j < quarter ? 0 : 1))] *
                std::pow(1e4, -static_cast<double>(j % quarter) / static_cast<double>(quarter));
            const auto a = static_cast<size_t>(j), b = static_cast<size_t>(j + half);
            out[a] = v[a] * std::cos(angle) - v[b] * std::sin(angle);
            out[b] = v[b] * std::cos(angle) + v[a] * std::sin(angle);
        }
        return out;
    };
    std::vector<double> y(qkv.size() / 3);
    int64_t begin = 0;
    for (const auto& [height, width] : s.grids) {
        const int64_t rows = height * width;
        for (int64_t h = 0; h < s.heads; ++h)
            for (int64_t t = begin; t < begin + rows; ++t) {
                const std::vector<double> q = head(t, h, 0);
                std::vector<double> weights;
                double sum = 0;
                for (int64_t u = begin; u < begin + rows; ++u) {
                    const std::vector<double> k = head(u, h, 1);
                    double score = 0;
                    for (size_t i = 0; i < k.size(); ++i) score += q[i] * k[i];
                    weights.push_back(std::exp(score / std::sqrt(static_cast<double>(s.width))));
                    sum += weights.back();
                }
                for (int64_t u = 0; u < rows; ++u) {
                    const std::vector<double> v = head(begin + u, h, 2);
                    for (int64_t i = 0; i < s.width; ++i)
                        y[static_cast<size_t>(t * columns + h * s.width + i)] +=
                            weights[static_cast<size_t>(u)] / sum * v[static_cast<size_t>(i)];
                }
            }
        begin += rows;
    }
    return y;
}

/// `asked`: of a single frame; 0: all.
std::vector<double> run_attention(const Device& device, const Grids& s, const std::vector<float>& qkv,
                                  int64_t first = 0, int64_t asked = 0) {
    const std::vector<int32_t> place = places(s.grids);
    const auto rows = static_cast<int64_t>(place.size() / 4);
    Graph g;
    Tensor* in = g.input("qkv", device.activation, {rows, 3 * s.heads * s.width});
    Tensor* at = g.input("place", DType::I32, {rows, 4});
    Tensor* start = g.input("start", DType::I32, {static_cast<int64_t>(s.grids.size()) + 1});
    g.output(grid_attention(g, "attn", in, at, start,
                            {.heads = s.heads, .theta = 1e4f, .first = first, .rows = asked}));
    return run_graph(device, std::move(g), [&](Plan& plan) {
        set_input(plan, in, qkv);
        std::copy(place.begin(), place.end(), plan.input<int32_t>(at));
        int32_t row = 0;
        for (size_t i = 0; i <= s.grids.size(); ++i) {
            plan.input<int32_t>(start)[i] = row;
            if (i < s.grids.size()) row += s.grids[i].first * s.grids[i].second;
        }
    })[0];
}

void test_attention(Device& device) {
    for (const Grids& s :
         {Grids{1, 8, {{1, 1}}}, Grids{2, 72, {{4, 6}}}, Grids{3, 72, {{2, 5}, {1, 1}, {9, 8}}},
          Grids{2, 64, {{10, 14}}}, Grids{1, 72, {{3, 70}}}, Grids{2, 72, {{16, 24}, {7, 19}, {11, 35}}},
          Grids{1, 72, {{27, 40}, {8, 16}}},
          Grids{16, 72, std::vector<std::pair<int, int>>(100, {2, 3})}}) {  // a dozen for each block
        CAPTURE(s.width);
        Random random(11);
        int64_t rows = 0;
        for (const auto& [height, width] : s.grids) rows += height * width;
        const std::vector<float> qkv = device.rounded(random.normals(rows * 3 * s.heads * s.width));
        const std::vector<double> expected = attention_in_double(s, qkv, places(s.grids));
        CHECK(relative_error(run_attention(device, s, qkv), expected) < device.bound(2e-6));
    }
}

/// Scores whose range grows along the keys: maxima move again and again.
void test_attention_range(Device& device) {
    const Grids s{1, 72, {{25, 30}}};
    const int64_t rows = 750;
    Random random(13);
    std::vector<float> qkv = random.normals(rows * 3 * 72);
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t i = 0; i < 2 * 72; ++i)
            qkv[static_cast<size_t>(t * 3 * 72 + i)] *= i < 72 ? 2.0f : static_cast<float>(t) / 250.0f;
    qkv = device.rounded(qkv);
    const std::vector<double> expected = attention_in_double(s, qkv, places(s.grids));
    // rotated queries and keys are rounded: of scores of 20 that leaves an error of some hundredths
    CHECK(relative_error(run_attention(device, s, qkv), expected) < 2 * device.bound(5e-6));
}

/// A frame has the bits that it has alone.
void test_attention_alone(Device& device) {
    const Grids together{2, 72, {{6, 4}, {8, 10}, {2, 2}}}, alone{2, 72, {{8, 10}}};
    Random random(12);
    const std::vector<float> qkv = device.rounded(random.normals((24 + 80 + 4) * 3 * 144));
    const auto all = run_attention(device, together, qkv),
               one = run_attention(device, alone, rows_of(qkv, 3 * 144, 24, 80));
    CHECK(rows_of(all, 144, 24, 80) == one);
}

/// Rows that are asked have the bits that they have among all.
void test_attention_rows(Device& device) {
    const Grids s{2, 72, {{15, 20}}};
    Random random(13);
    const std::vector<float> qkv = device.rounded(random.normals(300 * 3 * 144));
    const auto all = run_attention(device, s, qkv);
    for (const auto& [first, rows] :
         {std::pair<int64_t, int64_t>{0, 128}, {128, 128}, {256, 44}, {3, 290}, {299, 1}})
        CHECK(run_attention(device, s, qkv, first, rows) == rows_of(all, 144, first, rows));
}

DEVICE_TEST_CASE("layer_norm against double precision", test_layer_norm)
DEVICE_TEST_CASE("linear_bias against double precision", test_linear_bias)
DEVICE_TEST_CASE("patch_values and grid_embedding against double precision", test_patches)
DEVICE_TEST_CASE("grid_attention against double precision", test_attention)
DEVICE_TEST_CASE("grid_attention: maxima that move", test_attention_range)
DEVICE_TEST_CASE("grid_attention: a frame does not depend on the others", test_attention_alone)
DEVICE_TEST_CASE("grid_attention: some rows of a frame", test_attention_rows)

}  // namespace
