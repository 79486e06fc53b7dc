// gated_attention over long packed caches: chunks and single steps after 128K tokens, planted keys at every length up to 262,144.
#include "ops/packed_attention.h"

using namespace quern;
using namespace quern::test;
using namespace quern::test::packed_attention;

namespace {

/// Far into a text, rows as a prompt and one by one as answers: the same bytes packed, the same result but for rounding.
void packed_far_rows(Device& device) {
    const int before = device.exact() ? 16'384 : 131'008, rows = device.exact() ? 5 : 64;
    for (const Shape& s : packed_shapes(4, 1, 256, 64)) {
        if (!s.k_scale.empty()) continue;
        CAPTURE(std::string(dtype_name(s.k)));
        CAPTURE(std::string(dtype_name(s.v)));
        const auto p = device.rounded(Random(53).normals(rows * s.columns()));
        const int64_t pages_each = (rows + before) / kPageTokens + 2;
        Memory m(device, s, pages_each);
        m.remember(44);
        const Layout whole = layout_of(StepKind::prompt, {rows}, {before}, pages_each);
        const auto chunk = run_step(device, whole, p, m);
        const auto packed = m.k.bytes;
        m.remember(44);
        std::vector<double> steps;
        for (int r = 0; r < rows; ++r) {
            const Layout one = layout_of(StepKind::answer, {1}, {before + r}, pages_each);
            const auto y = run_step(device, one, rows_of(p, s.columns(), r, 1), m);
            steps.insert(steps.end(), y.begin(), y.end());
        }
        CHECK(m.k.bytes == packed);
        CHECK(relative_error(chunk, steps) < device.bound(1e-5));
        for (const double y : chunk) CHECK(std::isfinite(y));
    }
}

/// Of many random keys one fits the query; its value is what comes back. Rows of answers and of prompts.
void planted_keys(Device& device) {
    for (Shape s : packed_shapes(1, 1, 256, 64)) {
        if (!s.k_scale.empty()) continue;
        s.heads = 2;
        for (const int length : {1 << 10, 1 << 13, 1 << 17, 1 << 18}) {
            if (device.exact() && length > 1 << 10 && (s.k != s.v || length != 1 << 18)) continue;
            const int64_t pages_each = length / kPageTokens + 1;
            Memory m(device, s, pages_each);
            const int position = length - 1;
            for (const StepKind kind : {StepKind::answer, StepKind::prompt})
                for (const int at : {77, length / 2 + 5, length - 70}) {
                    if (device.exact() && kind == StepKind::prompt && at != 77) continue;
                    CAPTURE(std::string(dtype_name(s.k)));
                    CAPTURE(std::string(dtype_name(s.v)));
                    CAPTURE(length);
                    CAPTURE(at);
                    CAPTURE(static_cast<int>(kind));
                    const Layout l = layout_of(kind, {1}, {position}, pages_each);
                    auto p = device.rounded(Random(60).normals(s.columns()));
                    std::copy_n(p.begin(), s.width, p.begin() + 2 * s.width);  // both heads ask the same
                    m.remember(43);
                    auto key = rotated(p.data(), m.q_norm.values(), position, s);
                    for (double& x : key) x *= 2;
                    const auto value = Random(61).normals(s.width);
                    const int64_t page = page_of(l, 0, at / kPageTokens);
                    const auto place = static_cast<size_t>(at % kPageTokens);
                    ref::pack(s.kind(false), key, 0, m.block(false, page, 0), place);
                    ref::pack(s.kind(true), {value.begin(), value.end()}, 0, m.block(true, page, 0), place);
                    m.k.upload(), m.v.upload();
                    const auto y = run_step(device, l, p, m);
                    const auto kept = m.row(true, l, 0, at, 0);
                    std::vector<double> want;
                    for (int64_t h = 0; h < s.heads; ++h)
                        for (int64_t i = 0; i < s.width; ++i)
                            want.push_back(kept[static_cast<size_t>(i)] /
                                           (1 + std::exp(-static_cast<double>(
                                                    p[static_cast<size_t>((2 * h + 1) * s.width + i)]))));
                    CHECK(relative_error(y, want) < 2e-2);
                }
        }
    }
}

}  // namespace

DEVICE_TEST_CASE("gated_attention: packed caches, a chunk and single steps after 128K tokens",
                 packed_far_rows)
DEVICE_TEST_CASE("gated_attention: packed caches, planted keys up to 262,144 tokens", planted_keys)
