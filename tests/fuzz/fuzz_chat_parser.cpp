// libFuzzer target: the parser of generated text. Any bytes, cut anywhere, must give what the whole gives, as
// valid UTF-8, with arguments that are JSON. The first bytes choose the mode and the cuts.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "models/qwen3_6_chat.h"
#include "models/utf8.h"

namespace {

using quern::ChatDelta;

struct Outcome {
    std::string reasoning, content, calls;
    bool operator==(const Outcome&) const = default;
};

void require(bool condition) {
    if (!condition) std::abort();
}

void add(Outcome& outcome, const ChatDelta& delta) {
    require(quern::is_valid_utf8(delta.reasoning) && quern::is_valid_utf8(delta.content));
    outcome.reasoning += delta.reasoning;
    outcome.content += delta.content;
    for (const auto& call : delta.tool_calls) {
        require(!call.call.name.empty() && nlohmann::json::accept(call.call.arguments));
        outcome.calls += call.call.name + '\0' + call.call.arguments + '\0';
    }
}

Outcome parse(std::string_view text, size_t piece, bool thinking, bool truncated) {
    static const auto tools = nlohmann::ordered_json::parse(R"([{"name": "f", "parameters": {"properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "o": {"type": "object"}}}}])");
    const auto parser = quern::make_qwen3_6_parser(thinking, tools, 1);
    Outcome outcome;
    for (size_t at = 0; at < text.size(); at += piece) add(outcome, parser->push(text.substr(at, piece)));
    add(outcome, parser->finish(truncated));
    return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    const bool thinking = data[0] & 1, truncated = data[0] & 2;
    const std::string_view text(reinterpret_cast<const char*>(data) + 2, size - 2);
    const Outcome whole = parse(text, size, thinking, truncated);
    require(whole == parse(text, 1, thinking, truncated));
    require(whole == parse(text, 2 + data[1] % 30, thinking, truncated));
    return 0;
}
