// The head that drafters choose from: which rows it has, and that no answer depends on it.
#include "models/draft_head.h"

#include <doctest/doctest.h>

#include <cmath>

#include "checkpoint_writer.h"
#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/requantize.h"
#include "models/tokenizer.h"

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

constexpr int64_t kRowBytes = 32 + 4;  // FP8, and the row's scale

TEST_SUITE("cpu") {
    TEST_CASE("draft head: the first rows and the last, as many as fit, in FP8") {
        const Head head(8000);
        const auto short_head = plan_draft_head(head.weight, 3000 * kRowBytes, 7990, nullptr);
        REQUIRE(short_head);
        const TokenColumns& c = short_head->columns;
        // 256 rows for added tokens, from a multiple of 16 on; the others are a multiple, too.
        CHECK(c.second == 7744);
        CHECK(c.first == (3000 - 256) / 16 * 16);
        CHECK(c.vocab == 7990);
        Weight made = short_head->weight;
        CHECK(made.rows == c.first + 256);
        CHECK(made.bytes() <= 3000 * kRowBytes);
        const auto memory = requantize(short_head->from, made, 2);
        for (const int64_t row : {int64_t{0}, int64_t{17}, c.first - 1, c.first, made.rows - 1}) {
            CAPTURE(row);
            std::vector<float> found(32);
            dequantize_row(made, row, found.data());
            const float* expected = head.values.data() + c.token(row) * 32;
            for (int i = 0; i < 32; ++i)
                CHECK(std::fabs(found[static_cast<size_t>(i)] - expected[i]) <=
                      0.07 * std::fabs(expected[i]) + 1e-3);
        }
    }

    TEST_CASE(
        "draft head: none where the whole head is as small, where nothing fits, or where it is not wanted") {
        const Head head(8000);
        CHECK(!plan_draft_head(head.weight, 8000 * 32 * 4, 8000, nullptr));
        CHECK(!plan_draft_head(head.weight, 300 * kRowBytes, 8000, nullptr));
        CHECK(!plan_draft_head(head.weight, 0, 8000, nullptr));
        const Head tiny(24);
        CHECK(!plan_draft_head(tiny.weight, 100, 24, nullptr));
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
        const auto short_head = plan_draft_head(head, 300'000, 4096, nullptr);
        REQUIRE(short_head);
        CHECK(short_head->columns.first % 128 == 0);
        CHECK(short_head->columns.second == 4096 - 256);
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
                options.draft_head_bytes = random ? 1000 * (256 + 4) : 70 * kRowBytes;
                std::unique_ptr<Model> model =
                    random ? open_synthetic("tiny", "aeon", options) : open_model(parity, options);
                place_weights(*model, *backend);
                CHECK(model->info().draft_head_rows > 0);
                CHECK(model->info().draft_head_rows < model->info().vocab_rows);
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
}

}  // namespace
}  // namespace quern
