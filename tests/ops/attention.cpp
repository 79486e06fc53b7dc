// gated_attention against double precision: norm, rotation, pages, heads, the gate.
#include "ggml-like/error.h"
#include "ggml-like/ops/gated_attention.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

struct Shape {
    int64_t heads, kv_heads, width;
    int rotary;
    DType cache = DType::F32;

    int64_t k_begin() const { return 2 * heads * width; }
    int64_t v_begin() const { return k_begin() + kv_heads * width; }
    int64_t columns() const { return v_begin() + kv_heads * width; }  // as in_proj makes them
    int64_t out() const { return heads * width; }
    GatedAttentionParams params() const { return {.eps = 1e-6f, .theta = 1e7f, .rotary_dims = rotary}; }
};

/// Caches and norms of one run of a few steps.
struct Memory {
    Shape shape;
    Guarded k_cache, v_cache, q_norm, k_norm;

    Memory(const Device& device, const Shape& s, int64_t pages)
        : shape(s),
          k_cache(device, "k", s.cache, Place::state, {pages, s.kv_heads, kPageTokens, s.width}),
          v_cache(device, "v", s.cache, Place::state, {pages, s.kv_heads, kPageTokens, s.width}),
          q_norm(device, "q_norm", DType::F32, Place::weight, {s.width}),
          k_norm(device, "k_norm", DType::F32, Place::weight, {s.width}) {
        for (Guarded* cache : {&k_cache, &v_cache})
            cache->fill(1e3f);  // what was there must not shine through
        Random random(77);
        for (Guarded* norm : {&q_norm, &k_norm}) norm->set(random.normals(s.width));
    }
};

/// One step over rows p [tokens, columns].
std::vector<double> run_step(const Device& device, const Layout& l, const std::vector<float>& p, Memory& m) {
    const Shape& s = m.shape;
    const int64_t tokens = l.tokens(), width = s.width, columns = s.columns();
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor* in = g.input("p", device.activation, {tokens, columns});
    const auto heads = [&](const char* name, int64_t begin, int64_t count, int64_t step) {
        return g.view(name, in, begin, {tokens, count, width}, {columns, step, 1});
    };
    g.output(gated_attention(g, "a",
                             {.q = heads("q", 0, s.heads, 2 * width),
                              .gate = heads("gate", width, s.heads, 2 * width),
                              .k = heads("k", s.k_begin(), s.kv_heads, width),
                              .v = heads("v", s.v_begin(), s.kv_heads, width),
                              .q_norm = g.external(m.q_norm.tensor()),
                              .k_norm = g.external(m.k_norm.tensor())},
                             g.external(m.k_cache.tensor()), g.external(m.v_cache.tensor()), b, s.params()));
    return run_graph(device, std::move(g), [&](Plan& plan) {
        fill_batch(plan, b, l);
        set_input(plan, in, p);
    })[0];
}

/// Norm and rotary embedding of one head, in double.
std::vector<double> rotated(const float* x, const std::vector<double>& norm, int64_t position,
                            const GatedAttentionParams& p) {
    double sum = 0;
    for (size_t i = 0; i < norm.size(); ++i) sum += static_cast<double>(x[i]) * x[i];
    const double rms = std::sqrt(sum / static_cast<double>(norm.size()) + p.eps);
    std::vector<double> y;
    for (size_t i = 0; i < norm.size(); ++i) y.push_back(x[i] / rms * norm[i]);
    const auto half = static_cast<size_t>(p.rotary_dims / 2);
    for (size_t i = 0; i < half; ++i) {
        const long double angle =
            static_cast<long double>(position) *
            std::pow(static_cast<long double>(p.theta), -2.0L * static_cast<long double>(i) / p.rotary_dims);
        const double c = static_cast<double>(std::cos(angle)), s = static_cast<double>(std::sin(angle));
        const double a = y[i], b = y[i + half];
        y[i] = a * c - b * s;
        y[i + half] = b * c + a * s;
    }
    return y;
}

/// A whole sequence from position `first` on; nothing before it is looked at, so first > 0 needs one row.
std::vector<double> reference(const std::vector<float>& p, Memory& m, int64_t first = 0) {
    const Shape& s = m.shape;
    const int64_t rows = static_cast<int64_t>(p.size()) / s.columns(), group = s.heads / s.kv_heads;
    const auto q_norm = m.q_norm.values(), k_norm = m.k_norm.values();
    const auto head = [&](int64_t t, int64_t begin) { return p.data() + t * s.columns() + begin; };
    std::vector<std::vector<double>> keys;
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t h = 0; h < s.kv_heads; ++h)
            keys.push_back(rotated(head(t, s.k_begin() + h * s.width), k_norm, first + t, s.params()));
    std::vector<double> out;
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t h = 0; h < s.heads; ++h) {
            const auto q = rotated(head(t, 2 * h * s.width), q_norm, first + t, s.params());
            std::vector<double> weights;
            double total = 0;
            for (int64_t j = 0; j <= t; ++j) {
                const auto& k = keys[static_cast<size_t>(j * s.kv_heads + h / group)];
                double score = 0;
                for (size_t i = 0; i < q.size(); ++i) score += q[i] * k[i];
                weights.push_back(std::exp(score / std::sqrt(static_cast<double>(s.width))));
                total += weights.back();
            }
            for (int64_t i = 0; i < s.width; ++i) {
                double y = 0;
                for (int64_t j = 0; j <= t; ++j)
                    y += weights[static_cast<size_t>(j)] / total *
                         head(j, s.v_begin() + h / group * s.width)[i];
                out.push_back(y / (1 + std::exp(-static_cast<double>(head(t, (2 * h + 1) * s.width)[i]))));
            }
        }
    return out;
}

/// One sequence in steps of these many rows.
void check_steps(const Device& device, const Shape& s, const std::vector<int>& steps, double bound) {
    CAPTURE(s.width);
    CAPTURE(s.heads);
    Memory m(device, s, 6);
    int64_t total = 0;
    for (const int rows : steps) total += rows;
    const auto p = device.rounded(Random(21).normals(total * s.columns()));
    const auto expected = reference(p, m);
    int before = 0;
    for (const int rows : steps) {
        CAPTURE(before);
        CAPTURE(rows);
        const Layout l{.rows = {rows}, .before = {before}, .slots = {0}, .pages_each = 6};
        const auto y = run_step(device, l, rows_of(p, s.columns(), before, rows), m);
        CHECK(relative_error(y, rows_of(expected, s.out(), before, rows)) < device.bound(bound));
        before += rows;
    }
}

/// Several sequences at once, one of them empty, padding behind them; then a few more rows of each.
void check_together(const Device& device, const Shape& s, double bound) {
    CAPTURE(s.width);
    const std::vector<std::vector<int>> steps = {{1, 65, 0, 130}, {2, 0, 7, 3}, {1, 1, 1, 1}};
    Memory m(device, s, 16);
    std::vector<std::vector<float>> p;
    std::vector<std::vector<double>> expected;
    for (unsigned i = 0; i < 4; ++i) {
        p.push_back(device.rounded(Random(30 + i).normals(140 * s.columns())));
        expected.push_back(reference(p.back(), m));
    }
    std::vector<int> before(4, 0);
    for (const auto& rows : steps) {
        Layout l{.rows = rows, .before = before, .slots = {0, 1, 2, 3}, .padding = 3};
        std::vector<float> step;
        std::vector<double> want;
        for (size_t i = 0; i < 4; ++i) {
            const auto in = rows_of(p[i], s.columns(), before[i], rows[i]);
            const auto out = rows_of(expected[i], s.out(), before[i], rows[i]);
            step.insert(step.end(), in.begin(), in.end());
            want.insert(want.end(), out.begin(), out.end());
            before[i] += rows[i];
        }
        step.resize(static_cast<size_t>(l.tokens() * s.columns()), 0.0f);
        auto y = run_step(device, l, step, m);
        y.resize(want.size());
        CHECK(relative_error(y, want) < device.bound(bound));
    }
}

/// Beside others or alone: the same bits.
void check_alone(const Device& device, const Shape& s) {
    CAPTURE(s.width);
    Memory together(device, s, 12), alone(device, s, 12);
    std::vector<int> before = {0, 0, 0};
    for (const std::vector<int>& rows : {std::vector<int>{3, 1, 4}, {1, 1, 1}, {2, 0, 5}}) {
        Layout l{.rows = rows, .before = before, .slots = {0, 1, 2}};
        const auto p = device.rounded(Random(50).normals(l.tokens() * s.columns()));
        const auto y = run_step(device, l, p, together);
        int64_t begin = 0;
        for (size_t i = 0; i < rows.size(); ++i) {
            if (rows[i] == 0) continue;
            Layout one = l;  // the other sequences keep their page tables and have no rows
            for (size_t j = 0; j < rows.size(); ++j)
                if (j != i) one.rows[j] = 0;
            const auto got = run_step(device, one, rows_of(p, s.columns(), begin, rows[i]), alone);
            CHECK(got == rows_of(y, s.out(), begin, rows[i]));
            begin += rows[i];
            before[i] += rows[i];
        }
    }
}

/// The models' head shapes, and some of the others that the GPU runs: any multiple of 8 up to 256.
std::vector<Shape> device_shapes(const Device& device) {
    const DType cache = device.activation;
    return {{16, 2, 256, 64, cache}, {12, 2, 256, 64, cache},  // six query heads a KV head, as the 27B
            {4, 2, 64, 32, cache},   {3, 1, 16, 16, cache},   {2, 2, 24, 8, cache}, {4, 1, 72, 64, cache}};
}

void attention_steps(Device& device) {
    for (const Shape& s : device_shapes(device)) {
        check_steps(device, s, {1, 2, 7, 8, 9, 33, 64, 130}, 4e-6);
        check_steps(device, s, {63, 1, 1, 64, 1}, 4e-6);  // page borders
        check_steps(device, s, {130, 1}, 4e-6);
    }
}

void attention_together(Device& device) {
    for (const Shape& s : device_shapes(device)) check_together(device, s, 4e-6);
}

void attention_alone(Device& device) {
    for (const Shape& s : device_shapes(device)) check_alone(device, s);
}

}  // namespace

DEVICE_TEST_CASE("gated_attention: one sequence in steps, across page borders", attention_steps)
DEVICE_TEST_CASE("gated_attention: several sequences and padding", attention_together)
DEVICE_TEST_CASE("gated_attention: beside others or alone, the same bits", attention_alone)

TEST_SUITE("cpu") {
    TEST_CASE("gated_attention: cache types, odd head sizes, no rotation") {
        const Device device = cpu_device();
        check_together(device, {4, 2, 16, 8, DType::BF16}, 8e-3);
        check_together(device, {4, 2, 16, 8, DType::F16}, 1e-3);
        check_together(device, {2, 2, 33, 32, DType::F32}, 4e-6);
        check_steps(device, {2, 1, 16, 0, DType::F32}, {70}, 4e-6);
    }

    TEST_CASE("gated_attention: large positions keep their phase") {
        // With one query and one key before it, a wrong angle shows in their product.
        const Device device = cpu_device();
        const Shape s{1, 1, 16, 8};
        Memory m(device, s, 5000);
        const auto p = Random(60).normals(2 * s.columns());
        const int position = 262142;
        const Layout l{.rows = {2}, .before = {position}, .slots = {0}, .pages_each = 5000};
        Graph g;
        run_step(device, l, p, m);
        const auto keys = m.k_cache.values();
        for (int64_t t = 0; t < 2; ++t) {
            const auto page = page_of(l, 0, (position + t) / kPageTokens);
            const auto row = page * int64_t{kPageTokens} + (position + t) % kPageTokens;
            const auto expected = rotated(p.data() + t * s.columns() + s.k_begin(), m.k_norm.values(),
                                          position + t, s.params());
            CHECK(relative_error(rows_of(keys, s.width, row, 1), expected) < 1e-6);
        }
    }

    TEST_CASE("gated_attention: positions beyond the pages are errors") {
        const Device device = cpu_device();
        Memory m(device, {1, 1, 16, 8}, 4);
        const auto p = Random(61).normals(m.shape.columns());
        CHECK_THROWS_AS(run_step(device, {.rows = {1}, .before = {256}, .slots = {0}}, p, m), Error);
        CHECK_NOTHROW(run_step(device, {.rows = {1}, .before = {0}, .slots = {0}}, p, m));
    }
}
