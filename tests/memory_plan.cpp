// Memory is planned before the load, taken once, and what was planned is what is taken.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "counted_backend.h"
#include "ggml-like/cuda/pack/packed_layout.h"
#include "ggml-like/planned_gpu.h"
#include "models/weight_placement.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/state_pool.h"

namespace quern {
namespace {

const std::string kVectors = std::string(QUERN_SOURCE_DIR) + "/tests/vectors/parity/";

struct Planned {
    std::unique_ptr<Model> model;
    MemoryPlan plan;
};

Planned load(test::CountedBackend& backend, const EngineOptions& options,
             const std::string& checkpoint = "base/ct") {
    Planned p;
    p.model = open_model(kVectors + checkpoint, {.tokenizer = false});
    p.plan = make_memory_plan(*p.model, backend, options, false);
    require_fit(p.plan);
    place_weights(*p.model, backend);
    return p;
}

std::string refusal(int64_t total, const EngineOptions& options) {
    test::CountedBackend backend(total);
    try {
        const Planned p = load(backend, options);
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::memory);
        CHECK(backend.placed == 0);  // before any weight was read
        return error.what();
    }
    return {};
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

Request greedy(const Model& model, size_t length, int64_t tokens, unsigned seed) {
    std::mt19937 random(seed);
    Request r;
    for (size_t i = 0; i < length; ++i)
        r.prompt.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(model.info().vocab)));
    r.sampling.temperature = 0;
    r.max_tokens = tokens;
    return r;
}

Weight matrix(std::initializer_list<std::pair<DType, int64_t>> segments, int64_t cols) {
    std::vector<WeightSegment> all;
    for (const auto& [dtype, rows] : segments) {
        WeightSegment s;
        s.dtype = dtype;
        s.rows = rows;
        s.cols = cols;
        s.scale_kind = dtype == DType::NVFP4 ? ScaleKind::nvfp4 : ScaleKind::none;
        all.push_back(s);
    }
    return Weight("test", std::move(all));
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("memory plan: what was planned is what is taken, and nothing more later") {
        for (const char* checkpoint :
             {"base/ct", "real_heads/ct_fp8_head", "tied_text/ct", "dense/ct_mixed"}) {
            CAPTURE(checkpoint);
            test::CountedBackend backend(1ll << 32);
            const EngineOptions options{.context = 256, .sequences = 11, .step_tokens = 96};
            const Planned p = load(backend, options, checkpoint);
            const int64_t weights = backend.used;
            CHECK(weights == p.plan.weight_bytes());
            Engine engine(*p.model, backend, options);
            CHECK(backend.used - weights == p.plan.state_bytes() + p.plan.scratch_bytes());
            CHECK(engine.memory_measured().state == p.plan.state_bytes());
            CHECK(engine.memory_measured().scratch == p.plan.scratch_bytes());
            CHECK(backend.prepared == 11);  // steps of 1 to 11 sequences
            const int allocations = backend.allocations;
            std::vector<RequestId> ids;
            for (unsigned i = 0; i < 12; ++i)
                ids.push_back(engine.submit(greedy(*p.model, 1 + 17 * i, 3 + i, i)));
            while (engine.step()) {
            }
            for (const RequestId id : ids) CHECK(engine.take(id).reason == FinishReason::length);
            CHECK(backend.allocations == allocations);
            CHECK(backend.prepared == 11);
            CHECK(!has(describe(p.plan, engine.memory_measured()), "beyond"));
        }
    }

    TEST_CASE("memory plan: a model that will not fit is refused before its weights are read") {
        CHECK(has(refusal(1 << 16, {.context = 64}), "the weights alone"));
        const std::string context =
            refusal(342ll << 20, {.context = 256, .sequences = 512, .step_tokens = 64});
        CHECK(has(context, "lower -c (now 256"));
        CHECK(has(context, "-np (now 512"));
        CHECK(refusal(1ll << 32, {.context = 256}).empty());
    }

    TEST_CASE("memory plan: -c 0 takes the largest context that fits, and says which") {
        test::CountedBackend large(1ll << 33);
        const Planned all = load(large, {});
        CHECK(all.plan.context == all.model->info().context);
        CHECK(has(describe(all.plan), "all the model was made for"));

        const int64_t page = page_bytes(all.plan.specs);
        test::CountedBackend small(all.plan.needed() - all.plan.kv + 3 * page + page / 2);
        const Planned some = load(small, {});
        CHECK(some.plan.context == 3 * kPageTokens);
        CHECK(has(describe(some.plan), "context 192 tokens, the largest that fits"));
        Engine engine(*some.model, small, {.context = some.plan.context});
        CHECK(engine.context() == 192);
    }

    TEST_CASE("memory plan: a difference of more than 1 % is a warning") {
        test::CountedBackend backend(1ll << 32);
        const Planned p = load(backend, {.context = 256});
        const MemoryPlan& plan = p.plan;
        const MemoryMeasured same{plan.weight_bytes(), plan.state_bytes(), plan.scratch_bytes(), 0};
        CHECK(!has(describe(plan, same), "warning"));
        MemoryMeasured off = same;
        off.weights += plan.needed() / 50;
        CHECK(has(describe(plan, off), "warning: measured +"));
        MemoryMeasured more = same;
        more.other = plan.reserve + 1000;
        CHECK(has(describe(plan, more), "beyond weights"));
    }

    TEST_CASE("no step needs more scratch than was planned for the widest") {
        const auto cpu = make_cpu_backend(1);
        for (const EngineOptions& o : {EngineOptions{.context = 128, .sequences = 9, .step_tokens = 300},
                                       EngineOptions{.context = 128, .sequences = 70, .step_tokens = 80},
                                       EngineOptions{.context = 128, .sequences = 3, .step_tokens = 7}}) {
            const auto model = load_model(kVectors + "real_heads/ct", *cpu, {.tokenizer = false});
            const MemoryPlan plan = make_memory_plan(*model, *cpu, o, true);
            const StatePool pool(*cpu, plan.specs, 1, 1);
            const auto check = [&](StepKind kind, int64_t tokens, int64_t sequences, int64_t logit_rows) {
                const BatchShape shape{.kind = kind,
                                       .tokens = tokens,
                                       .sequences = sequences,
                                       .logit_rows = std::min(tokens, logit_rows),
                                       .pages = plan.pages(),
                                       .vocab = model->info().vocab};
                CAPTURE(tokens);
                CAPTURE(sequences);
                const ArenaPlan arena = plan_memory(model->build(shape, pool, cpu->activation_dtype()).graph);
                CHECK(arena.arena_bytes <= plan.arena);
                CHECK(arena.input_bytes <= plan.inputs);
            };
            for (int64_t tokens = 1; tokens <= plan.steps.prompt_rows; tokens += 1 + tokens / 16)
                for (const int64_t sequences : {int64_t{1}, plan.sequences / 2, plan.sequences}) {
                    const int64_t s = std::clamp<int64_t>(sequences, 1, tokens);
                    check(StepKind::prompt, tokens, s, plan.steps.prompt_logits + s);
                    check(StepKind::prompt, tokens, s, plan.steps.prompt_logits + s - 1);
                    check(StepKind::prompt, tokens, s, s);
                }
            for (int64_t tokens = 1; tokens <= plan.steps.answer_rows; ++tokens)
                for (int64_t s = (tokens + kMaxAnswerSlice - 1) / kMaxAnswerSlice;
                     s <= std::min(tokens, plan.sequences); ++s)
                    check(StepKind::answer, tokens, s, tokens);
        }
    }

    TEST_CASE("memory plan: rows of the steps of either kind") {
        test::CountedBackend device(1ll << 32);
        const auto cpu = make_cpu_backend(1);
        const auto model = load_model(kVectors + "base/ct", *cpu, {.tokenizer = false});
        const auto limits = [&](const Backend& backend, int64_t sequences, int64_t step_tokens) {
            const EngineOptions options{.context = 64, .sequences = sequences, .step_tokens = step_tokens};
            const StepLimits l = make_memory_plan(*model, backend, options, true).steps;
            return std::vector<int64_t>{l.prompt_rows, l.gap_rows, l.prompt_logits, l.answer_rows,
                                        l.gap_depth};
        };
        using Rows = std::vector<int64_t>;
        CHECK(limits(device, 16, 0) == Rows{8192, 1408, 64, 64, 65536});
        CHECK(limits(device, 100, 512) == Rows{512, 512, 64, 64, 65536});
        CHECK(limits(device, 1, 1) == Rows{64, 64, 64, 8, 65536});  // no step is too short for a piece of 64
        CHECK(limits(*cpu, 1, 0) == Rows{512, 128, 64, 8, 0});
        CHECK(limits(*cpu, 100, 2048) == Rows{2048, 128, 64, 100, 0});
    }

    TEST_CASE("answer steps of any number of sequences: tokens of sequences alone") {
        CHECK(padded_sequences(1) == 1);
        CHECK(padded_sequences(7) == 7);
        CHECK(padded_sequences(9) == 16);
        CHECK(padded_sequences(33) == 64);
        CHECK(padded_sequences(64) == 64);
        CHECK(most_answer_rows(0) == 64);
        CHECK(most_answer_rows(8) == 64);
        CHECK(most_answer_rows(10) == 32);
        for (const char* checkpoint :
             {"base/ct", "real_heads/modelopt", "odd_pattern/ct", "dense/fp8_block"}) {
            const auto cpu = make_cpu_backend(2);
            const auto model = load_model(kVectors + checkpoint, *cpu, {.tokenizer = false});
            test::CountedBackend device(1ll << 32);
            for (const unsigned sequences : {3u, 9u, 13u}) {
                CAPTURE(checkpoint);
                CAPTURE(sequences);
                Engine together(*model, device, {.context = 128, .sequences = sequences});
                Engine plain(*model, *cpu, {.context = 128});
                std::vector<RequestId> ids;
                for (unsigned i = 0; i < sequences; ++i)
                    ids.push_back(together.submit(greedy(*model, 5 + 9 * i, 20 + i, i)));
                while (together.step()) {
                }
                for (unsigned i = 0; i < sequences; ++i) {
                    const std::vector<int32_t> alone = plain.run(greedy(*model, 5 + 9 * i, 20 + i, i)).tokens;
                    CHECK(together.take(ids[i]).tokens == alone);
                }
            }
        }
    }

    TEST_CASE("packed weights: sizes by tiles of 16 rows and chunks of 64 columns, parts by format") {
        using namespace cuda::pack;
        const auto part = [](int64_t tiles, int64_t chunks, int64_t chunk) {
            const int64_t factors = (tiles * 64 + 255) / 256 * 256;
            return (tiles * chunks * chunk + 255) / 256 * 256 + factors;
        };
        CHECK(packed_bytes(matrix({{DType::BF16, 33}}, 130), RowOrder::stacked) == part(3, 3, 2048));
        CHECK(packed_bytes(matrix({{DType::NVFP4, 16}, {DType::NVFP4, 17}}, 64), RowOrder::stacked) ==
              part(3, 1, 576));
        CHECK(packed_bytes(matrix({{DType::NVFP4, 16}, {DType::BF16, 1}}, 64), RowOrder::stacked) ==
              part(1, 1, 576) + part(1, 1, 2048));
        CHECK(packed_bytes(matrix({{DType::F8_E4M3, 12}, {DType::F8_E4M3, 4}}, 128), RowOrder::stacked) ==
              2 * part(1, 2, 1040));
        CHECK(packed_bytes(matrix({{DType::NVFP4, 9}, {DType::NVFP4, 9}}, 64), RowOrder::paired) ==
              part(2, 1, 576));
        ExpertWeights experts{.name = "e", .rows = 40, .cols = 64, .expert = {}};
        for (int i = 0; i < 5; ++i)
            experts.expert.push_back(matrix({{DType::NVFP4, 20}, {DType::NVFP4, 20}}, 64));
        CHECK(packed_bytes(experts, RowOrder::paired) == part(15, 1, 576));
        CHECK(packed_bytes(experts, RowOrder::stacked) == part(15, 1, 576));
        CHECK_THROWS_AS(packed_bytes(matrix({{DType::NVFP4, 8}, {DType::BF16, 8}}, 64), RowOrder::paired),
                        Error);
        CHECK_THROWS_AS(packed_bytes(matrix({{DType::U8, 8}}, 64), RowOrder::stacked), Error);
        // What these refuse, a GPU holds in BF16.
        const auto gpu = make_planned_gpu("a card", 1 << 30, 1 << 30);
        CHECK(gpu->placed_bytes(matrix({{DType::NVFP4, 9}, {DType::F8_E4M3, 9}}, 64), RowOrder::paired) ==
              part(2, 1, 2048));
        CHECK(gpu->placed_bytes(matrix({{DType::NVFP4, 16}, {DType::BF16, 1}}, 64), RowOrder::stacked) ==
              part(1, 1, 576) + part(1, 1, 2048));
        CHECK(gpu->placed_bytes(experts, RowOrder::paired) == part(15, 1, 576));
        experts.expert[3].segments[1].dtype = DType::BF16;
        CHECK(gpu->placed_bytes(experts, RowOrder::paired) == part(15, 1, 2048));
    }
}

}  // namespace quern
