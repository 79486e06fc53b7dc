// A whole model's answer step: what each op makes of a row among others, and of the same row alone, bit by bit. Names the
// first tensor that differs, so that an answer that changes in a crowd leads to its op.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "engine_harness.h"
#include "ggml-like/ops/linear_add.h"
#include "models/families.h"
#include "ops/second_backend.h"
#include "tools/engine/plan_cache.h"

namespace quern {
namespace {

constexpr int64_t kMaxRows = 64;

/// Rows of a step for sequences that have slots and pages of their own.
struct Rows {
    int64_t first;  // the token stream of row 0; row i has that of first + i
    int64_t count;
    int64_t slot;  // of row 0
};

enum class Watch {
    every_tensor,  // all stay where they are until they have been looked at
    logits         // memory is used again within the step, as when it answers somebody
};

/// An answer step of which some tensors are looked at.
class WatchedStep {
  public:
    WatchedStep(const Model& model, Backend& backend, const StatePool& pool, int64_t rows, Watch watch)
        : backend_(backend), rows_(rows) {
        BuiltGraph built = model.build({.kind = StepKind::answer,
                                        .tokens = rows,
                                        .sequences = rows,
                                        .logit_rows = rows,
                                        .pages = 1,
                                        .vocab = model.info().vocab},
                                       pool, backend.activation_dtype());
        batch_ = built.batch;
        std::set<const Tensor*> read = {built.logits};
        if (watch == Watch::every_tensor)
            for (const Node& node : built.graph.nodes())
                for (Tensor* t : node.inputs) read.insert(built.graph.root(t));
        for (const Node& node : built.graph.nodes())
            for (Tensor* t : node.outputs)
                if (read.contains(t) && t->shape[0] == rows && t->dtype != DType::I64) {
                    built.graph.output(t);
                    watched_.push_back({t, written_row_bytes(node, *t)});
                }
        plan_ = std::make_unique<Plan>(std::move(built.graph), backend);
    }

    /// Each watched tensor's bytes. Rows behind rows.count belong to nobody, as in a padded step of the engine.
    std::vector<std::vector<char>> run(const Rows& rows, int64_t position) {
        const auto fill = [&](const Tensor* t, auto value_of) {
            auto* to = plan_->input<int32_t>(t);
            for (int64_t i = 0; i < t->shape[0]; ++i) to[i] = static_cast<int32_t>(value_of(i));
        };
        const auto real = [&](int64_t i) { return i < rows.count; };
        fill(batch_.token_ids, [&](int64_t i) { return 17 * (rows.first + (real(i) ? i : 0)) + position; });
        fill(batch_.positions, [&](int64_t i) { return real(i) ? position : 0; });
        fill(batch_.row_sequence, [&](int64_t i) { return real(i) ? i : -1; });
        fill(batch_.start, [&](int64_t i) { return std::min(i, rows.count); });
        fill(batch_.logit_rows, [&](int64_t i) { return real(i) ? i : 0; });
        for (const Tensor* t : {batch_.slots, batch_.pages})
            fill(t, [&](int64_t i) { return rows.slot + (real(i) ? i : 0); });
        for (const Tensor* t : {batch_.committed, batch_.journal}) fill(t, [](int64_t) { return 0; });
        std::fill_n(plan_->input<float>(batch_.temperature), rows_, 1.0f);
        plan_->run();
        backend_.synchronize();
        std::vector<std::vector<char>> values;
        for (const Watched& w : watched_) {
            values.emplace_back(static_cast<size_t>(w.tensor->bytes()));
            backend_.download(values.back().data(), w.tensor->data, w.tensor->bytes());
        }
        return values;
    }
    struct Watched {
        const Tensor* tensor;
        size_t row_bytes;  // that are written: the router's logits have columns behind them that nobody reads
    };
    const std::vector<Watched>& watched() const { return watched_; }

  private:
    static size_t written_row_bytes(const Node& node, const Tensor& t) {
        if (node.op == &kLinearAdd && node.outputs.size() > 3 && node.outputs[3] == &t)
            return sizeof(float) * static_cast<size_t>(node.params<LinearAddParams>().router->rows);
        return static_cast<size_t>(t.bytes() / t.shape[0]);
    }

    Backend& backend_;
    int64_t rows_;
    Batch batch_;
    std::vector<Watched> watched_;
    std::unique_ptr<Plan> plan_;
};

using Bytes = std::vector<std::vector<char>>;  // of each watched tensor

/// Row `row` of tensors that have `rows` of them.
const char* row_of(const std::vector<char>& bytes, int64_t row, int64_t rows) {
    return bytes.data() + static_cast<int64_t>(bytes.size()) / rows * row;
}

/// The first tensor of which row `row` of `rows` differs between two steps, of which `b` may be that of the row alone; empty:
/// none does.
std::string first_difference(const WatchedStep& step, const Bytes& a, const Bytes& b, int64_t row,
                             int64_t rows, bool alone) {
    for (size_t i = 0; i < a.size(); ++i) {
        const WatchedStep::Watched& w = step.watched()[i];
        const char* other = alone ? b[i].data() : row_of(b[i], row, rows);
        if (std::memcmp(row_of(a[i], row, rows), other, w.row_bytes) != 0) return w.tensor->name;
    }
    return {};
}

/// Steps of `filled` rows, padded to `rows`, and the same rows one by one; then all of it once more.
void check_step(Backend& backend, const Model& model, const StatePool& pool, Watch watch, int64_t rows,
                int64_t filled, int64_t steps) {
    CAPTURE(rows);
    CAPTURE(filled);
    WatchedStep one(model, backend, pool, 1, watch), many(model, backend, pool, rows, watch);
    std::vector<Bytes> first;
    for (int64_t position = 0; position < steps; ++position) {
        CAPTURE(position);
        first.push_back(many.run({0, filled, 0}, position));
        for (const int64_t row : std::set<int64_t>{0, filled / 2, filled - 1}) {
            CAPTURE(row);
            const auto alone = one.run({row, 1, kMaxRows + row}, position);
            CHECK(first_difference(one, first.back(), alone, row, rows, true) == "");
        }
    }
    for (int64_t position = 0; position < steps; ++position) {
        CAPTURE(position);
        const auto again = many.run({0, filled, 0}, position);
        for (int64_t row = 0; row < filled; ++row) {
            CAPTURE(row);
            CHECK(first_difference(many, first[static_cast<size_t>(position)], again, row, rows, false) ==
                  "");
        }
    }
}

void check_rows(std::unique_ptr<Backend> backend, const char* shape) {
    const auto model = open_synthetic(shape, "aeon", {.tokenizer = false});
    place_weights(*model, *backend);
    const auto specs =
        model->state_specs({.kv = backend->activation_dtype(), .conv = backend->activation_dtype()});
    StatePool pool(*backend, specs, 2 * kMaxRows, 2 * kMaxRows);
    for (const int64_t rows : {2, 8, 9, 13, 16, 33, 64})
        check_step(*backend, *model, pool, Watch::every_tensor, rows, rows, 3);
    for (const int64_t rows : {7, 16, 10, 63})
        check_step(*backend, *model, pool, Watch::logits, rows, rows, 40);
    for (const int64_t filled : {10, 63})  // as steps that verify drafts are
        check_step(*backend, *model, pool, Watch::logits, padded_sequences(filled), filled, 40);
}

TEST_SUITE("cpu") {
    TEST_CASE("step rows: every op gives a row of many what it gives alone, tiny models" *
              doctest::test_suite("slow")) {
        for (const char* shape : {"tiny", "tiny-dense"}) check_rows(make_cpu_backend(2), shape);
    }
}

TEST_SUITE("cuda") {
    TEST_CASE("gpu model: every op gives a row of many what it gives alone, the 35B's shapes") {
        check_rows(test::make_test_cuda_backend(), "qwen3.6-35b-a3b");
    }
}

}  // namespace
}  // namespace quern
