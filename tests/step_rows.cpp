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

namespace quern {
namespace {

constexpr int64_t kMostRows = 64, kSteps = 3;

/// Rows of a step for sequences that have slots and pages of their own.
struct Rows {
    int64_t first;  // the token stream of row 0; row i has that of first + i
    int64_t count;
    int64_t slot;  // of row 0
};

/// An answer step whose tensors all stay where they are until they have been looked at.
class WatchedStep {
  public:
    WatchedStep(const Model& model, Backend& backend, const StatePool& pool, int64_t rows)
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

    /// Each watched tensor's bytes.
    std::vector<std::vector<char>> run(const Rows& rows, int64_t position) {
        const auto fill = [&](const Tensor* t, auto value_of) {
            auto* to = plan_->input<int32_t>(t);
            for (int64_t i = 0; i < t->shape[0]; ++i) to[i] = static_cast<int32_t>(value_of(i));
        };
        fill(batch_.token_ids, [&](int64_t i) { return 17 * (rows.first + i) + position; });
        fill(batch_.positions, [&](int64_t) { return position; });
        for (const Tensor* t : {batch_.row_sequence, batch_.start, batch_.logit_rows})
            fill(t, [](int64_t i) { return i; });
        for (const Tensor* t : {batch_.slots, batch_.pages})
            fill(t, [&](int64_t i) { return rows.slot + i; });
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

/// The first tensor of which a row differs from the row alone; empty: none does.
std::string first_difference(const WatchedStep& step, const std::vector<std::vector<char>>& together,
                             int64_t row, int64_t rows, const std::vector<std::vector<char>>& alone) {
    for (size_t i = 0; i < alone.size(); ++i) {
        const WatchedStep::Watched& w = step.watched()[i];
        const size_t pitch = together[i].size() / static_cast<size_t>(rows);
        if (std::memcmp(together[i].data() + static_cast<size_t>(row) * pitch, alone[i].data(),
                        w.row_bytes) != 0)
            return w.tensor->name;
    }
    return {};
}

void check_rows(Backend& backend, const Model& model) {
    const auto specs =
        model.state_specs({.kv = backend.activation_dtype(), .conv = backend.activation_dtype()});
    StatePool pool(backend, specs, 2 * kMostRows, 2 * kMostRows);
    WatchedStep one(model, backend, pool, 1);
    for (const int64_t rows : {2, 8, 9, 16, 33, 64}) {
        CAPTURE(rows);
        WatchedStep many(model, backend, pool, rows);
        for (int64_t position = 0; position < kSteps; ++position) {
            CAPTURE(position);
            const auto together = many.run({0, rows, 0}, position);
            for (const int64_t row : std::set<int64_t>{0, rows / 2, rows - 1}) {
                CAPTURE(row);
                const auto alone = one.run({row, 1, kMostRows + row}, position);
                CHECK(first_difference(one, together, row, rows, alone) == "");
            }
        }
    }
}

void check_rows(std::unique_ptr<Backend> backend, const char* shape) {
    const auto model = open_synthetic(shape, "aeon", {.tokenizer = false});
    place_weights(*model, *backend);
    check_rows(*backend, *model);
}

TEST_SUITE("cpu") {
    TEST_CASE("step rows: every op gives a row of many what it gives alone, tiny models") {
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
