// Choices among the kernels of a product (cuda/variants.h): the table that a reader finds there, and what holds for every
// shape.
#include "ggml-like/cuda/variants.h"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <set>
#include <string>
#include <vector>

#include "ggml-like/cuda/linear/dense_shapes.h"
#include "ggml-like/cuda/linear/held_shapes.h"
#include "ggml-like/cuda/linear/warpgroup_shapes.h"
#include "ggml-like/cuda/moe/mixture_shapes.h"

namespace quern {
namespace {

using namespace cuda;
using pack::Kind;

constexpr Card kH200{.sms = 132, .capability = 90, .shared_bytes = 227 * 1024, .warpgroups = true};
constexpr Card kA100{.sms = 108, .capability = 80, .shared_bytes = 163 * 1024};
constexpr Card kRtx5090{.sms = 170, .capability = 120, .shared_bytes = 99 * 1024};
constexpr Card kCards[] = {kH200, kA100, kRtx5090};
constexpr Kind kKinds[] = {Kind::bf16, Kind::fp8, Kind::nvfp4};

/// A matrix [rows, columns] with 1 to 64 rows of answers.
std::string answers(const Card& card, AnswerShape shape, int rows, int columns) {
    shape.tiles = (rows + 15) / 16, shape.chunks = (columns + 63) / 64;
    std::string names;
    for (const int n : {1, 2, 8, 9, 16, 17, 64}) {
        shape.rows = n;
        names += fmt::format("{}{}", names.empty() ? "" : " ", name_of(choose(card, shape)));
    }
    return names;
}

/// The same with prompts of so many tokens, without the "gemm " before each.
std::string prompts(const Card& card, Kind kind, int rows, int columns, bool may_split) {
    std::string names;
    for (const int n : {1, 64, 65, 200, 2048}) {
        const PromptShape shape{kind, n, (rows + 15) / 16, columns / 64, may_split};
        names += (names.empty() ? "" : ", ") + std::string(name_of(choose(card, shape))).substr(5);
    }
    return names;
}

/// A cut is in range and takes no more waves of blocks than tiles as large as can be; blocks have fewer rows in one wave only.
template <class S>
void check_cuts() {
    for (const int sms : {1, 108, 132, 170})
        for (const int tiles : {1, 17, 128, 320, 576, 772, 2176, 15520})
            for (const int tokens : {1, 16, 17, 32, 64, 65, 255, 256, 257, 511, 2048, 8192, 8193}) {
                CAPTURE(fmt::format("{} multiprocessors, {} tiles, {} tokens", sms, tiles, tokens));
                const linear::PromptCut cut = linear::cut_prompt<S>(sms, tiles, tokens),
                                        scaled = linear::cut_prompt<S>(sms, tiles, tokens, true);
                CHECK((cut.tokens % 16 == 0 && cut.tokens > 0 && cut.tokens <= S::kTokens));
                CHECK((scaled.tokens % 16 == 0 && scaled.tokens > 0 && scaled.tokens <= S::kScaledTokens));
                CHECK((scaled.tiles > 0 && scaled.tiles <= S::kTiles));
                CHECK((cut.tiles > 0 && cut.tiles <= S::kTiles));
                const auto blocks = [&](int of_tiles, int of_tokens) {
                    return (tiles + of_tiles - 1) / of_tiles * S::kCluster *
                           ((tokens + of_tokens - 1) / of_tokens);
                };
                const int together = sms * S::kBlocksPerSm;
                const auto waves = [&](int n) { return (n + together - 1) / together; };
                const int n = blocks(cut.tiles, cut.tokens);
                CHECK(waves(n) <= waves(blocks(S::kTiles, S::kTokens)));
                if (cut.tiles < S::kTiles) CHECK(n <= together);
            }
}

template <typename Visit>
void for_each_answer(const Visit& visit) {
    for (const Card& card : kCards)
        for (const Kind kind : kKinds)
            for (const int chunks : {1, 2, 5, 8, 16, 31, 32, 64, 80, 96, 272})
                for (const int tiles : {1, 16, 128, 264, 265, 576, 772, 15520})
                    for (int rows = 1; rows <= 64; ++rows)
                        for (const auto& [normed, paired] :
                             {std::pair(false, false), {true, false}, {true, true}})
                            visit(card, AnswerShape{kind, rows, tiles, chunks, normed, paired});
}

TEST_SUITE("cpu") {
    TEST_CASE("variants: answers of the 35B's matrices") {
        const AnswerShape bf16{.kind = Kind::bf16, .normed = true}, fp4{.kind = Kind::nvfp4, .normed = true};
        const AnswerShape out{.kind = Kind::bf16};
        CHECK(answers(kH200, bf16, 248320, 2048) == "tall few few whole whole whole rounds");  // head
        CHECK(answers(kH200, bf16, 12352, 2048) == "one few few few few lone whole");          // DeltaNet in
        CHECK(answers(kH200, fp4, 9216, 2048) == "one few few held held held held");           // attention in
        CHECK(answers(kH200, out, 2048, 4096) ==
              "one few few quarters quarters low quarters quarters");  // DeltaNet out
        CHECK(answers(kH200, out, 5120, 6144) ==
              "one few few quarters quarters quarters whole");  // the 27B's DeltaNet out
        CHECK(answers(kA100, bf16, 12352, 2048) == "one few few step step step step");
        CHECK(answers(kRtx5090, fp4, 9216, 2048) == "few few few step step step step");
        AnswerShape gate_up{.kind = Kind::nvfp4, .normed = true, .paired = true};
        CHECK(answers(kH200, gate_up, 34816, 5120) ==
              "tall few few whole whole whole rounds");  // the 27B's MLP
    }

    TEST_CASE("variants: blocks of a stream share all of its pieces, those that begin late fewer") {
        using moe::share_begin;
        for (const int blocks : {1, 2, 3, 4, 108, 132, 170})
            for (int all = 0; all < 1000000; all += all < 100000 ? 977 : 8009)
                for (const bool late : {false, true}) {
                    REQUIRE(share_begin(all, 0, blocks, late) == 0);
                    REQUIRE(share_begin(all, blocks, blocks, late) == all);
                    for (int b = 0; b < blocks; ++b)
                        REQUIRE(share_begin(all, b, blocks, late) <= share_begin(all, b + 1, blocks, late));
                }
        const auto share = [](int block, bool late) {  // pieces, of 32 rows of the 35B's moe_down
            const int all = 4 * 164 * 128 * 2;
            return (share_begin(all, block + 1, 132, late) - share_begin(all, block, 132, late)) / 4;
        };
        CHECK((share(0, false) == 318 && share(131, false) == 318));
        CHECK((share(0, true) == 325 && share(87, true) == 325));
        CHECK((share(88, true) == 324 && share(131, true) == 281));
    }

    TEST_CASE("variants: attention") {
        const auto names = [](const Card& card, int heads, int kv_heads, int head_dim, int rotary) {
            const AttentionShape answer{heads, kv_heads, head_dim, rotary, true},
                prompt{heads, kv_heads, head_dim, rotary, false};
            return fmt::format("{} {}", name_of(choose(card, answer)), name_of(choose(card, prompt)));
        };
        CHECK(names(kH200, 16, 2, 256, 64) == "split warpgroups");  // the 35B
        CHECK(names(kH200, 24, 4, 256, 64) == "split warpgroups");  // the 27B
        CHECK(names(kA100, 16, 2, 256, 64) == "split tiles");
        CHECK(names(kRtx5090, 16, 2, 256, 64) == "split tiles");
        CHECK(names(kH200, 16, 1, 256, 64) == "generic generic");
        CHECK(names(kH200, 4, 2, 64, 32) == "generic generic");
    }

    TEST_CASE("variants: attention among patches") {
        const auto name = [](const Card& card, int head_dim) {
            return std::string(name_of(choose(card, GridShape{head_dim})));
        };
        CHECK(name(kH200, 72) == "warpgroups");  // the published towers
        CHECK(name(kH200, 64) == "tiles");
        CHECK(name(kA100, 72) == "tiles");
        CHECK(name(kRtx5090, 72) == "tiles");
    }

    TEST_CASE("variants: scan of the delta rule") {
        CHECK(std::string(name_of(choose_scan(kH200))) == "warpgroups");
        for (const Card& card : {kA100, kRtx5090}) CHECK(std::string(name_of(choose_scan(card))) == "tiles");
        Card small = kH200;
        small.shared_bytes = 219 * 1024;
        CHECK(std::string(name_of(choose_scan(small))) == "tiles");
    }

    TEST_CASE("variants: answers of mixtures") {
        const MixtureShape m{.experts_kind = Kind::nvfp4,  // the 35B's gate and up
                             .shared_kind = Kind::nvfp4,
                             .used = 8,
                             .experts = 256,
                             .tiles = 64,
                             .shared_tiles = 64,
                             .chunks = 32,
                             .shared_chunks = 32,
                             .height = 1024};
        MixtureShape down = m;
        down.tiles = down.shared_tiles = 128, down.chunks = down.shared_chunks = 8, down.height = 2048;
        const auto names = [](auto choose, const Card& card, MixtureShape shape) {
            std::string all;
            for (const int rows : {1, 2, 8, 9, 32, 33, 64, 65}) {
                shape.rows = rows;
                all += std::string(all.empty() ? "" : " ") + name_of(choose(card, shape));
            }
            return all;
        };
        CHECK(names(choose_gate_up, kH200, m) == "one few few choosing choosing choosing choosing slices");
        CHECK(names(choose_gate_up, kA100, m) ==
              "one choosing choosing choosing choosing choosing choosing slices");
        for (const Card& card : {kH200, kA100})
            CHECK(names(choose_down, card, down) == "one few few stream stream stream stream slices");
        CHECK(names(choose_gate_up, kRtx5090, m) ==
              "choosing few choosing choosing choosing choosing choosing slices");
        CHECK(names(choose_down, kRtx5090, down) == "one few stream stream stream stream stream slices");
        const auto changed = [](MixtureShape shape, auto change) { return change(shape), shape; };
        const MixtureShape many = changed(m, [](MixtureShape&s) { s.experts = 512; }),
                           more = changed(m, [](MixtureShape&s) { s.used = 10; }),
                           wide = changed(m, [](MixtureShape&s) { s.shared_kind = Kind::bf16; }),
                           used = changed(down, [](MixtureShape&s) { s.used = 40; }),
                           wider = changed(m, [](MixtureShape&s) { s.chunks = s.shared_chunks = 48; }),
                           odd = changed(down, [](MixtureShape&s) { s.chunks = s.shared_chunks = 18; });
        CHECK(names(choose_gate_up, kH200, wider) ==
              "choosing choosing choosing choosing choosing choosing choosing slices");
        CHECK(names(choose_down, kH200, odd) == "stream stream stream stream stream stream stream slices");
        CHECK(names(choose_gate_up, kH200, many) ==
              "stream stream stream stream stream stream stream slices");
        CHECK(names(choose_gate_up, kH200, more) ==
              "stream stream stream stream stream stream slices slices");
        CHECK(names(choose_gate_up, kH200, wide) ==
              "slices slices slices slices slices slices slices slices");
        CHECK(names(choose_down, kH200, used) == "stream stream stream stream slices slices slices slices");
        CHECK(gate_up_streams(kH200, changed(wide, [](MixtureShape& s) { s.rows = 50; })));
        CHECK_FALSE(down_streams(kH200, changed(wide, [](MixtureShape& s) { s.rows = 50; })));
    }

    TEST_CASE("variants: prompts of the 35B's matrices") {
        CHECK(prompts(kH200, Kind::bf16, 12352, 2048, true) == "wide, wide, wide, wide, wide");
        CHECK(prompts(kH200, Kind::bf16, 34816, 5120, true) ==
              "tall, tall, wide, wide, wide");  // the 27B's MLP
        CHECK(prompts(kH200, Kind::bf16, 2048, 4096, true) ==
              "short halves, short halves, short halves, halves, halves");
        CHECK(prompts(kH200, Kind::bf16, 257, 2048, true) ==
              "short halves, short halves, short halves, short halves, low halves");  // a router
        CHECK(prompts(kH200, Kind::fp8, 2048, 4096, true) ==
              "short halves, short halves, short halves, halves, halves");
        CHECK(prompts(kA100, Kind::fp8, 2048, 4096, true) == "few, few, narrow, narrow, narrow");
        CHECK(prompts(kRtx5090, Kind::nvfp4, 9216, 2048, true) == "middle, middle, middle, middle, many");
    }

    TEST_CASE("variants: how a prompt's product is cut on an H200") {
        using linear::cut_prompt, linear::Halves, linear::PromptCut, linear::Tall, linear::Wide;
        const auto is = [](const PromptCut& cut, int tiles, int tokens) {
            return cut.tiles == tiles && cut.tokens == tokens;
        };
        CHECK(is(cut_prompt<Wide>(132, 772, 50), 6, 64));  // in_proj: 129 blocks
        CHECK(is(cut_prompt<Wide>(132, 772, 200), 6, 208));
        CHECK(is(cut_prompt<Wide>(132, 772, 500), 8, 256));  // two waves either way
        CHECK(is(cut_prompt<Wide>(132, 772, 760), 8, 192));  // four tiles of tokens in three waves
        CHECK(is(cut_prompt<Wide>(132, 772, 8192), 8, 256));
        CHECK(is(cut_prompt<Wide>(132, 320, 32), 5, 16));      // the 27B's out_proj: 128 blocks instead of 40
        CHECK(is(cut_prompt<Halves>(132, 128, 500), 8, 128));  // out_proj: 128 blocks instead of 64
        CHECK(is(cut_prompt<Tall>(132, 2176, 50), 8, 64));
        CHECK(is(cut_prompt<Wide>(132, 772, 200, true), 8, 112));  // FP8 with scales of chunks
        CHECK(is(cut_prompt<Wide>(132, 772, 8192, true), 8, 160));
        check_cuts<Wide>(), check_cuts<Halves>(), check_cuts<Tall>();
        check_cuts<linear::ShortHalves<Kind::bf16>>(), check_cuts<linear::LowHalves>();
    }

    TEST_CASE("variants: an answer's product fits into the card, and one row's is for one row") {
        for_each_answer([](const Card& card, const AnswerShape& s) {
            const AnswerProduct product = choose(card, s);
            CAPTURE(name_of(product));
            const bool one = product == AnswerProduct::one || product == AnswerProduct::tall;
            if (one) REQUIRE(s.rows == 1);
            if (product == AnswerProduct::few) {
                REQUIRE(linear::dense_rows_fit(card, s.kind, s.rows, s.chunks, 0));
                const bool two = s.kind == Kind::bf16 && s.normed && !s.paired && linear::dense_is_deep(card);
                REQUIRE(s.rows <= (two ? 16 : 8));
            }
            if (product == AnswerProduct::held) {
                const bool fp8 = s.kind == Kind::fp8, few = s.rows <= 16;
                REQUIRE((s.normed && s.rows > 8 && s.chunks == 32 && s.kind != Kind::bf16));
                const int bytes = fp8 ? (few ? linear::HeldShape<Kind::fp8, 2>::kShared
                                             : linear::HeldShape<Kind::fp8, 4>::kShared)
                                      : (few ? linear::HeldShape<Kind::nvfp4, 2>::kShared
                                             : linear::HeldShape<Kind::nvfp4, 4>::kShared);
                REQUIRE(bytes + linear::kHeldStatic <= card.shared_bytes);
            }
            if (product >= AnswerProduct::held)
                REQUIRE((card.warpgroups && s.chunks % linear::piece_chunks(s.kind) == 0));
        });
    }

    TEST_CASE("variants: whether a prompt's matrix is split depends on the matrix alone") {
        const std::set<PromptProduct> split = {PromptProduct::halves, PromptProduct::short_halves,
                                               PromptProduct::low_halves, PromptProduct::narrow,
                                               PromptProduct::few};
        for (const Card& card : kCards)
            for (const Kind kind : kKinds)
                for (const int tiles : {1, 17, 128, 256, 257, 772})
                    for (const int chunks : {15, 16, 64})
                        for (int tokens = 1; tokens <= 8192; tokens += tokens < 300 ? 1 : 97)
                            for (const bool may : {false, true}) {
                                const PromptShape s{kind, tokens, tiles, chunks, may};
                                REQUIRE(is_split(s) == (may && tiles <= 256 && chunks >= 16));
                                REQUIRE(split.contains(choose(card, s)) == is_split(s));
                            }
    }

    TEST_CASE("variants: each of them is chosen for some shape") {
        std::set<AnswerProduct> answer;
        for_each_answer([&](const Card& card, const AnswerShape& s) { answer.insert(choose(card, s)); });
        CHECK(answer.size() == 10);
        std::set<PromptProduct> prompt;
        std::set<ExpertsProduct> experts;
        for (const Card& card : kCards)
            for (const Kind kind : kKinds)
                for (const int tokens : {1, 65, 128, 200, 8192}) {
                    for (const int tiles : {17, 128, 772, 2176})
                        prompt.insert(choose(card, PromptShape{kind, tokens, tiles, 32, true}));
                    experts.insert(choose(card, ExpertsShape{kind, tokens * 8, 256}));
                }
        CHECK(prompt.size() == 9);
        CHECK(experts.size() == 3);
        CHECK(choose(kH200, ExpertsShape{Kind::fp8, 64, 384}) == ExpertsProduct::tour);
        CHECK(choose(kH200, ExpertsShape{Kind::fp8, 64, 385}) != ExpertsProduct::tour);
        CHECK((as_prompt(kH200, Kind::fp8, 256) && !as_prompt(kH200, Kind::fp8, 385)));
        CHECK_FALSE((as_prompt(kH200, Kind::nvfp4, 256) || as_prompt(kA100, Kind::fp8, 256)));
    }

    TEST_CASE(
        "variants: linear_add's blocks do the router's work where they have whole columns to themselves") {
        const AnswerShape out{.kind = Kind::bf16, .rows = 1, .tiles = 128, .chunks = 64};
        const auto with = [&](auto change) {
            AnswerShape s = out;
            change(s);
            return product_routes(kH200, s, 17);
        };
        CHECK(with([](AnswerShape&) {}));
        CHECK(with([](AnswerShape& s) { s.rows = 8; }));
        CHECK_FALSE(with([](AnswerShape& s) { s.rows = 9; }));
        CHECK_FALSE(with([](AnswerShape& s) { s.chunks = 8; }));  // two tiles share a block
        CHECK_FALSE(with([](AnswerShape& s) { s.tiles = 2 * 132 + 1; }));
        CHECK_FALSE(product_routes(kH200, out, 33));  // more experts than warps have tiles
    }

    TEST_CASE("variants: answer products add up over ranks where all of their blocks run at once") {
        const AnswerShape out{.kind = Kind::bf16, .rows = 1, .tiles = 128, .chunks = 32};
        const auto with = [&](auto change) {
            AnswerShape s = out;
            change(s);
            return product_sums(kH200, s);
        };
        CHECK(with([](AnswerShape&) {}));
        CHECK(with([](AnswerShape& s) { s.rows = 8, s.kind = Kind::nvfp4; }));
        CHECK(with([](AnswerShape& s) { s.rows = 20; }));  // low quarters
        CHECK(with([](AnswerShape& s) { s.rows = 20, s.kind = Kind::nvfp4; }));
        CHECK(with([](AnswerShape& s) { s.rows = 64, s.kind = Kind::nvfp4; }));
        CHECK(with([](AnswerShape& s) { s.tiles = 320; }));
        CHECK_FALSE(with([](AnswerShape& s) { s.tiles = 321; }));
        CHECK(with([](AnswerShape& s) { s.tiles = 320, s.rows = 9; }));         // 160 blocks of quarters
        CHECK_FALSE(with([](AnswerShape& s) { s.tiles = 320, s.rows = 64; }));  // whole
        CHECK_FALSE(with([](AnswerShape& s) { s.kind = Kind::fp8; }));
        const MixtureShape down{.experts_kind = Kind::nvfp4,
                                .shared_kind = Kind::nvfp4,
                                .rows = 1,
                                .used = 8,
                                .experts = 256,
                                .tiles = 128,
                                .shared_tiles = 128,
                                .chunks = 4,
                                .shared_chunks = 4,
                                .height = 2048};
        const auto mixture = [&](const Card& card, auto change) {
            MixtureShape s = down;
            change(s);
            return down_sums(card, s);
        };
        for (const int rows : {1, 8, 9, 64}) CHECK(mixture(kH200, [&](MixtureShape& s) { s.rows = rows; }));
        CHECK_FALSE(mixture(kH200, [](MixtureShape& s) { s.rows = 65; }));
        CHECK_FALSE(mixture(kH200, [](MixtureShape& s) { s.shared_kind = Kind::bf16; }));
        CHECK_FALSE(mixture(kA100, [](MixtureShape&) {}));  // more tiles than multiprocessors
        CHECK_FALSE(mixture(kH200, [](MixtureShape& s) { s.rows = 64, s.height = 5136; }));
    }
}

}  // namespace
}  // namespace quern
