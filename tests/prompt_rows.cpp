// Every row of a prompt has the same logits, bit by bit, in steps of any size, alone or beside sequences that answer.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "checkpoint_copy.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/content_hash.h"
#include "ggml-like/cpu/thread_pool.h"
#include "ggml-like/error.h"
#include "ggml-like/ops/linear_add.h"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/parallel.h"
#include "models/weight_placement.h"
#include "ops/second_backend.h"
#include "tools/engine/engine.h"

namespace quern {
namespace {

using test::random_ids;

/// How a prompt is read: rows of a step at most, and how many sequences answer meanwhile.
struct Reading {
    int64_t step_rows, others;
};

/// One hash for each row of logits: all of them together would not fit into memory.
class RowHashes {
  public:
    void add(const PromptLogits& logits) {
        const size_t before = values_.size();
        values_.resize(before + logits.count());
        for_each_parallel(cpu::default_threads(), logits.count(), [&](size_t i) {
            const auto row = logits.row(i);
            ContentHash hash;
            hash.add(row.data(), row.size_bytes());
            const bool finite = std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
            values_[before + i] = finite ? hash.value() : kNotFinite;
        });
    }
    /// Hashes of rows that differ are worth comparing.
    bool all_different() const {
        return !std::count(values_.begin(), values_.end(), kNotFinite) &&
               std::set<uint64_t>(values_.begin(), values_.end()).size() == values_.size();
    }
    size_t size() const { return values_.size(); }
    uint64_t first() const { return values_.front(); }
    uint64_t last() const { return values_.back(); }
    size_t equal(const RowHashes& other) const {
        size_t n = 0;
        for (size_t i = 0; i < std::min(size(), other.size()); ++i) n += values_[i] == other.values_[i];
        return n;
    }

  private:
    static constexpr uint64_t kNotFinite = 0;
    std::vector<uint64_t> values_;
};

RowHashes read_prompt(Model& model, Backend& backend, int64_t tokens, const Reading& how) {
    Engine engine(model, backend,
                  {.context = 2 * tokens,
                   .sequences = 1 + how.others,
                   .step_tokens = how.step_rows,
                   .prompt_logits = how.step_rows});
    int64_t answered = 0;
    std::vector<RequestId> others;
    for (int64_t i = 0; i < how.others; ++i) {
        Request r;
        r.prompt = random_ids(model, 7 + 50 * static_cast<size_t>(i), 100 + static_cast<unsigned>(i));
        r.on_token = [&](int32_t) { return ++answered > 0; };
        others.push_back(engine.submit(std::move(r)));
    }
    while (answered < 2 * how.others) engine.step();

    RowHashes rows;
    Request r;
    r.prompt = random_ids(model, static_cast<size_t>(tokens), 1);
    r.max_tokens = 0;
    r.on_prompt_logits = [&](const PromptLogits& logits) { rows.add(logits); };
    const RequestId id = engine.submit(std::move(r));
    const int64_t answered_before = answered;
    while (!engine.finished(id)) engine.step();
    CHECK(engine.take(id).error == "");
    if (how.others > 0) CHECK(answered > answered_before);
    for (const RequestId other : others) CHECK(!engine.finished(other));
    return rows;
}

/// The logits that an answer's first tokens were chosen from. `all`: those of the whole prompt are wanted too, so that no layer leaves
/// out rows.
RowHashes read_answer(Model& model, Backend& backend, int64_t tokens, int64_t step_rows, bool all) {
    Engine engine(model, backend,
                  {.context = 2 * tokens, .step_tokens = step_rows, .prompt_logits = all ? step_rows : 64});
    RowHashes rows;
    Request r;
    r.prompt = random_ids(model, static_cast<size_t>(tokens), 1);
    r.max_tokens = 3;
    r.sampling.temperature = 0;
    r.on_logits = [&](int32_t, std::span<const float> row) { rows.add({0, row, row.size()}); };
    if (all) r.on_prompt_logits = [](const PromptLogits&) {};
    CHECK(engine.run(std::move(r)).error == "");
    return rows;
}

/// All readings give what the first one gives. One whose logits do not fit the device is left out, with a message.
void check_prompt(Model& model, Backend& backend, int64_t tokens, const std::vector<Reading>& readings) {
    const RowHashes expected = read_prompt(model, backend, tokens, readings[0]);
    REQUIRE(expected.size() == static_cast<size_t>(tokens));
    REQUIRE(expected.all_different());
    const RowHashes answer = read_answer(model, backend, tokens, readings[0].step_rows, true);
    CHECK(answer.size() == 3);
    CHECK(answer.first() == expected.last());
    for (const Reading& how : std::span(readings).subspan(1)) {
        CAPTURE(how.step_rows);
        CAPTURE(how.others);
        CHECK(read_answer(model, backend, tokens, how.step_rows, false).equal(answer) == 3);
        try {
            CHECK(read_prompt(model, backend, tokens, how).equal(expected) == expected.size());
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::memory) throw;
            MESSAGE("not compared: " << error.what());
        }
    }
}

void check_prompt(std::unique_ptr<Backend> backend, const char* shape, int64_t tokens,
                  const std::vector<Reading>& readings) {
    const auto model = open_synthetic(shape, "aeon", {.tokenizer = false});
    place_weights(*model, *backend);
    check_prompt(*model, *backend, tokens, readings);
}

/// Rows that the last layer's mixture or MLP takes.
int64_t last_rows(const Model& model, const StatePool& pool, const BatchShape& shape) {
    const BuiltGraph built = model.build(shape, pool, DType::F32);
    int64_t rows = 0;
    for (const Node& node : built.graph.nodes())
        if ((node.op == &kMoeDown || node.op == &kLinearAdd) && node.layer + 1 == model.info().layers)
            rows = node.outputs[0]->shape[0];
    return rows;
}

TEST_SUITE("cpu") {
    TEST_CASE("prompt rows: the last layer takes rows with logits alone, unless somebody reads the others") {
        const auto backend = test::cpu();
        for (const char* shape : {"tiny", "tiny-dense"}) {
            CAPTURE(shape);
            const auto model = open_synthetic(
                shape, "aeon", {.tokenizer = false, .mtp = MtpUse::required, .draft_model = "new"});
            place_weights(*model, *backend);
            const StatePool pool(*backend, model->state_specs({.mtp = true, .dflash = true}), 2, 8);
            const BatchShape prompt{
                .tokens = 70, .sequences = 2, .logit_rows = 2, .pages = 4, .vocab = model->info().vocab};
            const auto rows = [&](auto change) {
                BatchShape changed = prompt;
                change(changed);
                return last_rows(*model, pool, changed);
            };
            CHECK(rows([](BatchShape&) {}) == 2);
            CHECK(rows([](BatchShape& s) { s.logit_rows = 69; }) == 69);
            CHECK(rows([](BatchShape& s) { s.logit_rows = 70; }) == 70);
            CHECK(rows([](BatchShape& s) { s.whole_residual = true; }) == 70);
            CHECK(rows([](BatchShape& s) { s.pass = Pass::hidden; }) == 70);
            CHECK(rows([](BatchShape& s) { s.pass = Pass::taps; }) == 2);  // it taps two earlier layers
            CHECK(rows([](BatchShape& s) { s.logit_rows = 0; }) == 0);
        }
    }

    TEST_CASE("prompt rows: a rank, which has the residual stream of some rows, leaves out none") {
        const auto model = open_synthetic("tiny", "aeon", {.tokenizer = false, .shard = {0, 2}});
        const auto backend = test::cpu();
        const StatePool pool(*backend, model->state_specs({}), 2, 8);
        const BatchShape prompt{
            .tokens = 70, .sequences = 2, .logit_rows = 2, .pages = 4, .vocab = model->info().vocab};
        CHECK(last_rows(*model, pool, prompt) == 70);
    }

    TEST_CASE("prompt rows: a last layer of gated DeltaNet, too, leaves out rows") {
        test::CheckpointCopy copy("odd_pattern/bf16");
        copy.config["num_hidden_layers"] = 3;
        copy.config["layer_types"].erase(3);
        std::erase_if(copy.weights.entries,
                      [](const auto& e) { return e.name.find("layers.3.") != std::string::npos; });
        copy.write();
        test::Loaded l(copy.dir.str(), test::cpu());
        REQUIRE(l.model->info().layers == 3);
        check_prompt(*l.model, *l.backend, 150, {{512, 0}, {64, 0}, {512, 1}});
    }

    TEST_CASE("prompt rows: the same logits in steps of any size, alone or beside answers, tiny models" *
              doctest::test_suite("slow")) {
        for (const char* shape : {"tiny", "tiny-dense"}) {
            CAPTURE(shape);
            check_prompt(make_cpu_backend(2), shape, 700,
                         {{1024, 0}, {64, 0}, {192, 0}, {512, 0}, {64, 3}, {512, 1}, {512, 3}});
            // Behind a device's face: longer steps between answers.
            check_prompt(std::make_unique<test::CountedBackend>(int64_t{1} << 34), shape, 700,
                         {{1024, 0}, {320, 3}, {512, 5}});
        }
    }
}

TEST_SUITE("cuda") {
    TEST_CASE("gpu model: a prompt of 9,001 tokens in steps of 512, 2,048 and 8,192 rows, the 35B's shapes") {
        check_prompt(test::make_test_cuda_backend(), "qwen3.6-35b-a3b", 9001,
                     {{512, 0}, {2048, 0}, {8192, 0}});
    }
}

}  // namespace
}  // namespace quern
