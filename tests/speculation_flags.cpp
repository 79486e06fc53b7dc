// Flags of speculation, in our words, llama.cpp's and vLLM's.
#include "tools/common/speculation_flags.h"

#include <doctest/doctest.h>

#include "ggml-like/error.h"
#include "tools/common/cli_args.h"

namespace quern {
namespace {

SpeculationOptions parse(const std::vector<std::string>& args) {
    SpeculationOptions options;
    ArgParser parser("test", "a test", "");
    add_speculation_flags(parser, options);
    parser.apply(parser.normalise(args));
    return options;
}

TEST_SUITE("cpu") {
    TEST_CASE("flags of speculation: off unless asked for, with the names that others use") {
        CHECK(!parse({}).on());
        CHECK(parse({"--spec", "auto"}).kind == DrafterKind::automatic);
        CHECK(parse({"--spec-type", "lookup"}).kind == DrafterKind::lookup);
        CHECK(parse({"--spec", "ngram"}).kind == DrafterKind::lookup);
        CHECK(parse({"--spec", "mtp"}).kind == DrafterKind::mtp);
        CHECK(parse({"--spec", "dflash"}).kind == DrafterKind::dflash);
        for (const char* flag : {"-md", "--model-draft"}) {
            CHECK(parse({flag, "DIR"}).draft_model == "DIR");
            CHECK(parse({flag, "DIR"}).kind == DrafterKind::dflash);
            CHECK(parse({"--spec", "auto", flag, "DIR"}).kind == DrafterKind::automatic);
            CHECK(!parse({flag, "DIR", "--spec", "none"}).on());
        }
        CHECK(!parse({"--spec", "auto", "--spec", "none"}).on());
        for (const char* name : {"--draft-max", "--draft", "--draft-n", "--num-speculative-tokens"})
            CHECK(parse({name, "3"}).draft_max == 3);
        CHECK(parse({}).short_head);
        CHECK(!parse({"--draft-head", "full"}).short_head);
        CHECK(parse({"--draft-head", "full", "--draft-head", "short"}).short_head);
        const auto config =
            parse({"--speculative-config", R"({"method": "ngram", "num_speculative_tokens": 4})"});
        CHECK(config.kind == DrafterKind::lookup);
        CHECK(config.draft_max == 4);
        const auto drafter = parse({"--speculative-config", R"({"method": "dflash", "model": "DIR"})"});
        CHECK(drafter.kind == DrafterKind::dflash);
        CHECK(drafter.draft_model == "DIR");
    }

    TEST_CASE("flags of speculation: errors say what there is") {
        CHECK_THROWS_WITH_AS(parse({"--spec", "eagle"}),
                             doctest::Contains("expected auto, none, lookup, mtp or dflash"), Error);
        CHECK_THROWS_AS(parse({"--draft-max", "0"}), Error);
        CHECK_THROWS_WITH_AS(parse({"--draft-head", "half"}), doctest::Contains("expected full or short"),
                             Error);
        CHECK_THROWS_AS(parse({"--draft-max", "16"}), Error);
        const auto config = [](const char* json) { return parse({"--speculative-config", json}); };
        CHECK_THROWS_WITH_AS(config("{}"), doctest::Contains("'method' is missing"), Error);
        CHECK_THROWS_WITH_AS(config(R"({"method": "eagle3"})"), doctest::Contains("eagle3"), Error);
        CHECK_THROWS_WITH_AS(config(R"({"method": "ngram", "prompt_lookup_max": 4})"),
                             doctest::Contains("'prompt_lookup_max' is not supported"), Error);
        for (const char* bad :
             {"[]", "{", R"({"method": 3})", R"({"method": "ngram", "num_speculative_tokens": 99})"})
            CHECK_THROWS_AS(config(bad), Error);
    }
}

}  // namespace
}  // namespace quern
