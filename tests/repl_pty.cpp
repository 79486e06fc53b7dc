// The chat on a terminal: the real binary on a pseudo-terminal, with the keys a person would press.
#include "pty_chat.h"

using namespace quern::test;
using namespace quern::test::pty;

TEST_SUITE("cpu") {
    TEST_CASE("repl: a question, commands, history, and Ctrl-D") {
        TempDir home;
        Chat chat(home, {"--temp", "0"});
        REQUIRE(chat.sees("Ctrl-D leaves"));
        REQUIRE(chat.prompts());
        CHECK((chat.settings().c_lflag & ICANON) == 0);
        chat.type("What is 48 + 37?\r");
        REQUIRE(chat.sees("85"));
        REQUIRE(chat.sees("prompt tokens"));
        REQUIRE(chat.prompts());

        chat.type("/help\r");
        for (const char* command :
             {"/help", "/exit", "/clear", "/regen", "/set NAME VALUE", "/save", "Ctrl-C"})
            CHECK(chat.sees(command, 5));
        REQUIRE(chat.prompts());
        chat.type("/hlep\r");
        CHECK(chat.sees("no command /hlep"));
        CHECK(chat.sees("did you mean 'help'?"));
        REQUIRE(chat.prompts());

        chat.type(kCtrlD);
        CHECK(chat.wait() == 0);
        CHECK(chat.restored());
        CHECK(chat.paste_is_off());

        const std::string history = home / ".local/state/quern/history";
        struct stat info {};
        REQUIRE(stat(history.c_str(), &info) == 0);
        CHECK((info.st_mode & 0777) == 0600);
        REQUIRE(stat((home / ".local/state/quern").c_str(), &info) == 0);
        CHECK((info.st_mode & 0777) == 0700);

        Chat again(home, {"--temp", "0"});
        REQUIRE(again.prompts());
        again.type(std::string(kUp) + kUp + kUp);
        CHECK(again.sees("What is 48 + 37?"));
        again.type("\x15/exit\r");  // Ctrl-U
        CHECK(again.wait() == 0);
    }

    TEST_CASE("repl: Ctrl-C stops an answer, clears a line, and leaves when pressed twice") {
        TempDir home;
        Chat chat(home, {"--ignore-eos", "--temp", "0"});
        REQUIRE(chat.prompts());
        chat.type("What is the capital of France?\r");
        REQUIRE(chat.sees("Paris"));
        chat.type(kCtrlC);
        REQUIRE(chat.sees("(stopped)"));
        REQUIRE(chat.sees("cancelled"));  // in the line of numbers
        REQUIRE(chat.prompts());
        chat.type("/ctx\r");  // the conversation goes on
        REQUIRE(chat.sees("of 4096 tokens"));
        REQUIRE(chat.prompts());

        for (int round = 0; round < 2; ++round) {  // a line that was typed is only cleared
            chat.type("half a thought");
            REQUIRE(chat.sees("half a thought"));
            chat.type(kCtrlC);
            REQUIRE(chat.prompts());
        }
        CHECK(chat.screen().find("Ctrl-C again") == std::string::npos);
        chat.type(kCtrlC);
        REQUIRE(chat.sees("Ctrl-C again or Ctrl-D leaves"));
        REQUIRE(chat.prompts());
        chat.type("/stats off\r");
        REQUIRE(chat.prompts());
        chat.type(kCtrlC);
        REQUIRE(chat.prompts());
        chat.type(kCtrlC);
        CHECK(chat.wait() == 130);
        CHECK(chat.screen().find("^C") == std::string::npos);
        CHECK(chat.restored());
        CHECK(chat.paste_is_off());
    }

    TEST_CASE("repl: the terminal is restored after SIGTERM, at the prompt and in an answer") {
        for (const bool answering : {false, true}) {
            TempDir home;
            Chat chat(home, {"--ignore-eos", "--temp", "0"});
            REQUIRE(chat.prompts());
            if (answering) {
                chat.type("What is the capital of France?\r");
                REQUIRE(chat.sees("Paris"));
            }
            chat.send(SIGTERM);
            CHECK(chat.wait() == 143);
            CHECK(chat.restored());
            CHECK(chat.paste_is_off());
        }
    }

    TEST_CASE("repl: a paste of several lines is one message, sent by Enter") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "-n", "4", "--no-stats"});
        REQUIRE(chat.prompts());
        // Terminals send line breaks of a paste as CR; controls in it are not keys.
        const std::string pasted =
            "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC 1\r/exit\r\nthr\x7F\x02"
            "ee\tx\n\ny";
        chat.type(paste(pasted));
        REQUIRE(chat.sees("y"));
        CHECK_FALSE(chat.sees("cut off", 0.15));  // nothing is answered before Enter
        chat.type("\r");
        REQUIRE(chat.sees("cut off"));
        REQUIRE(chat.prompts());
        const std::string first = home / "first.json", second = home / "second.json";
        chat.type("/save " + first + "\r");
        REQUIRE(chat.sees("saved to"));
        REQUIRE(chat.prompts());

        // It comes back from the history as it was.
        chat.type("/clear\r");
        REQUIRE(chat.prompts());
        chat.type(std::string(kUp) + kUp + kUp + "\r");
        REQUIRE(chat.sees("cut off"));
        REQUIRE(chat.prompts());
        chat.type("/save " + second + "\r");
        REQUIRE(chat.sees("saved to"));
        REQUIRE(chat.prompts());
        chat.type(kCtrlD);
        CHECK(chat.wait() == 0);
        for (const std::string& path : {first, second}) {
            const auto messages = nlohmann::json::parse(contents(path))["messages"];
            REQUIRE(messages.size() == 2);
            CHECK(messages[0]["content"] == "gr\xC3\xBC\xC3\x9F \xE2\x82\xAC 1\n/exit\nthree x\n\ny");
        }
    }

    TEST_CASE("repl: a line of 20 KB") {
        TempDir home;
        Chat chat(home, {"--temp", "0", "-n", "4", "--no-stats"});
        REQUIRE(chat.prompts());
        std::string text;
        while (text.size() < 20000) text += "number " + std::to_string(text.size()) + ", ";
        chat.type(text);
        REQUIRE(chat.sees(text.substr(text.size() - 4)));
        chat.type("\r");
        REQUIRE(chat.sees("4096"));  // said, and the chat goes on
        REQUIRE(chat.prompts());
        chat.type(paste(text) + "\r");
        REQUIRE(chat.sees("4096"));
        REQUIRE(chat.prompts());
        chat.type("What is the capital of France?\r");
        REQUIRE(chat.sees("cut off"));
        REQUIRE(chat.prompts());
        chat.type(kCtrlD);
        CHECK(chat.wait() == 0);
    }

    TEST_CASE("repl: with stdout in a file, the file holds only answers") {
        TempDir home;
        const std::string out = home / "out";
        Chat chat(home, {"--temp", "0", "--show-thinking", "never"}, out);
        REQUIRE(chat.prompts());
        chat.type("What is the capital of France?\r");
        REQUIRE(chat.sees("prompt tokens"));
        REQUIRE(chat.prompts());
        chat.type("/help\r");
        REQUIRE(chat.prompts());
        chat.type(kCtrlD);
        CHECK(chat.wait() == 0);
        CHECK(chat.restored());
        CHECK(contents(out) == "The capital of France is Paris.\n");
    }
}
