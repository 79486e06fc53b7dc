// Images through every API, on the real server with the demo.
#include <memory>

#include "checkpoint_writer.h"
#include "image_files.h"
#include "serve_client.h"
#include "tools/common/images/read_images.h"

namespace quern {
namespace {

using namespace test;

const std::string kDemo = source_dir() + "/models/demo";

std::string url(const std::string& name) { return "data:image/png;base64," + base64(image_file(name)); }

constexpr int kTokens = 20;  // of each image_file here

json image_part(const std::string& address) {
    return {{"type", "image_url"}, {"image_url", {{"url", address}}}};
}

json about(const json& part, const std::string& text = "What is 48 + 37?") {
    return {{"messages", {{{"role", "user"}, {"content", {part, {{"type", "text"}, {"text", text}}}}}}},
            {"temperature", 0},
            {"max_tokens", 8}};
}

int64_t prompt_tokens(const Reply& r) { return r.body["usage"]["prompt_tokens"]; }

std::string message(const Reply& r) { return r.body["error"]["message"]; }

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("serve: images in every API count as tokens and change the answer's prompt") {
        const ServerProcess server({"-m", kDemo, "--alias", "m", "--strict-params"});
        const int64_t plain = prompt_tokens(chat(server, question("What is 48 + 37?")));
        const int64_t with = plain + kTokens + 2;  // the marks

        for (const json& part :
             {image_part(url("rgb.png")), json{{"type", "image_url"}, {"image_url", url("rgb.png")}},
              json{{"type", "input_image"}, {"image_url", url("rgb.jpg")}, {"detail", "high"}}}) {
            const Reply r = chat(server, about(part));
            CAPTURE(r.body.dump());
            CHECK(r.status == 200);
            CHECK(prompt_tokens(r) == with);
        }
        const json source = {
            {"type", "base64"}, {"media_type", "image/webp"}, {"data", base64(image_file("lossless.webp"))}};
        const json anthropic = {{"model", "m"},
                                {"max_tokens", 4},
                                {"messages",
                                 {{{"role", "user"},
                                   {"content",
                                    {{{"type", "image"}, {"source", source}},
                                     {{"type", "text"}, {"text", "What is 48 + 37?"}}}}}}}};
        json words = anthropic;  // this API's default is not to think: its prompts are longer
        words["messages"][0]["content"] = "What is 48 + 37?";
        const int64_t counted = post(server, "/v1/messages/count_tokens", words).body["input_tokens"];
        Reply r = post(server, "/v1/messages", anthropic);
        CAPTURE(r.body.dump());
        CHECK(r.body["usage"]["input_tokens"].get<int64_t>() +
                  r.body["usage"].value("cache_read_input_tokens", 0) ==
              counted + kTokens + 2);
        CHECK(post(server, "/v1/messages/count_tokens", anthropic).body["input_tokens"] ==
              counted + kTokens + 2);
        r = post(server, "/v1/responses",
                 {{"input",
                   {{{"role", "user"},
                     {"content",
                      {{{"type", "input_image"}, {"image_url", url("palette.gif")}},
                       {{"type", "input_text"}, {"text", "What is 48 + 37?"}}}}}}},
                  {"max_output_tokens", 4}});
        CHECK(r.body["usage"]["input_tokens"] == with);
        r = post(server, "/api/chat",
                 {{"model", "m"},
                  {"stream", false},
                  {"options", {{"num_predict", 4}}},
                  {"messages",
                   {{{"role", "user"},
                     {"content", "What is 48 + 37?"},
                     {"images", {base64(image_file("rgb.bmp"))}}}}}});
        CAPTURE(r.body.dump());
        CHECK(r.body["prompt_eval_count"] == with);
        r = post(server, "/api/generate",
                 {{"model", "m"},
                  {"stream", false},
                  {"options", {{"num_predict", 4}}},
                  {"prompt", "What is 48 + 37?"},
                  {"images", {base64(image_file("rgb.png"))}}});
        CHECK(r.body["prompt_eval_count"] == with);
    }

    TEST_CASE("serve: an image in a tool's result is seen, and again from the kept state") {
        const ServerProcess server({"-m", kDemo});
        json body = {
            {"max_tokens", 4},
            {"temperature", 0},
            {"tools",
             {{{"name", "look"}, {"input_schema", {{"type", "object"}, {"properties", json::object()}}}}}},
            {"messages",
             {{{"role", "user"}, {"content", "Look! " + std::string(600, 'x')}},
              {{"role", "assistant"},
               {"content",
                {{{"type", "tool_use"}, {"id", "t"}, {"name", "look"}, {"input", json::object()}}}}},
              {{"role", "user"},
               {"content",
                {{{"type", "tool_result"},
                  {"tool_use_id", "t"},
                  {"content",
                   {{{"type", "text"}, {"text", "seen"}},
                    {{"type", "image"},
                     {"source",
                      {{"type", "base64"},
                       {"media_type", "image/png"},
                       {"data", base64(image_file("rgb.png"))}}}}}}}}}}}}};
        const auto tokens = [&] {
            return post(server, "/v1/messages/count_tokens", body).body["input_tokens"].get<int64_t>();
        };
        const int64_t with = tokens();
        json words = body;
        words["messages"][2]["content"][0]["content"] = "seen";
        std::swap(words, body);
        CHECK(tokens() == with - kTokens - 2);
        std::swap(words, body);
        const Reply first = post(server, "/v1/messages", body), second = post(server, "/v1/messages", body);
        CHECK(first.status == 200);
        CHECK(second.body["content"] == first.body["content"]);
        CHECK(second.body["usage"]["cache_read_input_tokens"].get<int64_t>() >= 64);
    }

    TEST_CASE("serve: bad images are errors of the request that say which part") {
        const ServerProcess server({"-m", kDemo});
        const auto refused = [&](const json& part, const std::string& words) {
            const Reply r = chat(server, about(part));
            CAPTURE(r.body.dump());
            CHECK(r.status == 400);
            CHECK(message(r).find("messages[0].content[0]") != std::string::npos);
            CHECK(message(r).find(words) != std::string::npos);
        };
        refused(image_part("http://127.0.0.1/a.png"), "nothing is fetched");
        refused(image_part("file:///etc/passwd"), "data: URLs only");
        refused(image_part("data:image/png;base64,!!!!"), "base64");
        refused(image_part("data:image/png;base64,aGVsbG8="), "unknown format");
        refused(image_part(url("rgb.png").substr(0, 200)), "damaged");
        refused({{"type", "image_url"}, {"image_url", {{"url", url("rgb.png")}, {"detail", "finest"}}}},
                "detail");
        refused({{"type", "input_image"}, {"file_id", "f"}}, "data: URL");
        refused({{"type", "image"}, {"source", {{"type", "url"}, {"url", "http://x"}}}}, "base64");
        json system = question("x");
        system["messages"].insert(system["messages"].begin(),
                                  {{"role", "system"}, {"content", {image_part(url("rgb.png"))}}});
        CHECK(chat(server, system).status == 400);
        json many = about(image_part(url("rgb.png")));
        for (int i = 0; i < 64; ++i) many["messages"][0]["content"].push_back(image_part(url("rgb.png")));
        CHECK(message(chat(server, many)).find("65 images") != std::string::npos);
        CHECK(chat(server, question("What is 48 + 37?")).status == 200);
    }

    TEST_CASE("serve: /props and the list of models say whether images are read") {
        const auto says = [](const ServerProcess& server, bool vision) {
            auto c = server.client();
            const json props = json::parse(c.Get("/props")->body),
                       models = json::parse(c.Get("/v1/models")->body);
            const json expected = vision ? json{"text", "image"} : json::array({"text"});
            CHECK(props["modalities"]["vision"] == vision);
            CHECK(models["data"][0]["architecture"]["input_modalities"] == expected);
            CHECK(models["models"][0]["input_modalities"] == expected);
            const json show = json::parse(
                c.Post("/api/show", R"({"model": ")" + models["data"][0]["id"].get<std::string>() + "\"}",
                       "application/json")
                    ->body);
            CHECK((show["capabilities"].dump().find("vision") != std::string::npos) == vision);
        };
        says(ServerProcess({"-m", kDemo}), true);
        for (const char* flag : {"--no-vision", "--mmproj=off"}) {
            const ServerProcess server({"-m", kDemo, flag});
            says(server, false);
            const Reply r = chat(server, about(image_part(url("rgb.png"))));
            CHECK(r.status == 400);
            CHECK(message(r).find("messages[0].content[0]: this model reads text only") == 0);
            // a tool's picture is no reason to end a conversation
            json body = about(image_part(url("rgb.png")));
            body["messages"].push_back({{"role", "assistant"}, {"content", "85"}});
            body["messages"].push_back({{"role", "user"}, {"content", "And 1 + 1?"}});
            CHECK(chat(server, body).status == 200);
        }
    }

    TEST_CASE("serve: random weights read images where their name says so") {
        const ServerProcess server({"--synthetic", "tiny+vision", "-c", "2048"});
        const Reply r = chat(server, about(image_part(url("rgb.png"))));
        CAPTURE(r.body.dump());
        CHECK(r.status == 200);
        CHECK(prompt_tokens(r) >= 64);  // 256 x 256 pixels at least
        CHECK(chat(ServerProcess({"--synthetic", "tiny", "-c", "2048"}), about(image_part(url("rgb.png"))))
                  .status == 400);
    }

    TEST_CASE("a path that is dropped on a terminal is an image if it is one") {
        const TempDir dir;
        const std::string path = dir.write("a picture.png", "x"), other = dir.write("b.txt", "x");
        std::string escaped = path;
        escaped.replace(escaped.find(' '), 1, "\\ ");
        const auto one = [&](const std::string& line, const std::string& expected,
                             const std::string& text = "") {
            CAPTURE(line);
            const DroppedImages dropped = dropped_images(line);
            CHECK(dropped.paths == std::vector<std::string>{expected});
            CHECK(dropped.text == text);
        };
        one(escaped + " ", path);
        one("'" + path + "'", path);
        one("\"" + path + "\"\n", path);
        one(escaped + " What is 'this'?", path, "What is 'this'?");
        std::string url = "file://" + path;
        url.replace(url.find(' '), 1, "%20");
        one(url, path);
        const std::string quoted = dir.write("it's \"so\".JPG", "x");
        std::string shell = quoted;  // as terminals write it
        shell.replace(shell.find('\''), 1, "'\\''");
        one("'" + shell + "'", quoted);
        const DroppedImages two = dropped_images(escaped + " '" + shell + "' compare");
        CHECK(two.paths == std::vector<std::string>{path, quoted});
        CHECK(two.text == "compare");
        for (const std::string& line :
             {other, path + "x", std::string("/help"), "What is " + path, std::string()}) {
            CAPTURE(line);
            CHECK(dropped_images(line).paths.empty());
            CHECK(dropped_images(line).text == line);
        }
    }
}

}  // namespace quern
