// Requests as coding agents and their SDKs send them, on the real server with the demo checkpoint.
#include <memory>

#include "serve_client.h"
#include "tools/common/messages.h"
#include "tools/serve/chat_body.h"
#include "tools/serve/other_formats.h"
#include "tools/serve/response_store.h"

namespace quern {
namespace {

using namespace test;

/// What Claude Code sends in the middle of a session: a line that changes every time, tools of the API's servers, a
/// picture in a result, a note about tokens after it.
json claude_code(const std::string& stamp) {
    return json::parse(R"({"model": "claude-sonnet-4-5", "max_tokens": 24, "stream": true,
      "system": [{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=)" +
                       stamp + R"(;"},
                 {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
      "metadata": {"user_id": "user_1"}, "context_management": {"edits": []},
      "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"},
      "tools": [{"name": "Read", "description": "Reads a file", "input_schema": {"type": "object",
                  "properties": {"file_path": {"type": "string"}}, "required": ["file_path"]}},
                {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
      "messages": [
        {"role": "user", "content": [{"type": "text", "text": "What is in a.png?"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I read it.", "signature": "x"},
          {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "png"}},
          {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [
            {"type": "web_search_result", "title": "About PNG", "url": "https://x.example", "encrypted_content": "eA"}]},
          {"type": "tool_use", "id": "t1", "name": "Read", "input": {"file_path": "a.png"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [
          {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}},
          {"type": "tool_reference", "tool_name": "Read"},
          {"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "found"}]}]}]},
        {"role": "system", "content": "Token usage: 9/10"},
        {"role": "user", "content": [{"type": "document", "title": "notes",
           "source": {"type": "text", "media_type": "text/plain", "data": "remember the milk"}},
          {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}},
          {"type": "compaction", "content": "Earlier we spoke of tea."}]}]})");
}

/// The twelve fields of Codex, with a patch in the history.
json codex() {
    return json::parse(
        R"({"model": "gpt-5-codex", "instructions": "You are Codex.", "store": false, "stream": true,
      "include": ["reasoning.encrypted_content"], "parallel_tool_calls": true, "prompt_cache_key": "conversation-1",
      "client_metadata": {"x-codex-installation-id": "1"}, "reasoning": {"effort": "medium", "summary": "auto"},
      "tool_choice": "auto",
      "tools": [
        {"type": "function", "name": "shell_command", "description": "Runs a command", "strict": false,
         "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}},
        {"type": "custom", "name": "apply_patch", "description": "Edits files", "format":
         {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch hunk+ end_patch"}},
        {"type": "namespace", "name": "mcp__git__", "description": "git", "tools": [
         {"type": "function", "name": "log", "parameters": {"type": "object", "properties": {}}}]},
        {"type": "web_search", "external_web_access": false}],
      "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix it"},
          {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0="}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "patch"}],
         "encrypted_content": null},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch\n"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Success"},
        {"type": "function_call", "call_id": "c2", "name": "log", "namespace": "mcp__git__", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "one commit"}]},
        {"type": "local_shell_call", "call_id": "c3", "status": "completed",
         "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "a.txt"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "qed"}},
        {"type": "item_reference", "id": "msg_gone"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on"}]}]})");
}

std::vector<json> events(const ServerProcess& server, const json& body, const std::string& path) {
    std::vector<json> out;
    for (const std::string& data : stream(server, body, path))
        out.push_back(json::parse(data, nullptr, false));
    return out;
}

bool mentions(const json& value, const std::string& text) {
    return value.dump().find(text) != std::string::npos;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("chat body: what is foreign in a Claude Code session becomes text in its place") {
        const ChatBody chat = chat_from_messages(claude_code("abc"));
        const json& m = chat.body["messages"];
        CHECK(chat.body == chat_from_messages(claude_code("another")).body);
        CHECK(m[0] == json{{"role", "system"}, {"content", "You are Claude Code."}});
        CHECK(chat.body["reasoning_effort"] == "max");
        CHECK(chat.body["tools"].size() == 1);
        CHECK(chat.dropped == std::vector<std::string>{"tools web_search_20250305"});
        CHECK(m[3]["role"] == "tool");
        CHECK(m[3]["content"][0]["type"] == "image");  // read, or left out, where the model is known
        const std::string words = read_content(m[3]["content"], "content");
        CHECK(words.find("[image left out") == 0);
        CHECK(mentions(words, "[tool Read]"));
        CHECK(mentions(words, "found"));
        CHECK(m[4] == json{{"role", "system"}, {"content", "Token usage: 9/10"}});
        REQUIRE(chat.origins.size() == m.size());
        CHECK(chat.origins[3] == "messages[2].content[0]");
        CHECK(chat.origins[5] == "messages[4]");
        const FieldError moved =
            at_origin({"messages[5].role", "messages[5].role must be known"}, chat.origins);
        CHECK(moved.field == "messages[4].role");
        CHECK(std::string(moved.what()) == "messages[4].role must be known");
    }

    TEST_CASE("chat body: a Codex session keeps its patches, its namespaces and the order of its turns") {
        const json body = codex();
        const ChatBody chat = chat_from_responses(body, response_items(body));
        const json& m = chat.body["messages"];
        CHECK(chat.kinds.custom == std::set<std::string>{"apply_patch"});
        REQUIRE(chat.kinds.spaces.contains("mcp__git__log"));
        CHECK(chat.dropped == std::vector<std::string>{"tools web_search"});
        CHECK(chat.body["tools"].size() == 3);
        CHECK(mentions(chat.body["tools"][1], "start: begin_patch"));
        CHECK(chat.body["tools"][1]["function"]["parameters"]["required"] == json{"input"});
        REQUIRE(m.size() == 12);
        CHECK(m[3]["tool_calls"][0]["function"]["arguments"] == R"({"input":"*** Begin Patch\n"})");
        CHECK(m[4]["content"] == "Success");
        CHECK(m[5]["tool_calls"][0]["function"]["name"] == "mcp__git__log");
        CHECK(m[6]["content"] == "one commit");
        CHECK(m[7]["tool_calls"][0]["function"]["name"] == "local_shell");
        CHECK(mentions(m[9], "qed"));
        CHECK(chat.origins[0] == "instructions");
        CHECK(chat.origins[6] == "input[6]");
        CHECK(custom_input(custom_arguments("a\n\"b\"")) == "a\n\"b\"");
    }

    TEST_CASE("chat body: parts of a wrong form are errors of the request, or text") {
        for (const json& part :
             {json{{"type", "document"}, {"source", {{"type", 3}}}},
              json{{"type", "document"}, {"source", 3}}, json{{"type", "search_result"}, {"content", 3}},
              json{{"type", "compaction"}},
              json{{"type", "web_search_tool_result"}, {"content", {{"error_code", "busy"}}}},
              json{{"type", "input_audio"}, {"input_audio", json::object()}},
              json{{"type", "tool_reference"}}})
            CHECK_NOTHROW(read_content(json::array({part}), "content"));
        CHECK_THROWS_AS(read_content(json::array({3}), "content"), FieldError);
        CHECK_THROWS_AS(chat_from_responses(json::object(), json::array({{{"type", 3}}})), FieldError);
        CHECK_NOTHROW(chat_from_responses(
            json::object(),
            json::array({{{"type", "item_reference"}, {"id", "x"}}, {{"type", "message"}, {"id", 3}}})));
        CHECK_THROWS_AS(chat_body({{"tools", {{{"type", "custom"}, {"format", 3}}}}}), FieldError);
    }

    TEST_CASE("chat body: what says nothing is no reason to refuse a request") {
        const json plain = {{"messages", {{{"role", "user"}, {"content", "x"}}}}};
        for (const json& more :
             {json{{"stop", ""}}, json{{"grammar", ""}}, json{{"functions", json::array()}},
              json{{"function_call", "none"}}, json{{"reasoning_effort", ""}},
              json{{"tools", {{{"type", "web_search"}}}}}}) {
            json body = plain;
            body.update(more);
            CHECK(chat_body(body).body == plain);
        }
        for (const char* word : {"auto", "none", "required"}) {
            json body = plain;
            body["tool_choice"] = {{"type", word}};
            CHECK(chat_body(body).body["tool_choice"] == word);
        }
        json stops = plain;
        stops["stop"] = {"", "a"};
        CHECK(chat_body(stops).body["stop"] == json{"a"});
    }

    TEST_CASE("responses: a call of free text comes back as what it was, while it is written") {
        GenerationRequest request;
        request.prompts = {{1}};
        request.kinds.custom = {"apply_patch"};
        request.kinds.spaces["mcp__git__log"] = {"mcp__git__", "log"};
        const ToolCall patch{"call_1", "apply_patch", custom_arguments("*** Begin\n\"x\"")},
            log{"call_2", "mcp__git__log", "{}"};
        Choice all;
        all.outcome.end = Outcome::End::stop;
        const auto deltas = [&](const std::function<void(const AnswerDelta&)>& take) {
            AnswerDelta d;
            d.call_pieces = {{0, "call_1", "apply_patch", R"({"input": ")", ""}};
            take(d);
            d.call_pieces = {{0, "", "", R"(*** Begin\n)", "*** Begin\n"}};
            take(d);
            d.call_pieces = {{0, "", "", R"(\"x\""})", "\"x\""}, {1, "call_2", "mcp__git__log", "{}", ""}};
            d.tool_calls = {{0, patch}};
            take(d);
            d.call_pieces.clear();
            d.tool_calls = {{1, log}};
            take(d);
        };
        deltas([&](const AnswerDelta& d) { all.add(d); });
        json kept;
        const auto format = responses_format(request, json::object(), [&](const json& r) { kept = r; });
        std::string text = format->begin();
        deltas([&](const AnswerDelta& d) { text += format->delta(0, d); });
        text += format->end(0, all);
        std::string input;
        std::vector<std::string> types;
        for (size_t at = text.find("data: "); at != std::string::npos; at = text.find("data: ", at + 1)) {
            const json e = json::parse(text.substr(at + 6, text.find('\n', at) - at - 6));
            types.push_back(e["type"]);
            if (e["type"] == "response.custom_tool_call_input.delta") input += e["delta"];
        }
        CHECK(input == "*** Begin\n\"x\"");
        CHECK(types == std::vector<std::string>{
                           "response.created", "response.in_progress", "response.output_item.added",
                           "response.custom_tool_call_input.delta", "response.custom_tool_call_input.delta",
                           "response.custom_tool_call_input.done", "response.output_item.done",
                           "response.output_item.added", "response.function_call_arguments.delta",
                           "response.function_call_arguments.done", "response.output_item.done",
                           "response.completed"});
        REQUIRE(kept["output"].size() == 2);
        CHECK(kept["output"][0]["type"] == "custom_tool_call");
        CHECK(kept["output"][0]["input"] == input);
        CHECK(kept["output"][1]["name"] == "log");
        CHECK(kept["output"][1]["namespace"] == "mcp__git__");
        // The same without a stream, but for the ids.
        const json whole = responses_format(request, json::object(), nullptr)->whole({all});
        CHECK(whole["output"][0]["input"] == input);
        CHECK(whole["output"][1]["call_id"] == "call_2");
    }

    TEST_CASE("response store: bounded, by key, and gone after a while") {
        const auto response = [](const std::string& id, size_t size) {
            return json{{"id", id}, {"output", {{{"type", "message"}, {"text", std::string(size, 'x')}}}}};
        };
        ResponseStore store(20000, std::chrono::seconds(3600));
        store.put("me", nullptr, json::array({"one"}), response("r1", 10));
        store.put("me", store.find("r1", "me"), json::array({"two"}), response("r2", 10));
        REQUIRE(store.find("r2", "me") != nullptr);
        CHECK(store.find("r2", "you") == nullptr);
        const json all = ResponseStore::conversation(*store.find("r2", "me"));
        REQUIRE(all.size() == 4);
        CHECK(all[0] == "one");
        CHECK(all[2] == "two");
        CHECK_FALSE(store.erase("r1", "you"));
        CHECK(store.erase("r1", "me"));
        CHECK(store.find("r1", "me") == nullptr);
        CHECK(ResponseStore::conversation(*store.find("r2", "me")).size() == 4);
        store.put("me", nullptr, json::array(), response("r3", 19600));
        CHECK(store.find("r2", "me") == nullptr);
        CHECK(store.find("r3", "me") != nullptr);
        store.put("me", nullptr, json::array(), response("r4", 30000));  // larger than all
        CHECK(store.find("r4", "me") == nullptr);
        ResponseStore brief(20000, std::chrono::seconds(-1));
        brief.put("me", nullptr, json::array(), response("r1", 1));
        CHECK(brief.find("r1", "me") == nullptr);
    }
}

TEST_SUITE("model") {
    TEST_CASE("serve: sessions of Claude Code and Codex go on, and find their states again") {
        const ServerProcess server({"--no-vision"});  // what their tools showed becomes words
        const auto claude = events(server, claude_code("1"), "/v1/messages");
        REQUIRE(claude.size() > 3);
        CHECK(claude[0]["type"] == "message_start");
        CHECK(claude.back()["type"] == "message_stop");
        const json again = events(server, claude_code("2"), "/v1/messages").end()[-2];
        CHECK(again["usage"]["cache_read_input_tokens"] > 60);
        json counting = claude_code("3");
        const Reply counted = post(server, "/v1/messages/count_tokens", counting);
        REQUIRE(counted.status == 200);
        CHECK(counted.body["input_tokens"] == claude[0]["message"]["usage"]["input_tokens"]);

        const auto from_codex = events(server, codex(), "/v1/responses");
        CHECK(from_codex.front()["type"] == "response.created");
        const json& last = from_codex.back();
        CHECK((last["type"] == "response.completed" || last["type"] == "response.incomplete"));
        CHECK(last["response"]["instructions"] == "You are Codex.");
        CHECK(last["response"]["tools"].size() == 4);
        CHECK(last["response"]["store"] == false);
        CHECK(last["response"]["temperature"].dump() == "0.3");  // of the demo's generation_config.json
        const Reply tokens = post(server, "/v1/responses/input_tokens", codex());
        CHECK(tokens.body["input_tokens"] == last["response"]["usage"]["input_tokens"]);
        auto c = server.client();
        json once = claude_code("4");
        once["stream"] = false;
        const auto replied = c.Post("/v1/messages", once.dump(), "application/json");
        CHECK(replied->get_header_value("X-Quern-Ignored") == "tools web_search_20250305");
        CHECK(post(server, "/v1/responses", {{"input", json::array()}, {"max_output_tokens", 1}}).status ==
              200);
        const json models = json::parse(c.Get("/v1/models?client_version=0.145.0")->body);
        CHECK(models["models"][0]["slug"] == models["data"][0]["id"]);
        CHECK(models["models"][0]["context_window"] == models["data"][0]["context_length"]);
        CHECK(models["models"][0]["apply_patch_tool_type"] == "freeform");
    }

    TEST_CASE("serve: arguments of a call come piece by piece") {
        const ServerProcess server;
        json weather = question("What is the weather in Paris?");
        weather["tools"] =
            json::array({json::parse(R"({"type":"function","function":{"name":"get_weather","parameters":
            {"type":"object","properties":{"city":{"type":"string"}},"required":["city"]}}})")});
        int pieces = 0;
        std::string arguments;
        for (const json& e : events(server, weather, "/v1/chat/completions")) {
            if (!e.is_object() || e["choices"].empty() || !e["choices"][0]["delta"].contains("tool_calls"))
                continue;
            arguments += e["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"];
            ++pieces;
        }
        CHECK(json::parse(arguments) == json{{"city", "Paris"}});
        CHECK(pieces > 2);
    }

    TEST_CASE("serve: responses can be gone on from, read again and deleted") {
        const ServerProcess server({"--api-key", "secret,other"});
        auto c = server.client();
        const httplib::Headers mine = {{"Authorization", "Bearer secret"}},
                               theirs = {{"Authorization", "Bearer other"}};
        const auto ask = [&](const json& body) {
            const auto r = c.Post("/v1/responses", mine, body.dump(), "application/json");
            return Reply{r->status, json::parse(r->body)};
        };
        json body = {
            {"input", "What is the capital of France?"}, {"temperature", 0}, {"max_output_tokens", 80}};
        const Reply first = ask(body);
        REQUIRE(first.status == 200);
        const std::string id = first.body["id"], path = "/v1/responses/" + id;
        CHECK(json::parse(c.Get(path, mine)->body) == first.body);
        CHECK(c.Get(path, theirs)->status == 404);
        CHECK(json::parse(c.Get(path + "/input_items", mine)->body)["data"][0]["content"] == body["input"]);
        body["input"] = "And of Italy?";
        body["previous_response_id"] = id;
        const Reply next = ask(body);
        REQUIRE(next.status == 200);
        CHECK(next.body["previous_response_id"] == id);
        CHECK(next.body["output"].back()["content"][0]["text"] == "The capital of Italy is Rome.");
        CHECK(next.body["usage"]["input_tokens"] > first.body["usage"]["input_tokens"]);
        CHECK(json::parse(c.Delete(path, mine)->body)["deleted"] == true);
        CHECK(c.Get(path, mine)->status == 404);
        CHECK(ask(body).status == 404);
        body.erase("previous_response_id");
        body["store"] = false;
        CHECK(c.Get("/v1/responses/" + ask(body).body["id"].get<std::string>(), mine)->status == 404);
    }

    TEST_CASE("serve: an answer goes on where the last message ends") {
        const ServerProcess server;
        json body = question("What is the capital of France?");
        body["reasoning_effort"] = "none";
        body["messages"].push_back({{"role", "assistant"}, {"content", "The capital of"}});
        const std::string rest = " France is Paris.";
        CHECK(chat(server, body).body["choices"][0]["message"]["content"] == rest);
        const json prompt = post(server, "/apply-template", body).body["prompt"];
        CHECK(prompt.get<std::string>().ends_with("</think>\n\nThe capital of"));
        json messages = {{"max_tokens", 40}, {"temperature", 0}, {"messages", body["messages"]}};
        CHECK(post(server, "/v1/messages", messages).body["content"][0]["text"] == rest);
        body["continue_final_message"] = false;
        CHECK(post(server, "/apply-template", body)
                  .body["prompt"]
                  .get<std::string>()
                  .find("The capital of<|im_end|>") != std::string::npos);
        body.erase("continue_final_message");
        body["messages"][1] = {
            {"role", "assistant"}, {"content", ""}, {"reasoning_content", "The user asks"}};
        CHECK(post(server, "/apply-template", body)
                  .body["prompt"]
                  .get<std::string>()
                  .ends_with("<think>\nThe user asks\n"));
        body["messages"].erase(1);
        body["continue_final_message"] = true;
        CHECK(chat(server, body).status == 400);
        body["continue_final_message"] = false;
        body["add_generation_prompt"] = false;
        CHECK(post(server, "/apply-template", body)
                  .body["prompt"]
                  .get<std::string>()
                  .ends_with("<|im_end|>\n"));
    }

    TEST_CASE("serve: reported tokens join to the content") {
        const ServerProcess server;
        json body = question("What is 48 + 37?");
        body["logprobs"] = true;
        for (const bool stop : {false, true}) {
            if (stop) body["stop"] = {" 37 ="};
            const json choice = chat(server, body).body["choices"][0];
            std::string text;
            for (const json& t : choice["logprobs"]["content"]) text += t["token"];
            const std::string content = choice["message"]["content"];
            CHECK(text.substr(0, content.size()) == content);
            CHECK(text.size() <= content.size() + 8);
            if (!stop) CHECK(text == content);
        }
    }
}

}  // namespace quern
