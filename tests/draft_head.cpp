// The head that drafters choose from: which rows it has, and that no answer depends on it.
#include "models/draft_head.h"

#include <doctest/doctest.h>

#include <cmath>

#include <fmt/format.h>

#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/requantize.h"
#include "models/tokenizer.h"
#include "tools/engine/draft_rows.h"
#include "tools/engine/drafter.h"

namespace quern {
namespace {

using test::cpu, test::device, test::random_ids;

/// [rows, 32], in which value c of row r is (r + 1) * (c - 16) / 1024, but 0 beyond every eighth row.
struct Head {
    explicit Head(int64_t rows) : values(static_cast<size_t>(rows * 32)) {
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = static_cast<float>(i / 32 + 1) * (static_cast<float>(i % 32) - 16) / 1024;
        weight = Weight(
            "head",
            {{.name = "lm_head", .dtype = DType::F32, .rows = rows, .cols = 32, .data = values.data()}});
    }
    std::vector<float> values;
    Weight weight;
};

constexpr int64_t kRowBytes = 32 / 2 + 32 / 16;  // NVFP4: codes and scales

TEST_SUITE("cpu") {
    TEST_CASE("draft head: rows of added tokens, then the first ones, as many as fit, in NVFP4") {
        const Head head(8000);
        const auto short_head = plan_draft_head(head.weight, 3000 * kRowBytes, 7990, nullptr, 1000);
        REQUIRE(short_head);
        const TokenColumns& c = short_head->columns;
        // 256 rows for added tokens, from a multiple of 16 on; the others are a multiple, too.
        CHECK(c.start == 7744);
        CHECK(c.first == 256);
        CHECK(c.vocab == 7990);
        const DraftTokens& t = short_head->tokens;
        CHECK(t.copied == (3000 - 256) / 16 * 16);
        CHECK(t.frequent == 992);
        CHECK(t.added == 7744);
        CHECK(t.whole_too);
        Weight made = short_head->weight;
        CHECK(made.rows == 256 + t.copied);
        CHECK(made.bytes() <= 3000 * kRowBytes);
        const auto memory = requantize(short_head->from, made, 2);
        CHECK(short_head->frequent.rows == 256 + 992);
        const Weight frequent = first_rows(made, short_head->frequent.rows);
        for (const int64_t row : {int64_t{0}, int64_t{255}, int64_t{256}, int64_t{700}, frequent.rows - 1,
                                  frequent.rows, made.rows - 1}) {
            CAPTURE(row);
            std::vector<float> found(32), of_frequent(32);
            dequantize_row(made, row, found.data());
            const float* expected = head.values.data() + c.token(row) * 32;
            // Half of the widest step between codes, 4 to 6, of a block's largest value.
            for (int i = 0; i < 32; ++i)
                CHECK(std::fabs(found[static_cast<size_t>(i)] - expected[i]) <=
                      0.25 * std::fabs(expected[i < 16 ? 0 : 31]) + 1e-3);
            if (row >= frequent.rows) continue;
            dequantize_row(frequent, row, of_frequent.data());
            CHECK(of_frequent == found);
        }
    }

    TEST_CASE("draft head: frequent tokens are a head by themselves only where that is much less") {
        const Head head(8000);
        const auto with = [&](int64_t frequent) {
            return plan_draft_head(head.weight, 3000 * kRowBytes, 8000, nullptr, frequent);
        };
        CHECK(!with(0)->frequent);
        CHECK(!with(2300)->frequent);
        CHECK(with(2300)->tokens.frequent == with(2300)->tokens.copied);
        CHECK(with(2190)->frequent);
        const auto one = with(0), two = with(1000);
        CHECK(&one->rows(DraftRows::frequent) == &one->weight);
        CHECK(&two->rows(DraftRows::frequent) == &two->frequent);
        CHECK(&two->rows(DraftRows::copied) == &two->weight);
    }

    TEST_CASE("draft rows: the fewest that name nearly all of the last tokens") {
        const DraftTokens known{.frequent = 100, .copied = 200, .added = 1000};
        const auto rows = [&](int64_t copied, int64_t others, int64_t before = 0) {
            std::vector<int32_t> tokens(static_cast<size_t>(before), 500);
            tokens.insert(tokens.end(), static_cast<size_t>(copied), 150);
            tokens.insert(tokens.end(), static_cast<size_t>(others), 300);
            tokens.insert(tokens.end(), kDraftRowsWindow - static_cast<size_t>(copied + others), 1001);
            return tokens;
        };
        CHECK(draft_rows_for(rows(4, 0), known) == DraftRows::frequent);
        CHECK(draft_rows_for(rows(2, 2), known) == DraftRows::frequent);
        CHECK(draft_rows_for(rows(5, 0), known) == DraftRows::copied);
        CHECK(draft_rows_for(rows(100, 16), known) == DraftRows::copied);
        CHECK(draft_rows_for(rows(0, 17), known) == DraftRows::all);
        CHECK(draft_rows_for(rows(4, 0, 1000), known) == DraftRows::frequent);  // long ago
        CHECK(draft_rows_for(std::vector<int32_t>(3, 300), known) == DraftRows::frequent);
        CHECK(draft_rows_for(std::span<const int32_t>(), known) == DraftRows::frequent);
        DraftTokens shared = known;
        shared.whole_too = false;
        CHECK(draft_rows_for(rows(0, 60), shared) == DraftRows::copied);
        CHECK(draft_rows_for(rows(0, 60), std::nullopt) == DraftRows::frequent);
        const DraftTokens one_head{.frequent = 200, .copied = 200, .added = 1000};
        CHECK(draft_rows_for(rows(0, 16), one_head) == DraftRows::frequent);
        CHECK(draft_rows_for(rows(0, 17), one_head) == DraftRows::all);
    }

    TEST_CASE(
        "draft head: none where the whole head is as small, where nothing fits, or where it is not wanted") {
        const Head head(8000);
        CHECK(!plan_draft_head(head.weight, 8000 * 32 * 4, 8000, nullptr, 1000));
        CHECK(!plan_draft_head(head.weight, 300 * kRowBytes, 8000, nullptr, 1000));
        CHECK(!plan_draft_head(head.weight, 0, 8000, nullptr, 1000));
        const Head tiny(24);
        CHECK(!plan_draft_head(tiny.weight, 100, 24, nullptr, 1000));
    }

    TEST_CASE("draft head: rows of 128 x 128 blocks of scales begin at blocks, and stay as they are stored") {
        std::vector<uint8_t> codes(size_t{4096} * 128);
        std::vector<float> scales(32);
        for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 7 % 120);
        for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<float>(i + 1);
        const Weight head("head", {{.name = "lm_head",
                                    .dtype = DType::F8_E4M3,
                                    .rows = 4096,
                                    .cols = 128,
                                    .data = codes.data(),
                                    .scale_kind = ScaleKind::block128,
                                    .scale = scales.data()}});
        const auto short_head = plan_draft_head(head, 300'000, 4096, nullptr, 1000);
        REQUIRE(short_head);
        CHECK(short_head->tokens.copied % 128 == 0);
        CHECK(short_head->columns.start == 4096 - 256);
        for (const int64_t row : {int64_t{5}, short_head->columns.first + 200}) {
            std::vector<float> found(128), expected(128);
            dequantize_row(short_head->weight, row, found.data());
            dequantize_row(head, short_head->columns.token(row), expected.data());
            CHECK(found == expected);
        }
    }

    TEST_CASE("draft head: it drafts, and answers are those without it, alone and together") {
        const auto prompt = [](const Model& m, unsigned i) { return random_ids(m, 30 + 20 * i, i); };
        const auto answers = [&](Model& m, Backend& b, DrafterKind kind, int64_t sequences) {
            Engine engine(m, b, {.context = 256, .sequences = sequences, .speculation = {.kind = kind}});
            std::vector<RequestId> ids;
            std::vector<Result> results;
            for (unsigned i = 0; i < 4; ++i) {
                Request r;
                r.prompt = prompt(m, i);
                r.sampling = {.temperature = i % 2 == 0 ? 0.0f : 1.0f, .seed = i};
                r.max_tokens = 24;
                r.drafts.full = true;
                if (i > 0) r.drafts.rows = static_cast<DraftRows>(i - 1);
                ids.push_back(engine.submit(std::move(r)));
            }
            while (engine.step()) {
            }
            for (const RequestId id : ids) results.push_back(engine.take(id));
            return results;
        };
        // With weights of a checkpoint, and random ones.
        const std::string parity = test::parity("vision_mtp/bf16");
        for (const auto make : {cpu, device})
            for (const bool random : {false, true}) {
                CAPTURE(random);
                const auto backend = make();
                OpenOptions options{.tokenizer = false, .mtp = MtpUse::required};
                options.draft_head_bytes = random ? 1000 * (256 / 2 + 256 / 16) : 70 * kRowBytes;
                options.draft_frequent = random ? 300 : 16;
                std::unique_ptr<Model> model =
                    random ? open_synthetic("tiny", "aeon", options) : open_model(parity, options);
                place_weights(*model, *backend);
                const auto& known = model->info().draft_tokens;
                REQUIRE(known);
                CHECK(known->frequent > 0);
                CHECK(known->frequent < known->copied);
                CHECK(known->copied < model->info().vocab_rows);
                const auto expected = answers(*model, *backend, DrafterKind::none, 1);
                for (const int64_t sequences : {1, 4}) {
                    const auto found = answers(*model, *backend, DrafterKind::mtp, sequences);
                    for (size_t i = 0; i < found.size(); ++i) {
                        CHECK(found[i].tokens == expected[i].tokens);
                        CHECK(found[i].drafted > 0);
                    }
                }
            }
    }

    TEST_CASE("draft head: the report says which rows drafts read, and steps are timed by them") {
        using enum DraftRows;
        for (const bool short_head : {true, false}) {
            CAPTURE(short_head);
            const auto backend = cpu();
            OpenOptions options{.tokenizer = false, .mtp = MtpUse::required};
            if (short_head) options.draft_head_bytes = 70 * kRowBytes, options.draft_frequent = 16;
            const auto model = open_model(test::parity("vision_mtp/bf16"), options);
            place_weights(*model, *backend);
            const EngineOptions drafting{
                .context = 256, .sequences = 2, .speculation = {.kind = DrafterKind::mtp, .draft_max = 3}};
            Engine engine(*model, *backend, drafting);
            const auto request = [&](DraftRows rows) {
                Request r;
                r.prompt = random_ids(*model, 30, 1);
                r.max_tokens = 24;
                r.drafts = {.full = true, .rows = rows};
                return r;
            };
            engine.run(request(copied));
            const SpeculationReport alone = *engine.speculation();
            REQUIRE(alone.rounds > 2);
            std::array<int64_t, 3> passes{};
            passes[short_head ? 1 : 2] = alone.rounds;
            CHECK(alone.passes == passes);
            CHECK(alone.answers.empty());  // it has ended
            const auto slow = [](const auto& c) { return c.rows == 4 && c.draft_rows == copied; };
            CHECK(std::any_of(alone.costs.begin(), alone.costs.end(), slow));
            const std::string text = describe(alone);
            CHECK(text.find(" 1x4 copied: ") != std::string::npos);
            CHECK(text.find(fmt::format(" {}: {}", short_head ? "copied" : "all", alone.rounds)) !=
                  std::string::npos);
            engine.submit(request(frequent));
            engine.submit(request(all));
            while (engine.speculation()->answers.size() < 2) REQUIRE(engine.step());
            CHECK(engine.speculation()->answers == std::vector{short_head ? frequent : all, all});
            while (engine.step()) {
            }
            CHECK(engine.speculation()->passes[2] > passes[2]);
            CHECK(engine.speculation()->passes[1] == passes[1]);
        }
    }

    TEST_CASE("draft head: nothing is said of it where no pass drafts") {
        struct Ones final : Drafter {
            const char* name() const override { return "ones"; }
            void propose(std::span<Draft> drafts) override {
                for (Draft& d : drafts) d.tokens.assign(static_cast<size_t>(d.most), 1);
            }
        };
        test::Loaded l(test::parity("base/ct"), cpu());
        Engine engine(*l.model, *l.backend,
                      {.context = 256,
                       .speculation = {.kind = DrafterKind::automatic},
                       .drafter = std::make_shared<Ones>()});
        Request r;
        r.prompt = random_ids(*l.model, 30, 1);
        r.max_tokens = 20;
        r.drafts.full = true;
        engine.submit(r);
        size_t answers = 0;
        while (engine.step()) answers += engine.speculation()->answers.size();
        const SpeculationReport report = *engine.speculation();
        CHECK(report.rounds > 0);
        CHECK(report.head_passes() == 0);
        CHECK(answers == 0);
        CHECK(describe(report).find("passes") == std::string::npos);
    }
}

}  // namespace
}  // namespace quern
