// block_attention and kv_write against double precision: norms, rotation with scale, pages, windows, causality, blocks of
// several sequences; concat.
#include <algorithm>

#include "ggml-like/error.h"
#include "ggml-like/ops/block_attention.h"
#include "ggml-like/ops/concat.h"
#include "ggml-like/ops/kv_write.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

struct Shape {
    int64_t heads, kv_heads, width, cache_heads, first_head;
    int64_t window = 0;
    bool causal = false;
    double yarn = 1;  // factor

    int64_t columns() const { return (heads + 2 * kv_heads) * width; }
    Rotary rotary() const {
        return yarn > 1 ? yarn_rotary(1e4, static_cast<int>(width), {.factor = yarn, .original = 64})
                        : plain_rotary(1e4, static_cast<int>(width));
    }
};

/// Norm and rotation of one head, in double; by the frequencies of the contract, computed here once more.
std::vector<double> rotated(const double* x, const double* norm, const Shape& s, int64_t position) {
    const auto d = static_cast<size_t>(s.width), half = d / 2;
    double sum = 0;
    for (size_t i = 0; i < d; ++i) sum += x[i] * x[i];
    std::vector<double> y;
    for (size_t i = 0; i < d; ++i)
        y.push_back(x[i] / std::sqrt(sum / static_cast<double>(d) + 1e-6) * norm[i]);
    const auto pairs = static_cast<double>(d);
    const auto turning = [&](double turns) {
        return pairs * std::log(64 / (turns * 2 * M_PI)) / (2 * std::log(1e4));
    };
    const double low = std::max(0.0, std::floor(turning(32))),
                 high = std::min(pairs - 1, std::ceil(turning(1)));
    const double scale = s.yarn > 1 ? 0.1 * std::log(s.yarn) + 1 : 1;
    for (size_t i = 0; i < half; ++i) {
        double frequency = std::pow(1e4, -2.0 * static_cast<double>(i) / pairs);
        if (s.yarn > 1) {
            const double ramp =
                std::clamp((static_cast<double>(i) - low) / std::max(high - low, 0.001), 0.0, 1.0);
            frequency = frequency / s.yarn * ramp + frequency * (1 - ramp);
        }
        const double c = std::cos(static_cast<double>(position) * frequency) * scale,
                     n = std::sin(static_cast<double>(position) * frequency) * scale;
        const double a = y[i], b = y[i + half];
        y[i] = a * c - b * n;
        y[i + half] = b * c + a * n;
    }
    return y;
}

struct Run {
    Run(const Device& device, const Shape& shape, const Layout& layout)
        : s(shape),
          l(layout),
          pages(static_cast<int64_t>(l.rows.size()) * l.pages_each),
          k_cache(device, "k", device.activation, Place::state, {pages, s.cache_heads, kPageTokens, s.width}),
          v_cache(device, "v", device.activation, Place::state, {pages, s.cache_heads, kPageTokens, s.width}),
          q_norm(device, "q_norm", DType::F32, Place::weight, {s.width}),
          k_norm(device, "k_norm", DType::F32, Place::weight, {s.width}) {
        Random random(5);
        for (Guarded* norm : {&q_norm, &k_norm}) norm->set(random.normals(s.width));
        p = device.rounded(random.normals(l.tokens() * s.columns()));
        for (Guarded* cache : {&k_cache, &v_cache}) {
            std::vector<float> all = random.normals(cache->tensor().elements());
            for (size_t at = 0; at < l.rows.size(); ++at) spoil(all, at);
            cache->set(all);
        }
    }
    /// NaN from the first position of the sequence's block on: nobody may read what is there.
    void spoil(std::vector<float>& all, size_t at) const {
        for (int64_t position = l.before[at]; position < l.pages_each * kPageTokens; ++position)
            for (int64_t h = 0; h < s.cache_heads; ++h) {
                const int64_t row =
                    (page_of(l, at, position / kPageTokens) * s.cache_heads + h) * kPageTokens +
                    position % kPageTokens;
                std::fill_n(all.begin() + row * s.width, s.width, std::nanf(""));
            }
    }

    std::vector<double> op(const Device& device) {
        Graph g;
        const Batch b = declare_batch(g, l);
        Tensor* in = g.input("p", device.activation, {l.tokens(), s.columns()});
        const auto heads = [&](const char* name, int64_t begin, int64_t count) {
            return g.view(name, in, begin * s.width, {l.tokens(), count, s.width}, {s.columns(), s.width, 1});
        };
        g.output(block_attention(g, "a",
                                 {.q = heads("q", 0, s.heads),
                                  .k = heads("k", s.heads, s.kv_heads),
                                  .v = heads("v", s.heads + s.kv_heads, s.kv_heads),
                                  .q_norm = g.external(q_norm.tensor()),
                                  .k_norm = g.external(k_norm.tensor())},
                                 g.external(k_cache.tensor()), g.external(v_cache.tensor()), b,
                                 {.eps = 1e-6f,
                                  .rotary = s.rotary(),
                                  .first_head = s.first_head,
                                  .window = s.window,
                                  .causal = s.causal}));
        return run_graph(device, std::move(g), [&](Plan& plan) {
            fill_batch(plan, b, l);
            set_input(plan, in, p);
        })[0];
    }

    std::vector<double> reference() {
        const auto k_old = k_cache.values(), v_old = v_cache.values(), qn = q_norm.values(),
                   kn = k_norm.values();
        const std::vector<double> x(p.begin(), p.end());
        std::vector<double> y;
        int64_t begin = 0;
        for (size_t at = 0; at < l.rows.size(); begin += l.rows[at++])
            for (int64_t i = 0; i < l.rows[at]; ++i)
                for (int64_t h = 0; h < s.heads; ++h) {
                    const int64_t kv = h / (s.heads / s.kv_heads), context = l.before[at];
                    const auto q = rotated(x.data() + (begin + i) * s.columns() + h * s.width, qn.data(), s,
                                           context + i);
                    std::vector<double> weights, sum(static_cast<size_t>(s.width), 0.0);
                    std::vector<const double*> values;
                    for (int64_t key = 0; key < context + l.rows[at]; ++key) {
                        const int64_t gap = context + i - key;
                        if (s.window > 0 && std::abs(gap) >= s.window) continue;
                        if (s.causal && gap < 0) continue;
                        std::vector<double> k;
                        if (key < context) {
                            const int64_t row =
                                ((page_of(l, at, key / kPageTokens) * s.cache_heads + s.first_head + kv) *
                                     kPageTokens +
                                 key % kPageTokens) *
                                s.width;
                            k.assign(k_old.begin() + row, k_old.begin() + row + s.width);
                            values.push_back(v_old.data() + row);
                        } else {
                            const double* from = x.data() + (begin + key - context) * s.columns();
                            k = rotated(from + (s.heads + kv) * s.width, kn.data(), s, key);
                            values.push_back(from + (s.heads + s.kv_heads + kv) * s.width);
                        }
                        double score = 0;
                        for (size_t e = 0; e < k.size(); ++e) score += q[e] * k[e];
                        weights.push_back(score / std::sqrt(static_cast<double>(s.width)));
                    }
                    const double highest = *std::max_element(weights.begin(), weights.end());
                    double total = 0;
                    for (double& w : weights) total += w = std::exp(w - highest);
                    for (size_t v = 0; v < values.size(); ++v)
                        for (size_t e = 0; e < sum.size(); ++e) sum[e] += weights[v] / total * values[v][e];
                    y.insert(y.end(), sum.begin(), sum.end());
                }
        return y;
    }

    Shape s;
    Layout l;
    int64_t pages;
    Guarded k_cache, v_cache, q_norm, k_norm;
    std::vector<float> p;
};

/// So many sequences that a GPU does not split their keys.
Layout crowd() {
    Layout l{.pages_each = 4, .kind = StepKind::answer};
    for (int i = 0; i < 40; ++i) l.rows.push_back(1 + i % 3), l.before.push_back(5 * i), l.slots.push_back(i);
    l.committed = l.journal = std::vector<int>(l.rows.size(), 0);
    return l;
}

void blocks(Device& device) {
    const Shape shapes[] = {
        {.heads = 8, .kv_heads = 2, .width = 64, .cache_heads = 6, .first_head = 2},
        {.heads = 8,
         .kv_heads = 2,
         .width = 64,
         .cache_heads = 2,
         .first_head = 0,
         .window = 100,
         .causal = true},
        {.heads = 8, .kv_heads = 2, .width = 64, .cache_heads = 2, .first_head = 0, .window = 100},
        {.heads = 4, .kv_heads = 4, .width = 128, .cache_heads = 4, .first_head = 0, .window = 3},
        {.heads = 32, .kv_heads = 4, .width = 128, .cache_heads = 8, .first_head = 4, .yarn = 64},
        {.heads = 2, .kv_heads = 1, .width = 128, .cache_heads = 1, .first_head = 0, .causal = true},
    };
    const Layout layouts[] = {
        {.rows = {8}, .before = {0}, .slots = {0}, .pages_each = 1, .kind = StepKind::answer},
        {.rows = {8}, .before = {500}, .slots = {0}, .pages_each = 9, .kind = StepKind::answer},
        {.rows = {16, 2, 16},
         .before = {64, 1, 191},
         .slots = {0, 1, 2},
         .pages_each = 4,
         .kind = StepKind::answer},
        {.rows = {5, 0, 7},
         .before = {63, 0, 128},
         .slots = {0, 1, 2},
         .pages_each = 4,
         .padding = 3,
         .kind = StepKind::answer},
        {.rows = {8}, .before = {5000}, .slots = {0}, .pages_each = 79, .kind = StepKind::answer},
        crowd(),
    };
    for (const Shape& s : shapes)
        for (const Layout& l : layouts) {
            CAPTURE(s.width);
            CAPTURE(s.window);
            CAPTURE(l.rows.size());
            Run run(device, s, l);
            std::vector<double> got = run.op(device);
            got.resize(static_cast<size_t>((l.tokens() - l.padding) * s.heads * s.width));
            CHECK(relative_error(got, run.reference()) < device.bound(1e-5));
        }
}

void writes(Device& device) {
    const Layout l{.rows = {70, 3}, .before = {60, 5}, .slots = {0, 1}, .pages_each = 4, .padding = 2};
    const Shape s{.heads = 0, .kv_heads = 6, .width = 64, .cache_heads = 6, .first_head = 0, .yarn = 4};
    const int64_t pages = 8, columns = 2 * s.kv_heads * s.width;
    Guarded k_cache(device, "k", device.activation, Place::state, {pages, s.kv_heads, kPageTokens, s.width}),
        v_cache(device, "v", device.activation, Place::state, {pages, s.kv_heads, kPageTokens, s.width}),
        norms(device, "norms", DType::F32, Place::weight, {3, s.width});
    Random random(9);
    norms.set(random.normals(3 * s.width));
    for (Guarded* cache : {&k_cache, &v_cache}) cache->fill(7);
    const std::vector<float> p = device.rounded(random.normals(l.tokens() * columns));
    Graph g;
    const Batch b = declare_batch(g, l);
    Tensor* in = g.input("p", device.activation, {l.tokens(), columns});
    const auto heads = [&](const char* name, int64_t begin) {
        return g.view(name, in, begin, {l.tokens(), s.kv_heads, s.width}, {columns, s.width, 1});
    };
    kv_write(g, "w", heads("k", 0), heads("v", s.kv_heads * s.width), g.external(norms.tensor()),
             g.external(k_cache.tensor()), g.external(v_cache.tensor()), b,
             {.eps = 1e-6f, .rotary = s.rotary()});
    run_graph(device, std::move(g), [&](Plan& plan) {
        fill_batch(plan, b, l);
        set_input(plan, in, p);
    });
    const auto norm = norms.values();
    std::vector<double> k(static_cast<size_t>(k_cache.tensor().elements()), 7), v = k;
    const std::vector<double> x(p.begin(), p.end());
    int64_t t = 0;
    for (size_t at = 0; at < l.rows.size(); ++at)
        for (int i = 0; i < l.rows[at]; ++i, ++t)
            for (int64_t h = 0; h < s.kv_heads; ++h) {
                const int64_t position = l.before[at] + i;
                const int64_t row = ((page_of(l, at, position / kPageTokens) * s.kv_heads + h) * kPageTokens +
                                     position % kPageTokens) *
                                    s.width;
                const double* from = x.data() + t * columns + h * s.width;
                const auto key = rotated(from, norm.data() + h / 2 * s.width, s, position);
                std::copy(key.begin(), key.end(), k.begin() + row);
                std::copy_n(from + s.kv_heads * s.width, s.width, v.begin() + row);
            }
    CHECK(relative_error(k_cache.values(), k) < device.bound(1e-5));
    CHECK(v_cache.values() == v);
}

void joins(Device& device) {
    Random random(3);
    Graph g;
    std::vector<Tensor*> parts;
    std::vector<std::vector<float>> values;
    for (int i = 0; i < 3; ++i) {
        parts.push_back(g.input("x", DType::F32, {5, 68}));
        values.push_back(random.normals(5 * 68));
    }
    g.output(concat(g, "y", parts, device.activation));
    const auto got = run_graph(device, std::move(g), [&](Plan& plan) {
        for (size_t i = 0; i < parts.size(); ++i) set_input(plan, parts[i], values[i]);
    })[0];
    for (int64_t t = 0; t < 5; ++t)
        for (size_t i = 0; i < 3; ++i) {
            const auto expected = device.rounded(rows_of(values[i], 68, t, 1));
            const auto found = rows_of(got, 68, t * 3 + static_cast<int64_t>(i), 1);
            CHECK(std::vector<float>(found.begin(), found.end()) == expected);
        }
}

}  // namespace

DEVICE_TEST_CASE("block_attention: rows of a block, the keys before it, windows, causality", blocks)
DEVICE_TEST_CASE("kv_write: normed and rotated keys of several layers at their places, and nothing else",
                 writes)
DEVICE_TEST_CASE("concat: columns side by side, rounded once", joins)
