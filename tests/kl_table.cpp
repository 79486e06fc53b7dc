// bench --kl: what packed KV caches and requantized matrices change of the demo's predictions.
#include <doctest/doctest.h>

#include <cmath>
#include <map>

#include "checkpoint_writer.h"
#include "engine_harness.h"
#include "ggml-like/error.h"
#include "models/tokenizer.h"
#include "tools/bench/kl_table.h"

namespace quern {
namespace {

const std::string kDemo = test::source_dir() + "/models/demo";

std::unique_ptr<Model> demo(Backend& backend, DenseFormat dense = DenseFormat::as_stored) {
    return load_model(kDemo, backend, {.dense = dense});
}

}  // namespace

TEST_SUITE("model") {
    TEST_CASE("bench --kl: a text of one's own, with the cache alone, --dense alone and both") {
        const auto backend = make_cpu_backend(2);
        const auto model = demo(*backend, DenseFormat::fp8);
        const test::TempDir dir;
        std::string text;
        for (int i = 0; i < 12; ++i)
            text += "What is " + std::to_string(31 * i) + " + 7? The capital of Japan. ";
        const std::vector<int32_t> tokens = kl_tokens(*model, dir.write("text.txt", text));
        CHECK(tokens == model->tokenizer()->encode(text, Tokenizer::Markers::control));
        const KlTable table = measure_kl(*model, *backend, tokens, {{"f32", ""}, {"fp8", "nvfp4"}});
        CHECK(table.tokens == static_cast<int64_t>(tokens.size()));
        REQUIRE(table.rows.size() == 5);  // as stored: two caches; fp8: without one, and the two
        CHECK(std::fabs(table.rows[0].cost.kl_mean) < 1e-7);  // the cache that it has by itself
        CHECK(table.rows[1].cost.kl_mean > 1e-6);
        CHECK(table.rows[1].kv == "fp8/nvfp4");
        CHECK(table.rows[2].dense == "fp8");
        CHECK(table.rows[2].cost.kl_mean > 1e-6);
        CHECK(table.rows[3].cost.kl_mean == table.rows[2].cost.kl_mean);
        CHECK(table.rows[4].cost.kl_mean > table.rows[1].cost.kl_mean / 2);
        CHECK(to_json(table)["rows"].size() == 5);
        CHECK(describe(table).find("| as stored | fp8/nvfp4 |") != std::string::npos);
        CHECK_THROWS_AS(kl_tokens(*model, dir.write("empty.txt", "")), Error);
        CHECK_THROWS_AS(kl_tokens(*model, "/no/such/file"), Error);
    }

    TEST_CASE("bench --kl: of 4K tokens of the demo's own kind packed caches change little" *
              doctest::test_suite("slow")) {
        const auto backend = make_cpu_backend(2);
        const auto model = demo(*backend);
        const std::vector<int32_t> tokens = kl_tokens(*model, kDemo + "/eval.jsonl");
        CHECK(tokens.size() == 4095);
        const std::map<std::string, double> most = {
            {"fp8", 0.003}, {"nvfp4", 0.03}, {"k8v4", 0.03}, {"tq4", 0.06}};
        std::vector<std::pair<std::string, std::string>> kv;
        for (const auto& [type, bound] : most) kv.emplace_back(type, "");
        const KlTable table = measure_kl(*model, *backend, tokens, kv);
        for (const KlTable::Row& row : table.rows) {
            MESSAGE(row.kv << ": mean KL " << row.cost.kl_mean << ", same likeliest " << row.cost.agreement);
            CHECK(row.cost.kl_mean <= most.at(row.kv));
            CHECK(row.cost.kl_mean > 1e-5);
            CHECK(row.cost.agreement > 0.97);
        }
    }
}

}  // namespace quern
