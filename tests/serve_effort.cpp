// The effort of thinking that requests ask for, as a model with the format of Qwen3.8 is told it: the demo checkpoint with
// another template.
#include <filesystem>

#include "checkpoint_writer.h"
#include "serve_client.h"

namespace quern {
namespace {

using namespace test;

void make_checkpoint(const TempDir& dir) {
    for (const char* name : {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"})
        std::filesystem::create_symlink(std::string(QUERN_SOURCE_DIR "/models/demo/") + name, dir / name);
    json config = json::parse(std::ifstream(QUERN_SOURCE_DIR "/models/demo/tokenizer_config.json"));
    config.erase("chat_template");
    dir.write("tokenizer_config.json", config.dump());
    dir.write("chat_template.jinja", "{{ 'Reasoning effort is set to' }}");
}

std::string prompt_of(const ServerProcess& server, const json& more) {
    json body = question("Hi");
    body.update(more);
    return post(server, "/apply-template", body).body["prompt"];
}

/// Output and exit code of `quern run` with the demo.
std::string run_with(const std::string& kwargs) {
    const std::string command =
        QUERN_BINARY " run -p Hi -n 4 --chat-template-kwargs '" + kwargs + "' 2>&1; echo code $?";
    std::FILE* pipe = popen(command.c_str(), "r");
    REQUIRE(pipe != nullptr);
    std::string text;
    char buffer[4096];
    while (const size_t n = std::fread(buffer, 1, sizeof buffer, pipe)) text.append(buffer, n);
    pclose(pipe);
    return text;
}

}  // namespace

TEST_SUITE("model") {
    TEST_CASE("serve: Qwen3.8 is told the effort in words") {
        const TempDir dir;
        make_checkpoint(dir);
        const ServerProcess server({"-m", dir.str()});
        const std::string xhigh = "<|im_start|>system\nReasoning effort is set to xhigh. ",
                          low = "<|im_start|>system\nReasoning effort is set to low. ",
                          none = "<|im_start|>user\nHi<|im_end|>\n";
        const auto begins = [&](const json& more, const std::string& start) {
            CAPTURE(more.dump());
            CHECK(prompt_of(server, more).starts_with(start));
        };
        begins(json::object(), xhigh);
        begins({{"reasoning_effort", "high"}}, xhigh);
        begins({{"reasoning_effort", "max"}}, xhigh);
        begins({{"reasoning_effort", "low"}}, low);
        begins({{"reasoning_effort", "minimal"}}, low);
        begins({{"reasoning_effort", "medium"}}, none);
        begins({{"reasoning_effort", "none"}}, none);
        begins({{"chat_template_kwargs", {{"reasoning_effort", "low"}}}}, low);
        begins({{"chat_template_kwargs", {{"enable_thinking", false}}}}, none);
        // Earlier thinking stays unless the request says otherwise.
        json old = question("Hi");
        old["messages"].push_back({{"role", "assistant"}, {"content", "Hello"}, {"reasoning_content", "hm"}});
        old["messages"].push_back({{"role", "user"}, {"content", "Bye"}});
        const json messages = {{"messages", old["messages"]}};
        CHECK(prompt_of(server, messages).find("<think>\nhm\n</think>") != std::string::npos);
        old = messages;
        old["chat_template_kwargs"] = {{"preserve_thinking", false}};
        CHECK(prompt_of(server, old).find("hm") == std::string::npos);
        old = messages;
        old["preserve_thinking"] = false;
        CHECK(prompt_of(server, old).find("hm") == std::string::npos);
        old["chat_template_kwargs"] = {{"preserve_thinking", true}};  // the inner one is the more exact word
        CHECK(prompt_of(server, old).find("hm") != std::string::npos);
        const auto bad =
            post(server, "/apply-template",
                 {{"messages", old["messages"]}, {"chat_template_kwargs", {{"reasoning_effort", "most"}}}});
        CHECK(bad.status == 400);
        CHECK(bad.body["error"]["param"] == "chat_template_kwargs.reasoning_effort");
    }

    TEST_CASE("run: the effort is one of those that exist") {
        CHECK(run_with(R"({"reasoning_effort": "low"})").find("code 0") != std::string::npos);
        const std::string wrong = run_with(R"({"reasoning_effort": "most"})");
        CHECK(wrong.find("reasoning_effort must be minimal, low, medium, high, xhigh or max") !=
              std::string::npos);
        CHECK(wrong.find("code 2") != std::string::npos);
    }
}

}  // namespace quern
