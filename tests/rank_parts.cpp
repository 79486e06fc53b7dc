// What a rank gets of weights and of the head, against the whole; the flags that choose ranks.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ggml-like/error.h"
#include "ggml-like/ops/logits_top.h"
#include "models/shard.h"
#include "ops/harness.h"
#include "ops/weights.h"
#include "tools/common/cli_args.h"
#include "tools/common/device_flags.h"
#include "tools/engine/head_ranks.h"

namespace quern {
namespace {

using namespace test;

/// The segment's numbers, after its columns have been copied if it is some of another's.
std::vector<double> values_of(WeightSegment s) {
    std::vector<std::byte> memory(static_cast<size_t>(gathered_bytes(s)));
    gather_columns(s, memory.data());
    CHECK(s.stored_cols == 0);
    std::vector<double> values;
    std::vector<float> row(static_cast<size_t>(s.cols));
    for (int64_t r = 0; r < s.rows; ++r) {
        dequantize_row(s, r, row.data());
        values.insert(values.end(), row.begin(), row.end());
    }
    return values;
}

/// Products of values and scales: FP32's against those in double.
bool same_numbers(const std::vector<double>& found, const std::vector<double>& expected) {
    return std::equal(found.begin(), found.end(), expected.begin(), expected.end(),
                      [](double a, double b) { return std::fabs(a - b) <= std::ldexp(std::fabs(b), -22); });
}

std::vector<int32_t> top_of(const std::vector<float>& logits, float temperature, int64_t vocab) {
    const Device device = cpu_device(1);
    Graph g;
    Tensor* in = g.input("logits", DType::F32, {1, static_cast<int64_t>(logits.size())});
    Tensor* t = g.input("temperature", DType::F32, {1});
    Tensor* top = logits_top(g, "top", in, t, vocab);
    g.output(top);
    Plan plan(std::move(g), *device.backend);
    set_input(plan, in, logits);
    set_input(plan, t, {temperature});
    plan.run();
    const auto* words = top->as<int32_t>();
    return {words, words + kTopWords};
}

float as_float(int32_t word) {
    float x;
    std::memcpy(&x, &word, sizeof x);
    return x;
}

/// Merges what ranks find in their equal parts, and compares with what is in the whole row.
void check_merge(const std::vector<float>& logits, float temperature, int64_t vocab, int ranks) {
    CAPTURE(ranks);
    const auto rows = static_cast<int64_t>(logits.size()) / ranks;
    std::vector<std::vector<int32_t>> parts;
    std::vector<const int32_t*> tops;
    for (int r = 0; r < ranks; ++r)
        parts.push_back(top_of({logits.begin() + r * rows, logits.begin() + (r + 1) * rows}, temperature,
                               std::clamp<int64_t>(vocab - r * rows, 1, rows)));
    for (const auto& part : parts) tops.push_back(part.data());
    std::vector<int32_t> merged(kTopWords);
    merge_top(tops, rows, vocab, temperature, merged.data());
    const std::vector<int32_t> whole = top_of(logits, temperature, vocab);
    const auto with_ids = parts.begin() + (vocab + rows - 1) / rows;
    const bool all_exact =
        std::all_of(parts.begin(), with_ids, [](const auto& part) { return part[kTopWords - 1] != 0; });
    CHECK(merged[kTopWords - 1] == (all_exact ? 1 : 0));
    if (!all_exact) return;  // then all logits are read
    CHECK(whole[kTopWords - 1] == 1);
    for (size_t i = 0; i < 2 * kTopLogits; ++i) {
        CAPTURE(i);
        CHECK(merged[i] == whole[i]);
    }
    const float found = as_float(merged[2 * kTopLogits]), expected = as_float(whole[2 * kTopLogits]);
    CHECK(std::fabs(found - expected) <= 1e-6f * expected);
}

DeviceChoice parse(const std::vector<std::string>& args) {
    DeviceChoice choice;
    ArgParser parser("test", "", "");
    add_device_flags(parser, choice);
    parser.apply(parser.normalise(args));
    return choice;
}

TEST_SUITE("cpu") {
    TEST_CASE("rank parts: rows and columns of every format have the numbers of the whole") {
        constexpr int64_t kRows = 256, kCols = 512;
        for (const Form form : kForms) {
            WeightStore store(static_cast<unsigned>(form) + 1);
            std::vector<double> whole;
            const WeightSegment s = store.segment("w", form, kRows, kCols, whole);
            CAPTURE(s.name);
            for (const int of : {1, 2})
                for (int rank = 0; rank < of; ++rank) {
                    CAPTURE(of);
                    CAPTURE(rank);
                    const Shard shard{rank, of};
                    const int64_t rows = kRows / of, cols = kCols / of;
                    const WeightSegment upper = take_shard(s, shard);
                    CHECK(same_numbers(values_of(upper),
                                       std::vector<double>(whole.begin() + rank * rows * kCols,
                                                           whole.begin() + (rank + 1) * rows * kCols)));
                    std::vector<double> left;
                    for (int64_t r = 0; r < kRows; ++r)
                        left.insert(left.end(), whole.begin() + r * kCols + rank * cols,
                                    whole.begin() + r * kCols + (rank + 1) * cols);
                    CHECK(same_numbers(values_of(take_shard(s, shard.along(ShardAxis::columns))), left));
                    // Rows of columns: the second half of the rank's
                    const WeightSegment some = take_shard(s, shard.along(ShardAxis::columns));
                    const WeightSegment lower = slice_rows(some, kRows / 2, kRows / 2, "lower");
                    CHECK(same_numbers(values_of(lower),
                                       std::vector<double>(left.begin() + kRows / 2 * cols, left.end())));
                }
        }
    }

    TEST_CASE("rank parts: blocks of scales are never cut") {
        WeightStore store(1);
        std::vector<double> values;
        const WeightSegment nvfp4 = store.segment("n", Form::nvfp4, 6, 48, values),
                            blocks = store.segment("b", Form::f8_block, 128, 256, values);
        const auto refused = [](const WeightSegment& s, const Shard& shard) {
            CHECK_THROWS_WITH_AS(take_shard(s, shard), doctest::Contains("choose fewer"), Error);
        };
        refused(nvfp4, {0, 2, ShardAxis::columns});
        refused(nvfp4, {0, 4, ShardAxis::rows});
        refused(blocks, {0, 2, ShardAxis::rows});
        refused(blocks, {0, 4, ShardAxis::columns});
        CHECK(take_shard(nvfp4, {2, 3, ShardAxis::columns}).cols == 16);
        CHECK_THROWS_AS(slice_columns(nvfp4, 8, 16, "x"), Error);
        CHECK_THROWS_AS(slice_columns(nvfp4, 32, 32, "x"), Error);
    }

    TEST_CASE("rank parts: of fewer things than ranks neighbours have the same one") {
        for (int rank = 0; rank < 8; ++rank) {
            CHECK(Shard{rank, 8}.among(2) == Shard{rank / 4, 2});
            CHECK(Shard{rank, 8}.among(8) == Shard{rank, 8});
            CHECK(Shard{rank, 8}.among(32) == Shard{rank, 8});
        }
    }

    TEST_CASE("rank parts: the merged head is that of the whole row") {
        for (unsigned seed = 0; seed < 6; ++seed) {
            CAPTURE(seed);
            std::vector<float> logits = Random(seed).normals(1200);
            if (seed == 1)
                for (float& x : logits) x = std::round(4 * x) / 4;                   // many ties
            if (seed == 2) std::fill(logits.begin() + 20, logits.end(), -INFINITY);  // some ranks have none
            if (seed == 3) logits[1100] = std::numeric_limits<float>::quiet_NaN();
            if (seed == 4) std::fill(logits.begin() + 300, logits.begin() + 600, 50.0f);
            for (const int ranks : {2, 3, 4})
                for (const float temperature : {-1.0f, 0.0f, 0.7f, 2.0f})
                    check_merge(logits, temperature, 1150, ranks);
        }
    }

    TEST_CASE("rank parts: ranks beyond the vocabulary add nothing to the merged head, whatever is there") {
        std::vector<float> logits = Random(9).normals(1200);
        for (const int64_t vocab : {70, 299, 300, 301, 600}) {
            CAPTURE(vocab);
            std::fill(logits.begin() + vocab, logits.end(), std::numeric_limits<float>::quiet_NaN());
            for (const int ranks : {2, 3, 4})
                for (const float temperature : {0.0f, 0.7f}) check_merge(logits, temperature, vocab, ranks);
            logits = Random(9).normals(1200);
        }
    }

    TEST_CASE("rank parts: --device and -tp") {
        CHECK(parse({}).of_ranks() == std::vector<int>{0});
        CHECK(!parse({}).named());
        CHECK(parse({"--device", "3"}).of_ranks() == std::vector<int>{3});
        CHECK(parse({"-tp", "4"}).of_ranks() == std::vector<int>{0, 1, 2, 3});
        CHECK(parse({"--tensor-parallel-size", "2", "--device", "1,0"}).of_ranks() == std::vector<int>{1, 0});
        CHECK(parse({"-tp", "2"}).peer_access);
        CHECK(!parse({"-tp", "2", "--no-peer-access"}).peer_access);
        for (const std::vector<std::string>& wrong :
             std::vector<std::vector<std::string>>{{"-tp", "2", "--device", "1"},
                                                   {"--device", "0,1"},
                                                   {"--device", "1,1", "-tp", "2"},
                                                   {"--device", "0,,1"},
                                                   {"--device", "a"},
                                                   {"-tp", "0"},
                                                   {"-tp", "17"}}) {
            CAPTURE(wrong.back());
            CHECK_THROWS_AS(parse(wrong).of_ranks(), Error);
        }
    }
}

}  // namespace
}  // namespace quern
