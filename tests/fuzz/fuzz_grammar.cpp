// libFuzzer: schemas, regular expressions and grammars, and a text that is matched. The first byte says which (s, r, g), the first
// line feed ends the grammar, in which 1F stands for one. Either an Error, or a matcher that sees the same in a text byte by byte
// and in pieces.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "ggml-like/error.h"
#include "ggml-like/json_guard.h"
#include "tools/engine/grammar.h"

namespace {

std::shared_ptr<const quern::Grammar> compile(char kind, const std::string& text) {
    if (kind == 'r') return quern::Grammar::regex(text);
    if (kind == 'g') return quern::Grammar::gbnf(text);
    return quern::Grammar::json(quern::parse_json_ordered(text, "schema", {.kind = quern::ErrorKind::usage}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    const std::string_view all(reinterpret_cast<const char*>(data), size);
    const size_t end = std::min(all.find('\n'), size);
    std::string grammar(all.substr(1, end - 1));
    for (char& c : grammar)
        if (c == '\x1f') c = '\n';
    const std::string_view text = all.substr(std::min(end + 1, size)).substr(0, 500);
    try {
        const auto compiled = compile(all[0], grammar);
        quern::GrammarMatcher one(compiled), pieces(compiled);
        for (const char c : text) {
            const bool may = one.accepts({&c, 1});
            one.push({&c, 1});
            if (may == one.dead()) std::abort();
        }
        for (size_t at = 0; at < text.size(); at += 7) pieces.push(text.substr(at, 7));
        if (one.complete() != pieces.complete() || one.dead() != pieces.dead()) std::abort();
    } catch (const quern::Error&) {
    }
    return 0;
}
