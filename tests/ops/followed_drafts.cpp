// accept_drafts, follow_choice and follow_draft: what a device finds right of a draft, and the rows that go on from there. embed of
// tokens that only the device knows.
#include "ggml-like/ops/accept_drafts.h"
#include "ggml-like/ops/embed.h"
#include "ggml-like/ops/follow_choice.h"
#include "ggml-like/ops/follow_draft.h"
#include "ggml-like/ops/logits_top.h"
#include "ops/matrix.h"
#include "ops/residual_rows.h"

using namespace quern;
using namespace quern::test;

namespace {

using Ids = std::vector<int32_t>;

/// I32 in the device's memory.
struct DeviceIds {
    DeviceIds(const Device& device, const char* name, const Ids& values, std::initializer_list<int64_t> shape)
        : device_(device), memory(device, name, DType::I32, Place::state, shape) {
        device.backend->upload(memory.tensor().data, values.data(),
                               static_cast<int64_t>(values.size() * sizeof(int32_t)));
        device.backend->synchronize();
    }
    std::vector<double> values() const { return download(*device_.backend, memory.tensor()); }

  private:
    const Device& device_;

  public:
    Guarded memory;
};

void fill(Plan& p, const Tensor* t, const Ids& values) {
    std::copy(values.begin(), values.end(), p.input<int32_t>(t));
}

constexpr int64_t kSlots = 6;
/// Sequences of 1, 4, no, 8 and 40 rows, then padding. Of those that follow the third and fourth numbers of right rows count.
const Layout kLayout{.rows = {1, 4, 0, 8, 40},
                     .before = {9, 70, 0, 33, 5},
                     .slots = {5, 0, 0, 2, 3},
                     .committed = std::vector<int>(5, 0),
                     .journal = std::vector<int>(5, 0),
                     .padding = 3,
                     .kind = StepKind::answer};
const Ids kRight = {1, 3, 0, 8, 36};

Ids some_ids(int64_t count, int32_t first) {
    Ids ids(static_cast<size_t>(count));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = first + static_cast<int32_t>(i * 7919 % 1000);
    return ids;
}

/// Tokens of which kRight of each sequence are what the rows before them choose. `late`: every second one is on the device only.
void accepted(Device& device) {
    for (const bool late : {false, true}) {
        CAPTURE(late);
        const int64_t rows = kLayout.tokens();
        const Ids best = some_ids(rows, 100);  // of each row
        Ids ids = some_ids(rows, 5000), source(static_cast<size_t>(rows), -1), drafts(64, -7);
        std::vector<double> expected(2 * kSlots, -3);
        size_t row = 0;
        for (size_t s = 0; s < kRight.size(); ++s) {
            for (int r = 1; r < kLayout.rows[s]; ++r)
                ids[row + static_cast<size_t>(r)] =
                    best[row + static_cast<size_t>(r) - 1] + (r == kRight[s] ? 1 : 0);
            if (kRight[s] > 0) {
                const auto slot = static_cast<size_t>(kLayout.slots[s]);
                expected[2 * slot] = kRight[s];
                expected[2 * slot + 1] = best[row + static_cast<size_t>(kRight[s]) - 1];
            }
            row += static_cast<size_t>(kLayout.rows[s]);
        }
        if (late)
            for (size_t t = 0; t < ids.size(); t += 2) {
                drafts[63 - t] = std::exchange(ids[t], -9);
                source[t] = static_cast<int32_t>(63 - t);
            }
        const DeviceIds chosen(device, "chosen", Ids(2 * kSlots, -3), {kSlots, 2}),
            drafted(device, "drafts", drafts, {64});
        Graph g;
        Batch batch = declare_batch(g, kLayout);
        batch.token_ids = g.input("ids", DType::I32, {rows});
        Tensor* top = g.input("top", DType::I32, {rows, kTopWords});
        OtherRows others;
        if (late) others = {g.input("source", DType::I32, {rows}), g.external(drafted.memory.tensor())};
        accept_drafts(g, "accept", batch, others, top, g.external(chosen.memory.tensor()));
        run_graph(device, std::move(g), [&](Plan& p) {
            fill_batch(p, batch, kLayout);
            fill(p, batch.token_ids, ids);
            if (late) fill(p, others.source, source);
            for (int64_t t = 0; t < rows; ++t)
                p.input<int32_t>(top)[t * kTopWords] = best[static_cast<size_t>(t)];
        });
        CHECK(chosen.values() == expected);
    }
}

const Ids kFollows = {1, 0, 0, 1, 1}, kChosen = {4, 70, 0, 0, 3, 71, 17, 72, 0, 0, 1, 73};

/// kChosen of the slots 5, 2 and 3.
void blocks_follow(Device& device) {
    const int64_t rows = kLayout.tokens();
    const DeviceIds chosen(device, "chosen", kChosen, {kSlots, 2});
    const Ids ids = some_ids(rows, 100);
    Graph g;
    Batch batch = declare_batch(g, kLayout);
    batch.token_ids = g.input("ids", DType::I32, {rows});
    batch.follows = g.input("follows", DType::I32, {5});
    const auto [to_ids, positions] = follow_choice(g, "follow", batch, g.external(chosen.memory.tensor()));
    g.output(to_ids);
    g.output(positions);
    const auto out = run_graph(device, std::move(g), [&](Plan& p) {
        fill_batch(p, batch, kLayout);
        fill(p, batch.token_ids, ids);
        fill(p, batch.follows, kFollows);
    });
    std::vector<double> same(ids.begin(), ids.end()), at;
    for (size_t s = 0; s < kLayout.rows.size(); ++s)
        for (int r = 0; r < kLayout.rows[s]; ++r) at.push_back(kLayout.before[s] + r);
    at.resize(static_cast<size_t>(rows), 0);
    same[0] = 73, same[5] = 71, same[13] = 72;
    at[0] += 1;
    for (size_t t = 5; t < 13; ++t) at[t] += 3;
    for (size_t t = 13; t < 53; ++t) at[t] += 17;
    CHECK(out[0] == same);
    CHECK(out[1] == at);
}

/// The same, with all that may be there and with the least.
void drafts_follow(Device& device) {
    for (const bool all : {false, true}) {
        CAPTURE(all);
        const int64_t rows = kLayout.tokens();
        const DeviceIds chosen(device, "chosen", kChosen, {kSlots, 2}),
            drafted(device, "drafts", some_ids(30, 9000), {30});
        const Ids ids = some_ids(rows, 100);
        Ids source(static_cast<size_t>(rows), -1);
        for (int32_t k = 0; k < 30; ++k) source[static_cast<size_t>(20 + k)] = 29 - k;
        Graph g;
        Batch batch = declare_batch(g, kLayout);
        batch.follows = g.input("follows", DType::I32, {5});
        const OtherRows others{g.input("source", DType::I32, {rows}), g.external(drafted.memory.tensor())};
        FollowedRows in{g.input("ids", DType::I32, {rows})};
        if (all) {
            in.last_rows = g.input("last", DType::I32, {5});
            in.later_positions = g.input("later", DType::I32, {3, 5});
            in.later_rope = g.input("rope", DType::I32, {3, 5});
        }
        const FollowedRows to =
            follow_draft(g, "follow", batch, others, in, g.external(chosen.memory.tensor()));
        for (Tensor* t : {to.ids, to.last_rows, to.later_positions, to.later_rope})
            if (t != nullptr) g.output(t);
        const Ids last = {0, 4, 4, 12, 52}, later = some_ids(15, 200), rope = some_ids(15, 300);
        const auto out = run_graph(device, std::move(g), [&](Plan& p) {
            fill_batch(p, batch, kLayout);
            fill(p, batch.follows, kFollows);
            fill(p, others.source, source);
            fill(p, in.ids, ids);
            if (!all) return;
            fill(p, in.last_rows, last);
            fill(p, in.later_positions, later);
            fill(p, in.later_rope, rope);
        });
        std::vector<double> expected(ids.begin(), ids.end());
        const Ids of_drafts = some_ids(30, 9000);
        for (size_t k = 0; k < 30; ++k) expected[20 + k] = of_drafts[29 - k];
        expected[0] = 73, expected[5 + 2] = 71, expected[13 + 16] = 72;
        CHECK(out[0] == expected);
        if (!all) continue;
        CHECK(out[1] == std::vector<double>{0, 4, 4, 7, 29});
        const Ids by = {1, 0, 0, 3, 17};
        for (size_t k = 0; k < 15; ++k) {
            CHECK(out[2][k] == later[k] + by[k % 5]);
            CHECK(out[3][k] == rope[k] + by[k % 5]);
        }
    }
}

/// Rows whose ids are elsewhere are those of these ids, alone and after all that came before.
void embeds_late(Device& device) {
    WeightStore store(3);
    const Matrix m = random_matrix(store, {Form::bf16}, {37}, 144);
    const Weight table = placed(device, m.weight);
    const Norm norm(device, 4, 144);
    const DeviceIds drafted(device, "drafts", {36, 8, 21}, {3});
    const auto run = [&](const Ids& ids, const Ids& source, bool after_all) {
        Graph g;
        Tensor *in = g.input("ids", DType::I32, {4}), *from = g.input("source", DType::I32, {4});
        const OtherRows others =
            source.empty() ? OtherRows{} : OtherRows{from, g.external(drafted.memory.tensor())};
        const Residual e =
            embed(g, "e", table, in, norm.next(g, device, StepKind::answer), others, after_all);
        for (Tensor* out : {e.x, e.h, e.squares}) g.output(out);
        return run_graph(device, std::move(g), [&](Plan& p) {
            fill(p, in, ids);
            fill(p, from, source);
        });
    };
    const auto expected = run({5, 21, 36, 7}, {}, false);
    CHECK(run({5, 1, 0, 7}, {-1, 2, 0, -1}, false) == expected);
    CHECK(run({5, 1, 0, 7}, {-1, 2, 0, -1}, true) == expected);
}

}  // namespace

DEVICE_TEST_CASE("accept_drafts counts the rows whose tokens the rows before them choose", accepted)
DEVICE_TEST_CASE("follow_choice moves blocks behind what was chosen", blocks_follow)
DEVICE_TEST_CASE("follow_draft moves rows behind what was right of a draft", drafts_follow)
DEVICE_TEST_CASE("embed of ids that only the device knows", embeds_late)
