// Conversations in files: what was saved is loaded, and what is wrong is named with the file.
#include "tools/run/transcript.h"

#include <doctest/doctest.h>

#include "checkpoint_writer.h"
#include "ggml-like/error.h"
#include "tools/common/messages.h"

namespace quern {
namespace {

std::string refusal(const std::string& path) {
    try {
        load_transcript(path);
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::usage);
        return error.what();
    }
    return "";
}

TEST_SUITE("cpu") {
    TEST_CASE("transcript: what is saved is loaded") {
        const test::TempDir dir;
        const std::string path = dir.str() + "/chat.json";
        const std::vector<Message> said = {
            {.role = "system", .content = "Be short."},
            {.role = "user", .content = "Weather in \"Paris\"?"},
            {.role = "assistant",
             .content = "",
             .reasoning = "A tool knows.",
             .tool_calls = {{.id = "call_1", .name = "weather", .arguments = R"({"city": "Paris"})"}}},
            {.role = "tool", .content = "21", .tool_call_id = "call_1"},
            {.role = "assistant", .content = "21 \u00b0C"}};
        save_transcript(path, said);
        const std::vector<Message> back = load_transcript(path);
        REQUIRE(back.size() == said.size());
        for (size_t i = 0; i < said.size(); ++i) {
            CAPTURE(i);
            CHECK(back[i].role == said[i].role);
            CHECK(back[i].content == said[i].content);
            CHECK(back[i].reasoning == said[i].reasoning);
            CHECK(back[i].tool_call_id == said[i].tool_call_id);
            REQUIRE(back[i].tool_calls.size() == said[i].tool_calls.size());
            for (size_t c = 0; c < said[i].tool_calls.size(); ++c) {
                CHECK(back[i].tool_calls[c].id == said[i].tool_calls[c].id);
                CHECK(back[i].tool_calls[c].name == said[i].tool_calls[c].name);
                CHECK(back[i].tool_calls[c].arguments == said[i].tool_calls[c].arguments);
            }
        }
        save_transcript(path, {});
        CHECK(load_transcript(path).empty());
    }

    TEST_CASE("transcript: what is none is refused by the name of the file and of the field") {
        const test::TempDir dir;
        const auto refused = [&](const std::string& text) {
            const std::string path = dir.str() + "/chat.json";
            dir.write("chat.json", text);
            const std::string says = refusal(path);
            CHECK(says.starts_with(path + ": "));
            return says.substr(std::min(says.size(), path.size() + 2));
        };
        CHECK(refused("[]") == "should be a JSON object with a list 'messages'");
        CHECK(refused(R"({"messages": 1})") == "should be a JSON object with a list 'messages'");
        CHECK(refused(R"({"messages": [1]})") == "messages[0] must be a JSON object, found 1");
        CHECK(refused(R"({"messages": [{"content": "x"}]})") ==
              "messages[0].role must be system, developer, user, assistant or tool, found null");
        CHECK(refused(R"({"messages": [{"role": "user", "content": 3}]})") ==
              "messages[0].content must be a string or a list of parts, found 3");
    }
}

}  // namespace
}  // namespace quern
