// best_token and write_ring: what a chain of drafts is made of.
#include <limits>

#include "ggml-like/ops/best_token.h"
#include "ggml-like/ops/write_ring.h"
#include "ops/harness.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// ids [2, rows], of which the op writes the second row.
std::vector<double> run_best(const Device& device, const std::vector<float>& logits, int64_t rows,
                             const TokenColumns& columns) {
    Graph g;
    const auto width = static_cast<int64_t>(logits.size()) / rows;
    Tensor* in = g.input("logits", DType::F32, {rows, width});
    Tensor* ids = g.scratch("ids", DType::I32, {2, rows});
    g.output(ids);
    best_token(g, "best", in, columns, g.view("second", ids, rows, {rows}, {1}));
    const auto all = run_graph(device, std::move(g), [&](Plan& p) { set_input(p, in, logits); });
    return {all[0].begin() + rows, all[0].end()};
}

void best_tokens(Device& device) {
    for (const int64_t width : {3, 300, 5000, 98304})
        for (const int64_t rows : {1, 2, 9, 64}) {
            CAPTURE(width);
            CAPTURE(rows);
            const TokenColumns columns{.first = 2, .start = 3 * width, .vocab = 3 * width + 1};
            std::vector<float> logits = Random(7).normals(rows * width);
            std::vector<double> expected;
            for (int64_t r = 0; r < rows; ++r) {
                float* row = logits.data() + r * width;
                // The second column is beyond the vocabulary; of two highest ones the first wins.
                row[1] = 100;
                const int64_t at = r % 3 == 0 ? 0 : 2 + (r * 7919) % (width - 2);
                row[at] = 50;
                row[at == 0 ? width - 1 : std::min(at + 1, width - 1)] = 50;
                if (at > 2) row[at - 1] = kNaN;
                expected.push_back(static_cast<double>(at == 0 ? 3 * width : at - 2));
            }
            CHECK(run_best(device, logits, rows, columns) == expected);
        }
    const TokenColumns all{.first = 0, .start = 0, .vocab = 4};
    CHECK(run_best(device, {kNaN, kNaN, kNaN, kNaN}, 1, all) == std::vector<double>{0});
    CHECK(run_best(device, {kNaN, -kInfinity, kNaN, kNaN}, 1, all) == std::vector<double>{1});
    CHECK(run_best(device, {0, -1, kInfinity, 3}, 1, all) == std::vector<double>{2});
    CHECK(run_best(device, {-3, -1, -1, -2}, 1, all) == std::vector<double>{1});
}

/// Rings of 4 entries: sequences of 1, 7 and 4 rows in slots 2, 0 and 3, then padding.
void rings(Device& device) {
    constexpr int64_t kWidth = 48, kEntries = 4, kSlots = 4;
    const Layout l{.rows = {1, 7, 4}, .before = {9, 3, 0}, .slots = {2, 0, 3}, .padding = 2};
    Guarded ring(device, "ring", DType::F32, Place::state, {kSlots, kEntries, kWidth});
    ring.fill(-1);
    const std::vector<float> x = Random(4).normals(l.tokens() * kWidth);
    Graph g;
    Tensor* in = g.input("x", DType::F32, {l.tokens(), kWidth});
    const Batch batch = declare_batch(g, l);
    write_ring(g, "ring", in, g.external(ring.tensor()), batch);
    run_graph(device, std::move(g), [&](Plan& p) {
        set_input(p, in, x);
        fill_batch(p, batch, l);
    });
    std::vector<double> expected(static_cast<size_t>(kSlots * kEntries * kWidth), -1);
    int64_t row = 0;
    for (size_t s = 0; s < l.rows.size(); ++s)
        for (int r = 0; r < l.rows[s]; ++r, ++row)
            for (int64_t i = 0; i < kWidth; ++i)  // later positions over earlier ones
                expected[static_cast<size_t>((l.slots[s] * kEntries + (l.before[s] + r) % kEntries) * kWidth +
                                             i)] = double{x[static_cast<size_t>(row * kWidth + i)]};
    CHECK(ring.values() == expected);
}

}  // namespace

DEVICE_TEST_CASE("best_token finds the highest logit, of a head with fewer rows than tokens", best_tokens)
DEVICE_TEST_CASE("write_ring keeps the last rows of each sequence by position", rings)
