// gated_attention against double precision: norm, rotation, pages, heads, the gate. A row's bits, whoever is
// beside it.
#include <algorithm>

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

    /// Keys and values of tokens that nobody has computed here. `steep`: keys get larger from page to page in memory, up to
    /// eight times, so that maxima of scores move.
    void remember(unsigned seed, bool steep = false) {
        remember(seed, steep, [](std::vector<float>&) {});
    }
    /// `change` is called with the keys and with the values.
    template <typename F>
    void remember(unsigned seed, bool steep, const F& change) {
        const auto some = Random(seed).normals(65'521);
        std::vector<float> all(static_cast<size_t>(k_cache.tensor().elements()));
        for (size_t i = 0; i < all.size(); ++i) all[i] = some[i % some.size()];
        std::vector<float> values(all.rbegin(), all.rend());
        change(values);
        v_cache.set(values);
        const auto page = static_cast<size_t>(shape.kv_heads * kPageTokens * shape.width);
        if (steep)
            for (size_t i = 0; i < all.size(); ++i) all[i] *= static_cast<float>(1 + i / page % 8);
        change(all);
        k_cache.set(all);
    }
};

/// NaN for keys or values of a sequence from this position to the end of its page.
void spoil(std::vector<float>& cache, const Shape& s, const Layout& l, size_t at, int64_t position) {
    const int64_t place = position % kPageTokens;
    if (place == 0) return;
    for (int64_t h = 0; h < s.kv_heads; ++h) {
        const int64_t head = page_of(l, at, position / kPageTokens) * s.kv_heads + h;
        const auto begin = cache.begin() + head * kPageTokens * s.width;
        std::fill(begin + place * s.width, begin + kPageTokens * s.width, std::nanf(""));
    }
}

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
                              .k_norm = g.external(m.k_norm.tensor()),
                              .wanted = {b.logits_from, l.wanted_rows()}},
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
void check_steps(const Device& device, const Shape& s, const std::vector<int>& steps, double bound,
                 StepKind kind = StepKind::prompt) {
    CAPTURE(static_cast<int>(kind));
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
        const Layout l{.rows = {rows}, .before = {before}, .slots = {0}, .pages_each = 6, .kind = kind};
        const auto y = run_step(device, l, rows_of(p, s.columns(), before, rows), m);
        CHECK(relative_error(y, rows_of(expected, s.out(), before, rows)) < device.bound(bound));
        before += rows;
    }
}

/// Several sequences at once, one of them empty, padding behind them; then a few more rows of each.
void check_together(const Device& device, const Shape& s, double bound, StepKind kind = StepKind::prompt) {
    CAPTURE(s.width);
    CAPTURE(static_cast<int>(kind));
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
        Layout l{.rows = rows, .before = before, .slots = {0, 1, 2, 3}, .padding = 3, .kind = kind};
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

/// The row of sequence `at` at this position, from the keys and values in the caches.
std::vector<double> reference_row(const std::vector<float>& row, Memory& m, const Layout& l, size_t at,
                                  int position) {
    const Shape& s = m.shape;
    const auto keys = m.k_cache.values(), values = m.v_cache.values(), norm = m.q_norm.values();
    const auto place = [&](int64_t key, int64_t head) {
        return static_cast<size_t>(
            ((page_of(l, at, key / kPageTokens) * s.kv_heads + head) * kPageTokens + key % kPageTokens) *
            s.width);
    };
    std::vector<double> out;
    for (int64_t h = 0; h < s.heads; ++h) {
        const auto q = rotated(row.data() + 2 * h * s.width, norm, position, s.params());
        const int64_t kv_head = h / (s.heads / s.kv_heads);
        std::vector<double> sums(static_cast<size_t>(s.width));
        double total = 0;
        for (int64_t key = 0; key <= position; ++key) {
            const double *k = keys.data() + place(key, kv_head), *v = values.data() + place(key, kv_head);
            double score = 0;
            for (size_t i = 0; i < q.size(); ++i) score += q[i] * k[i];
            const double weight = std::exp(score / std::sqrt(static_cast<double>(s.width)));
            total += weight;
            for (size_t i = 0; i < q.size(); ++i) sums[i] += weight * v[i];
        }
        for (size_t i = 0; i < q.size(); ++i)
            out.push_back(
                sums[i] / total /
                (1 + std::exp(-static_cast<double>(row[static_cast<size_t>((2 * h + 1) * s.width) + i]))));
    }
    return out;
}

/// Only the rows of one sequence; the others keep their page tables.
Layout only(const Layout& l, size_t at) {
    Layout one = l;
    for (size_t i = 0; i < l.rows.size(); ++i)
        if (i != at) one.rows[i] = 0;
    one.padding = 0;
    return one;
}

Layout layout_of(StepKind kind, const std::vector<int>& rows, const std::vector<int>& before,
                 int64_t pages_each) {
    const std::vector<int> zeros(rows.size(), 0);
    return {.rows = rows,
            .before = before,
            .slots = zeros,
            .committed = zeros,
            .journal = zeros,
            .pages_each = pages_each,
            .kind = kind};
}

/// Answer rows of many sequences at once, up to 8 consecutive ones each; then every row in a step of its own.
void check_answers(const Device& device, const Shape& s, const std::vector<int>& rows,
                   const std::vector<int>& before) {
    CAPTURE(s.width);
    CAPTURE(s.heads);
    CAPTURE(rows.size());
    const int64_t pages_each = *std::max_element(before.begin(), before.end()) / kPageTokens + 2;
    Layout l = layout_of(StepKind::answer, rows, before, pages_each);
    l.padding = rows.size() > 1 ? 2 : 0;
    const auto pages = static_cast<int64_t>(rows.size()) * pages_each;
    Memory together(device, s, pages), alone(device, s, pages);
    together.remember(40), alone.remember(40);
    const auto p = device.rounded(Random(51).normals(l.tokens() * s.columns()));
    const auto y = run_step(device, l, p, together);
    int64_t t = 0;
    for (size_t i = 0; i < rows.size(); ++i)
        for (int r = 0; r < rows[i]; ++r, ++t) {
            Layout one = only(l, i);
            one.rows[i] = 1, one.before[i] = before[i] + r;
            CAPTURE(one.before[i]);
            const auto row = rows_of(p, s.columns(), t, 1);
            const auto got = run_step(device, one, row, alone);
            CHECK(got == rows_of(y, s.out(), t, 1));
            if (r + 1 == rows[i] && i % 3 == 0)
                CHECK(relative_error(got, reference_row(row, alone, l, i, one.before[i])) <
                      device.bound(4e-6));
        }
}

/// Prompt rows after `before` tokens: whole, cut at every 64 tokens, cut once, and beside others, few and
/// many.
void check_prompt(const Device& device, const Shape& s, int before, int rows, bool steep = false) {
    CAPTURE(s.width);
    CAPTURE(s.heads);
    CAPTURE(before);
    CAPTURE(rows);
    const int64_t pages_each = (before + rows) / kPageTokens + 20;
    const auto slice = [&](int from, int count, std::vector<int> beside) {
        return layout_of(StepKind::prompt, {beside[0], count, beside[1]}, {64, before + from, 0}, pages_each);
    };
    Memory m(device, s, 3 * pages_each);
    const auto p = device.rounded(Random(52).normals(rows * s.columns()));
    const auto run = [&](const std::vector<int>& ends, const std::vector<int>& beside) {
        m.remember(41, steep, [&](std::vector<float>& cache) {
            spoil(cache, s, slice(0, rows, {0, 0}), 1, before + rows);  // nobody may look there
        });
        std::vector<double> y;
        int from = 0;
        for (const int end : ends) {
            const Layout l = slice(from, end - from, beside);
            std::vector<float> in(static_cast<size_t>(l.tokens() * s.columns()), 0.5f);
            const auto own = rows_of(p, s.columns(), from, end - from);
            std::copy(own.begin(), own.end(), in.begin() + beside[0] * s.columns());
            const auto out = rows_of(run_step(device, l, in, m), s.out(), beside[0], end - from);
            y.insert(y.end(), out.begin(), out.end());
            from = end;
        }
        return y;
    };
    const auto whole = run({rows}, {0, 0});
    for (const int r : {0, rows - 1})
        CHECK(relative_error(rows_of(whole, s.out(), r, 1),
                             reference_row(rows_of(p, s.columns(), r, 1), m, slice(0, rows, {0, 0}), 1,
                                           before + r)) < device.bound(4e-6));
    CHECK(run({rows}, {3, 70}) == whole);
    CHECK(run({rows}, {1100, 1}) == whole);
    if (rows <= kPageTokens) return;
    CHECK(run({(rows - 1) / kPageTokens * kPageTokens, rows}, {0, 0}) == whole);
    if (rows > 1000) return;
    std::vector<int> every;
    for (int end = kPageTokens; end < rows; end += kPageTokens) every.push_back(end);
    every.push_back(rows);
    CHECK(run(every, {0, 0}) == whole);
}

/// Prompt rows of which only the last ones are wanted: their bits are those that they have where all are, and keys and values of
/// all are kept.
void check_wanted(const Device& device, const Shape& s, const std::vector<int>& rows,
                  const std::vector<int>& before, const std::vector<int>& wanted) {
    CAPTURE(s.width);
    CAPTURE(s.heads);
    CAPTURE(rows);
    CAPTURE(wanted);
    const int64_t pages_each = *std::max_element(before.begin(), before.end()) / kPageTokens +
                               *std::max_element(rows.begin(), rows.end()) / kPageTokens + 2;
    Layout l = layout_of(StepKind::prompt, rows, before, pages_each);
    const auto pages = static_cast<int64_t>(rows.size()) * pages_each;
    Memory all(device, s, pages), some(device, s, pages);
    all.remember(40), some.remember(40);
    const auto p = device.rounded(Random(51).normals(l.tokens() * s.columns()));
    const auto expected = run_step(device, l, p, all);
    l.wanted = wanted;
    const auto y = run_step(device, l, p, some);
    int64_t end = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
        end += rows[i];
        CHECK(rows_of(y, s.out(), end - wanted[i], wanted[i]) ==
              rows_of(expected, s.out(), end - wanted[i], wanted[i]));
    }
    CHECK(some.k_cache.values() == all.k_cache.values());
    CHECK(some.v_cache.values() == all.v_cache.values());
}

/// The models' head shapes, and some of the others that the GPU runs: any multiple of 8 up to 256.
std::vector<Shape> device_shapes(const Device& device) {
    const DType cache = device.activation;
    return {{16, 2, 256, 64, cache}, {12, 2, 256, 64, cache},  // six query heads a KV head, as the 27B
            {4, 2, 64, 32, cache},   {3, 1, 16, 16, cache},   {2, 2, 24, 8, cache}, {4, 1, 72, 64, cache}};
}

void attention_steps(Device& device) {
    for (const Shape& s : device_shapes(device))
        for (const StepKind kind : {StepKind::prompt, StepKind::answer}) {
            check_steps(device, s, {1, 2, 7, 8, 9, 33, 64, 130}, 4e-6, kind);
            check_steps(device, s, {63, 1, 1, 64, 1}, 4e-6, kind);  // page borders
            check_steps(device, s, {130, 1}, 4e-6, kind);
        }
}

void attention_together(Device& device) {
    for (const Shape& s : device_shapes(device))
        for (const StepKind kind : {StepKind::prompt, StepKind::answer})
            check_together(device, s, 4e-6, kind);
}

/// 64 rows, of few and of many keys; then fewer rows.
void attention_answers(Device& device) {
    const std::vector<int> rows = {8, 1, 7, 8, 1, 8, 1, 8, 8, 1, 8, 5};
    const std::vector<int> before = {0, 5, 60, 63, 64, 1020, 1023, 1024, 3000, 5000, 5000, 2047};
    const DType cache = device.activation;
    if (device.exact()) return check_answers(device, {2, 1, 16, 8, cache}, {8, 1, 7, 3}, {0, 5, 60, 1023});
    for (const Shape& s : {Shape{16, 2, 256, 64, cache}, Shape{6, 1, 256, 64, cache}}) {
        check_answers(device, s, rows, before);
        check_answers(device, s, {1, 2, 1}, {5000, 1023, 8000});
        check_answers(device, s, {1, 1, 1, 1, 1, 1, 1, 1, 1}, {0, 5, 63, 64, 1023, 1024, 2048, 4000, 5000});
        // After some thousand keys, rows of a sequence share what is read of them, in pairs or by four: borders of pages, of
        // chunks and of their runs between two of them and inside of a pair.
        for (const int position : {0, 1022, 3071, 4095, 7000, 7167, 8255, 10751})
            check_answers(device, s, {4}, {position});
        for (const int position : {1020, 2044, 2049, 3070, 4094, 7166, 8254, 10750}) {
            check_answers(device, s, {8}, {position});
            check_answers(device, s, {16}, {position});
        }
        check_answers(device, s, {3}, {5000});
        check_answers(device, s, {4, 7}, {510, 12000});
        check_answers(device, s, {8, 8, 8, 8, 8, 8, 8, 8}, {0, 56, 505, 1016, 1017, 4000, 6143, 10744});
        check_answers(device, s, {64}, {4000});
    }
    check_answers(device, {24, 4, 256, 64, cache}, {4, 0, 8}, {4093, 100, 8254});  // the 27B
    std::vector<int> some(40, 2), far(40);  // more sequences than a warp has lanes
    for (int i = 0; i < 40; ++i) far[static_cast<size_t>(i)] = 90 * i;
    some[33] = 0, some[39] = 9;
    check_answers(device, {6, 1, 256, 64, cache}, some, far);
    check_answers(device, {4, 2, 64, 32, cache}, {8, 1, 7, 3}, {0, 5, 60, 1023});
}

void attention_prompts(Device& device) {
    const DType cache = device.activation;
    if (device.exact()) {
        for (const int rows : {1, 65, 130}) check_prompt(device, {2, 1, 16, 8, cache}, 64, rows);
        return;
    }
    for (const Shape& s : {Shape{8, 1, 256, 64, cache}, Shape{12, 2, 256, 64, cache}}) {
        for (const int rows : {1, 2, 63, 64, 65, 130, 1000}) check_prompt(device, s, 0, rows);
        for (const int rows : {1, 130}) check_prompt(device, s, 4096, rows);
        check_prompt(device, s, 4032, 968);
        check_prompt(device, s, 8960, 200);
        check_prompt(device, s, 24640, 65);  // 7 segments
    }
    check_prompt(device, {8, 1, 256, 64, cache}, 0, 5000);
    const Shape both{16, 2, 256, 64, cache};
    check_prompt(device, both, 0, 2300);  // more tiles than an H200 has SMs, and some are left over
    check_prompt(device, both, 8192, 1100, true);
    check_prompt(device, {8, 1, 256, 64, cache}, 32768, 130, true);
    check_prompt(device, {8, 1, 256, 64, cache}, 6144, 1000, true);  // two blocks share a tile
    check_prompt(device, {24, 4, 256, 64, cache}, 2048, 300, true);
    for (const int rows : {1, 130}) check_prompt(device, {4, 2, 64, 32, cache}, 64, rows);
}

void attention_wanted(Device& device) {
    for (const Shape& s : device_shapes(device)) {
        check_wanted(device, s, {70, 1, 0, 5}, {0, 64, 0, 128}, {1, 1, 0, 3});
        check_wanted(device, s, {3, 66}, {64, 0}, {0, 0});
    }
    if (device.exact()) return;
    const Shape s{16, 2, 256, 64, device.activation};
    check_wanted(device, s, {2300}, {0}, {1});
    check_wanted(device, s, {1000, 0, 300, 40}, {8192, 0, 0, 4096}, {1, 0, 200, 1});
    check_wanted(device, s, {130}, {32768}, {17});
    check_wanted(device, {24, 4, 256, 64, device.activation}, {300, 20}, {2048, 9000}, {1, 1});
}

}  // namespace

DEVICE_TEST_CASE("gated_attention: one sequence in steps, across page borders", attention_steps)
DEVICE_TEST_CASE("gated_attention: several sequences and padding", attention_together)
DEVICE_TEST_CASE("gated_attention: an answer's row alone or beside others, the same bits", attention_answers)
DEVICE_TEST_CASE("gated_attention: a prompt's rows cut or whole, alone or not, the same bits",
                 attention_prompts)
DEVICE_TEST_CASE("gated_attention: of a prompt only the rows that are wanted", attention_wanted)

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
