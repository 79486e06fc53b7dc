// The public JSON-Schema-Test-Suite (a folder such as tests/draft2020-12, named by QUERN_JSON_SCHEMA_SUITE; skipped without)
// against the matcher: which schemas are accepted, which documents are let through.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "ggml-like/error.h"
#include "tools/engine/grammar.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

struct Share {
    int count = 0, of = 0;
    void add(bool yes) {
        count += yes;
        ++of;
    }
    std::string text() const { return fmt::format("{} of {}", count, of); }
};

struct Shares {
    Share schemas;        // accepted
    Share whole;          // of these: every keyword is enforced
    Share valid;          // documents let through
    Share invalid;        // documents refused
    Share invalid_whole;  // the same where every keyword is enforced
    std::vector<std::string> refused_schemas, refused, let_through;
};

bool lets_through(const std::shared_ptr<const Grammar>& grammar, const ordered_json& document) {
    GrammarMatcher matcher(grammar);
    matcher.push(document.dump());
    return matcher.complete();
}

void measure(const ordered_json& group, const std::string& file, Shares& out) {
    const std::string name = file + ": " + group["description"].get<std::string>();
    std::shared_ptr<const Grammar> grammar;
    try {
        grammar = Grammar::json(group["schema"]);
    } catch (const Error& error) {
        out.refused_schemas.push_back(name + ": " + error.what());
    }
    out.schemas.add(grammar != nullptr);
    if (grammar == nullptr) return;
    const bool whole = grammar->not_enforced().empty();
    out.whole.add(whole);
    for (const auto& test : group["tests"]) {
        const bool through = lets_through(grammar, test["data"]);
        const std::string line = fmt::format("{}: {}", name, test["data"].dump());
        if (test["valid"].get<bool>()) {
            out.valid.add(through);
            if (!through) out.refused.push_back(line);
        } else {
            out.invalid.add(!through);
            if (whole) out.invalid_whole.add(!through);
            if (whole && through) out.let_through.push_back(line);
        }
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("json schema: the public test suite") {
        const char* folder = std::getenv("QUERN_JSON_SCHEMA_SUITE");
        if (folder == nullptr) {
            MESSAGE("SKIPPED: QUERN_JSON_SCHEMA_SUITE is not set");
            return;
        }
        Shares shares;
        for (const auto& entry : std::filesystem::directory_iterator(folder)) {
            if (entry.path().extension() != ".json") continue;
            std::ifstream in(entry.path());
            for (const auto& group : ordered_json::parse(in))
                measure(group, entry.path().stem().string(), shares);
        }
        MESSAGE("schemas accepted: " << shares.schemas.text() << "; enforced whole: " << shares.whole.text());
        MESSAGE("valid documents let through: " << shares.valid.text());
        MESSAGE("invalid documents refused: " << shares.invalid.text()
                                              << "; where all is enforced: " << shares.invalid_whole.text());
        for (const auto* list : {&shares.refused_schemas, &shares.refused, &shares.let_through}) {
            fmt::print("----\n");
            for (const std::string& line : *list) fmt::print("{}\n", line);
        }
        CHECK(shares.schemas.of > 300);
        CHECK(shares.let_through.empty());
    }
}

}  // namespace
}  // namespace quern
