// gated_attention over packed caches against double precision: what a step packs, and what it makes of packed keys and values;
// a prompt whole and cut.
#include "ops/packed_attention.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::packed_attention;

namespace {

/// The keys and values of a row that the step packed: no further from the truth than the reference's own packing, but for
/// rounding of what is packed.
void check_packed(const Device& device, const float* row, Memory& m, const Layout& l, size_t at,
                  int64_t position) {
    const Shape& s = m.shape;
    for (const bool values : {false, true})
        for (int64_t g = 0; g < s.kv_heads; ++g) {
            const float* x = row + (values ? s.v_begin() : s.k_begin()) + g * s.width;
            const auto truth =
                values ? std::vector<double>(x, x + s.width) : rotated(x, m.k_norm.values(), position, s);
            std::vector<uint8_t> block(s.block_bytes(values));
            ref::pack(s.kind(values), truth, s.params().scale(values, g), block.data(), 7);
            const auto best = ref::unpack(s.kind(values), block.data(), 7, truth.size()),
                       found = m.row(values, l, at, position, g);
            double error = 0, least = 0, all = 0;
            for (size_t i = 0; i < truth.size(); ++i) {
                error += (found[i] - truth[i]) * (found[i] - truth[i]);
                least += (best[i] - truth[i]) * (best[i] - truth[i]);
                all += truth[i] * truth[i];
            }
            CAPTURE(values);
            CAPTURE(g);
            const double rounding = device.exact() ? 1e-6 : 4e-3;
            CHECK(std::sqrt(error) <= 1.03 * std::sqrt(least) + rounding * std::sqrt(all));
        }
}
/// Rows of several sequences at once; some of them against the reference, all against themselves alone.
void check_rows(const Device& device, const Shape& s, StepKind kind, const std::vector<int>& rows,
                const std::vector<int>& before) {
    CAPTURE(std::string(dtype_name(s.k)));
    CAPTURE(std::string(dtype_name(s.v)));
    CAPTURE(s.width);
    CAPTURE(static_cast<int>(kind));
    int most = 0;
    for (size_t i = 0; i < rows.size(); ++i) most = std::max(most, before[i] + rows[i]);
    const int64_t pages_each = most / kPageTokens + 2;
    const Layout l = layout_of(kind, rows, before, pages_each);
    const auto pages = static_cast<int64_t>(rows.size()) * pages_each;
    Memory together(device, s, pages), alone(device, s, pages);
    together.remember(40), alone.remember(40);
    const auto p = device.rounded(Random(51).normals(l.tokens() * s.columns()));
    const auto y = run_step(device, l, p, together);
    int64_t t = 0;
    for (size_t i = 0; i < rows.size(); t += rows[i++]) {
        if (rows[i] == 0) continue;
        CAPTURE(before[i]);
        CAPTURE(rows[i]);
        Layout one = l;
        for (size_t j = 0; j < rows.size(); ++j)
            if (j != i) one.rows[j] = 0;
        const auto own = run_step(device, one, rows_of(p, s.columns(), t, rows[i]), alone);
        CHECK(own == rows_of(y, s.out(), t, rows[i]));
        for (const int r : {0, rows[i] - 1}) {
            const float* row = p.data() + (t + r) * s.columns();
            check_packed(device, row, alone, l, i, before[i] + r);
            if (before[i] + r > 6000 || (before[i] > 400 && i % 3 > 0)) continue;
            const auto found = rows_of(own, s.out(), r, 1);
            const double error = relative_error(found, reference_row(row, alone, l, i, before[i] + r));
            CAPTURE(r);
            CHECK(error < device.bound(1.5e-5));
        }
    }
}

void packed_steps(Device& device) {
    const int far = device.exact() ? 320 : 1984;
    for (const auto& list : {packed_shapes(16, 2, 256, 64), packed_shapes(4, 2, 64, 32)})
        for (const Shape& s : list) {
            check_rows(device, s, StepKind::answer, {1, 8, 0, 3, 1}, {0, 60, 0, 300, far + 100});
            check_rows(device, s, StepKind::prompt, {65, 1, 0, 70}, {0, 64, 0, far});
        }
    if (device.exact()) return;
    for (const Shape& s : packed_shapes(6, 1, 256, 64)) {
        check_rows(device, s, StepKind::answer, {1, 1, 1, 1, 8, 1, 1, 1, 5},
                   {0, 63, 64, 1023, 1024, 3000, 4000, 5000, 5500});
        check_rows(device, s, StepKind::answer, {1}, {60'000});
        // 16 keys, so many chunks as there can be and beyond, in both sizes; more rows than a block packs at first
        check_rows(device, s, StepKind::answer, {4, 1}, {21'502, 15});
        check_rows(device, s, StepKind::answer, {3, 2}, {43'007, 2'047});
        check_rows(device, s, StepKind::answer, {150, 1}, {1100, 16});
        check_rows(device, s, StepKind::prompt, {1100, 7}, {0, 64});
        check_rows(device, s, StepKind::prompt, {130, 1000}, {4096, 2048});
        check_rows(device, s, StepKind::prompt, {65}, {24'640});
    }
}

/// A prompt cut at every 64 tokens, in two, and whole: the same bits and bytes.
void packed_cuts(Device& device) {
    for (Shape s : packed_shapes(8, 1, 256, 64)) {
        CAPTURE(std::string(dtype_name(s.k)));
        CAPTURE(std::string(dtype_name(s.v)));
        const int rows = device.exact() ? 130 : 700, before = 64;
        const auto p = device.rounded(Random(52).normals(rows * s.columns()));
        const int64_t pages_each = (rows + before) / kPageTokens + 2;
        Memory m(device, s, pages_each);
        const auto run = [&](int step) {
            m.remember(41);
            std::vector<double> y;
            for (int from = 0; from < rows; from += step) {
                const int count = std::min(step, rows - from);
                const Layout l = layout_of(StepKind::prompt, {count}, {before + from}, pages_each);
                const auto part = run_step(device, l, rows_of(p, s.columns(), from, count), m);
                y.insert(y.end(), part.begin(), part.end());
            }
            return std::pair(y, m.k.bytes);
        };
        const auto whole = run(rows);
        CHECK(run(64) == whole);
        CHECK(run(128) == whole);
    }
}

/// Of a prompt only the last rows are wanted: the bits that they have among all, and all bytes of the caches.
void packed_wanted(Device& device) {
    for (const Shape& s : packed_shapes(16, 2, 256, 64)) {
        CAPTURE(std::string(dtype_name(s.k)));
        CAPTURE(std::string(dtype_name(s.v)));
        const int many = device.exact() ? 66 : 300,
                  before = device.exact() ? 128 : 6336;  // four segments of keys
        for (const std::vector<int>& rows : {std::vector<int>{many, 0, many}, std::vector<int>{3, 1, 20}}) {
            const int64_t pages_each = (before + many) / kPageTokens + 1;
            Layout l = layout_of(StepKind::prompt, rows, {0, 0, before}, pages_each);
            Memory all(device, s, 3 * pages_each), some(device, s, 3 * pages_each);
            all.remember(43), some.remember(43);
            const auto p = device.rounded(Random(55).normals(l.tokens() * s.columns()));
            const auto expected = run_step(device, l, p, all);
            const auto check = [&](int first, int last) {
                l.wanted = {first, 0, last};
                const auto y = run_step(device, l, p, some);
                for (const auto& [end, count] :
                     {std::pair(rows[0], first), {rows[0] + rows[1] + rows[2], last}})
                    CHECK(rows_of(y, s.out(), end - count, count) ==
                          rows_of(expected, s.out(), end - count, count));
                CHECK(some.k.bytes == all.k.bytes);
                CHECK(some.v.bytes == all.v.bytes);
                some.remember(43);
            };
            check(1, 2);
            check(2, std::min(rows[2], 270));  // of so many, pages are unpacked first
            check(0, 0);
        }
    }
}

/// Queries beyond what F16 holds, keys as small, values of which some are 2^23 times others; what lies behind the last row is no
/// number, whichever format reads it.
void packed_sizes(Device& device) {
    constexpr float kLarge = 1 << 20;
    for (const Shape& s : packed_shapes(16, 2, 256, 64))
        for (const StepKind kind : {StepKind::answer, StepKind::prompt}) {
            if (!s.k_scale.empty()) continue;
            CAPTURE(std::string(dtype_name(s.k)));
            CAPTURE(std::string(dtype_name(s.v)));
            CAPTURE(static_cast<int>(kind));
            const int before = 200;
            const int64_t pages = before / kPageTokens + 1;
            const Layout l = layout_of(kind, {1}, {before}, pages);
            Memory m(device, s, pages);
            m.q_norm.set(std::vector<float>(256, kLarge)), m.k_norm.set(std::vector<float>(256, 1 / kLarge));
            for (const bool values : {false, true}) {
                auto& bytes = (values ? m.v : m.k).bytes;
                std::fill(bytes.begin(), bytes.end(), uint8_t{0xff});
                for (int key = 0; key < before; ++key)
                    for (int64_t g = 0; g < s.kv_heads; ++g) {
                        auto x =
                            Random(static_cast<unsigned>(70 + 4 * key + 2 * g + values)).normals(s.width);
                        for (float& e : x) e *= values ? std::ldexp(1.0f, key * 5 % 24) : 1 / kLarge;
                        ref::pack(s.kind(values), {x.begin(), x.end()}, 0,
                                  m.block(values, page_of(l, 0, key / kPageTokens), g),
                                  static_cast<size_t>(key % kPageTokens));
                    }
            }
            m.k.upload(), m.v.upload();
            const auto p = device.rounded(Random(54).normals(s.columns()));
            const auto y = run_step(device, l, p, m);
            CHECK(relative_error(y, reference_row(p.data(), m, l, 0, before)) < device.bound(1.5e-5));
        }
}

/// A sequence whose keys, or values, have an infinity: its answers are NaN from there on, its neighbours' what they were; and
/// a sequence that gets its pages later reads nothing of it.
void packed_infinities(Device& device) {
    for (const Shape& s : packed_shapes(16, 2, 256, 64))
        for (const bool values : {false, true})
            for (const StepKind kind : {StepKind::answer, StepKind::prompt}) {
                CAPTURE(std::string(dtype_name(s.k)));
                CAPTURE(std::string(dtype_name(s.v)));
                CAPTURE(values);
                CAPTURE(static_cast<int>(kind));
                const std::vector<int> rows = {3, 3};
                const Layout l = layout_of(kind, rows, {64, 64}, 3);
                Memory m(device, s, 6);
                const auto sound = device.rounded(Random(53).normals(l.tokens() * s.columns()));
                m.remember(42);
                const auto expected = run_step(device, l, sound, m);
                auto broken = sound;
                broken[static_cast<size_t>(s.columns() + (values ? s.v_begin() : s.k_begin()) + 5)] =
                    INFINITY;
                m.remember(42);
                const auto y = run_step(device, l, broken, m);
                const auto failed = rows_of(y, s.out(), 1, 2);
                CHECK(std::any_of(failed.begin(), failed.end(), [](double v) { return std::isnan(v); }));
                CHECK(rows_of(y, s.out(), 3, 3) == rows_of(expected, s.out(), 3, 3));
                if (kind == StepKind::answer)
                    CHECK(rows_of(y, s.out(), 0, 1) == rows_of(expected, s.out(), 0, 1));
                // The page still has the broken rows behind the one that another sequence writes.
                Layout one = layout_of(kind, {1, 0}, {64, 64}, 3);
                CHECK(run_step(device, one, rows_of(sound, s.columns(), 0, 1), m) ==
                      rows_of(expected, s.out(), 0, 1));
            }
}

}  // namespace

DEVICE_TEST_CASE("gated_attention: packed caches, a row that is not finite", packed_infinities)
DEVICE_TEST_CASE("gated_attention: packed caches, rows alone and beside others", packed_steps)
DEVICE_TEST_CASE("gated_attention: packed caches, a prompt cut or whole", packed_cuts)
DEVICE_TEST_CASE("gated_attention: packed caches, of a prompt only the rows that are wanted", packed_wanted)
DEVICE_TEST_CASE("gated_attention: packed caches, queries, keys and values of any size", packed_sizes)
