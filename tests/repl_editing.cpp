// Editing on a terminal: pastes, completion, characters of several code points, Ctrl-Z, width, questions.
#include <algorithm>

#include "pty_chat.h"

using namespace quern::test;
using namespace quern::test::pty;

namespace {

constexpr const char* kCtrlZ = "\x1a";
constexpr const char* kBackspace = "\x7f";
constexpr const char* kLeft = "\033[D";

std::string saved_question(Chat& chat, const std::string& file) {
    chat.type("/save " + file + "\r");
    REQUIRE(chat.sees("saved to"));
    REQUIRE(chat.prompts());
    return nlohmann::json::parse(contents(file))["messages"][0]["content"];
}

std::string numbered_lines(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += "line " + std::to_string(i) + "\r";
    return text;
}

void write_file(const std::string& path, const std::string& text, mode_t mode) {
    std::ofstream(path) << text;
    REQUIRE(chmod(path.c_str(), mode) == 0);
}

constexpr const char* kTools =
    R"([{"type": "function", "function": {"name": "get_weather", "description": "the weather", "parameters":
{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])";

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("repl: a long paste is one word on the screen, and goes as one") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "-n", "4", "--no-stats"});
        REQUIRE(chat.prompts());
        chat.type("Sum: " + paste(numbered_lines(200)));
        REQUIRE(chat.sees("Sum: [pasted 200 lines]"));
        chat.type(" and " + paste(numbered_lines(200)));
        REQUIRE(chat.sees("[pasted 200 lines, text 2]"));
        chat.type(std::string(kBackspace) + "?\r");
        REQUIRE(chat.sees("cut off"));
        CHECK(chat.screen().find("line 150") == std::string::npos);
        REQUIRE(chat.prompts());
        std::string wanted = numbered_lines(200);
        std::replace(wanted.begin(), wanted.end(), '\r', '\n');
        CHECK(saved_question(chat, home / "a.json") == "Sum: " + wanted + " and ?");

        chat.type("/clear\r");
        REQUIRE(chat.prompts());
        chat.type(std::string(kUp) + kUp + kUp);  // from the history it comes folded, too
        REQUIRE(chat.sees("[pasted 201 lines]"));
        chat.type("\r");
        REQUIRE(chat.sees("cut off"));
        REQUIRE(chat.prompts());
        CHECK(saved_question(chat, home / "b.json") == "Sum: " + wanted + " and ?");
    }

    TEST_CASE("repl: Tab completes commands, kept chats and files") {
        TempDir home;
        write_file(home / "grain.txt", "wheat", 0600);
        write_file(home / "grist.txt", "meal", 0600);
        Chat chat(home, {"--temp", "0", "-n", "4"});
        REQUIRE(chat.prompts());
        chat.type("/hel\t\r");
        CHECK(chat.sees("this list"));
        REQUIRE(chat.prompts());
        chat.type("/read " + home.str() + "/g\t");
        chat.type("\t");
        CHECK(chat.sees("grain.txt"));
        CHECK(chat.sees("grist.txt"));
        chat.type("ai\t\r");
        CHECK(chat.sees("5 bytes go with the next message"));
        REQUIRE(chat.prompts());
        chat.type("/save stones\r");
        REQUIRE(chat.prompts());
        chat.type("/load sto\t\r");
        CHECK(chat.sees("messages"));
    }

    TEST_CASE("repl: the cursor and Backspace take flags and joined emoji as one") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "-n", "2", "--no-stats"});
        REQUIRE(chat.prompts());
        chat.type("a🇩🇪🇫🇷👨‍👩‍👧");
        chat.type(std::string(kLeft) + kLeft + kBackspace + "b\r");
        REQUIRE(chat.sees("cut off"));
        REQUIRE(chat.prompts());
        CHECK(saved_question(chat, home / "a.json") == "ab🇫🇷👨‍👩‍👧");
    }

    TEST_CASE("repl: Ctrl-Z goes to the shell, and fg comes back to the line") {
        TempDir home;
        Chat chat = Chat::shell(home);
        chat.type(std::string(QUERN_BINARY) + " run -t 2 --temp 0 -n 2\r");
        REQUIRE(chat.prompts());
        chat.type("half a thought");
        REQUIRE(chat.sees("half a thought"));
        chat.type(kCtrlZ);
        REQUIRE(chat.sees("Stopped"));
        CHECK(chat.paste_is_off());
        chat.type("fg\r");
        REQUIRE(chat.sees("half a thought"));
        chat.type(" more\r");
        REQUIRE(chat.sees("cut off"));
        REQUIRE(chat.prompts());
        CHECK(saved_question(chat, home / "a.json") == "half a thought more");
    }

    TEST_CASE(
        "run: Ctrl-Z in an answer gives the shell a terminal that shows what is typed, fg a quiet one") {
        for (const char* prompt : {"", " -p 'What is the capital of France?'"}) {
            CAPTURE(prompt);
            TempDir home;
            Chat chat = Chat::shell(home);
            chat.type(std::string(QUERN_BINARY) + " run -t 2 --temp 0 --ignore-eos" + prompt + "\r");
            if (*prompt == 0) {
                REQUIRE(chat.prompts());
                chat.type("What is the capital of France?\r");
            }
            REQUIRE(chat.sees("Paris"));
            CHECK(chat.echoes(false));
            for (int round = 0; round < 2; ++round) {
                chat.type(kCtrlZ);
                REQUIRE(chat.sees("Stopped"));
                CHECK(chat.echoes(true));
                chat.type("fg\r");
                CHECK(chat.echoes(false));
            }
            chat.type(kCtrlC);
            REQUIRE(chat.sees("cancelled"));
            if (*prompt == 0) {
                REQUIRE(chat.prompts());
                chat.type(kCtrlD);
            }
            CHECK(chat.echoes(true));
        }
    }

    TEST_CASE("run: Ctrl-Z without a shell to come back to changes nothing") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "--ignore-eos"});
        REQUIRE(chat.prompts());
        chat.type("What is the capital of France?\r");
        REQUIRE(chat.sees("Paris"));
        chat.type(kCtrlZ);
        CHECK(chat.echoes(false));
        chat.type(kCtrlC);
        REQUIRE(chat.sees("(stopped)"));
        CHECK(chat.screen().find("^") == std::string::npos);
        REQUIRE(chat.prompts());
        chat.type(kCtrlD);
        CHECK(chat.wait() == 0);
        CHECK(chat.restored());
    }

    TEST_CASE("repl: narrow terminals break between words") {
        TempDir home;
        Chat chat(home, {"--temp", "0"}, "", 20);
        REQUIRE(chat.prompts());
        chat.type("/nothink\r");
        REQUIRE(chat.prompts());
        chat.type("What is the capital of France?\r");
        CHECK(chat.sees("The capital of\r\nFrance is Paris."));
        REQUIRE(chat.prompts());
        chat.type("/help\r");
        CHECK(chat.sees("answer the\r\n      last question\r\n      again"));
    }

    TEST_CASE("repl: a window that is made narrower in an answer breaks no words") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "--ignore-eos", "--reasoning", "off"});
        REQUIRE(chat.prompts());
        chat.type("What is the capital of France?\r");
        REQUIRE(chat.sees("The capital of the United Kingdom is London."));  // what the demo goes on with
        chat.resize(20);
        CHECK(chat.sees("The capital of the\r\nUnited Kingdom is\r\nLondon."));
        chat.resize(60);
        CHECK(chat.sees("The capital of the United Kingdom is London."));
        chat.type(kCtrlC);
        REQUIRE(chat.sees("(stopped)"));
        REQUIRE(chat.prompts());
    }

    TEST_CASE("repl: /think says what it set, /save asks before it replaces") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "-n", "4"});
        REQUIRE(chat.prompts());
        chat.type("/think 10\r");
        CHECK(chat.sees("10 tokens at most"));
        REQUIRE(chat.prompts());
        chat.type("One?\r");
        REQUIRE(chat.prompts());
        chat.type("/save\r");
        REQUIRE(chat.sees("saved to"));
        REQUIRE(chat.prompts());
        chat.type("/save\r");  // the same conversation
        REQUIRE(chat.sees("saved to"));
        REQUIRE(chat.prompts());
        const std::string file = home / ".local/state/quern/chats/last.json", before = contents(file);
        REQUIRE(!before.empty());
        chat.type("/clear\r");
        REQUIRE(chat.prompts());
        for (const bool yes : {false, true}) {
            chat.type("/save\r");
            REQUIRE(chat.sees("Replace it?"));
            chat.type(yes ? "y\r" : "\r");
            REQUIRE(chat.sees(yes ? "saved to" : "nothing was saved"));
            REQUIRE(chat.prompts());
            CHECK((contents(file) == before) == !yes);
        }
    }

    TEST_CASE("repl: --tool-cmd asks, runs the program, and the model goes on with its result") {
        TempDir home;
        write_file(home / "tools.json", kTools, 0600);
        write_file(home / "weather",
                   "#!/bin/sh\ncat >" + home.str() + "/got\necho \"$1\" >>" + home.str() +
                       "/got\nwhile [ ! -e " + home.str() +
                       "/go ]; do sleep 0.02; done\necho '{\"temp_c\": 17, \"sky\": \"rainy\"}'\n",
                   0700);
        Chat chat(home, {"--temp", "0", "--tools", home / "tools.json", "--tool-cmd", home / "weather"});
        REQUIRE(chat.prompts());
        chat.type("What is the weather in Paris?\r");
        REQUIRE((chat.sees("get_weather") && chat.sees("Run it? [y, N, always]")));
        chat.type("n\r");
        CHECK(chat.sees("(not run"));
        REQUIRE(chat.prompts());
        CHECK(contents(home / "got").empty());
        chat.type("/clear\r");
        REQUIRE(chat.prompts());
        chat.type("What is the weather in Paris?\r");
        REQUIRE(chat.sees("Run it? [y, N, always]"));
        chat.type("y\r");
        CHECK(chat.echoes(false));
        for (int i = 0; i < 500 && contents(home / "got").empty(); ++i) usleep(20000);
        CHECK(chat.echoes(false));  // it runs
        chat.type("for later");
        write_file(home / "go", "", 0600);
        CHECK(chat.sees("In Paris it is 17"));
        CHECK(contents(home / "got") == "{\"city\": \"Paris\"}get_weather\n");
    }
}
