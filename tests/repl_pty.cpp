// The chat on a terminal: the real binary on a pseudo-terminal, with the keys a person would press.
#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint_writer.h"

#include <doctest/doctest.h>

using namespace quern::test;

namespace {

constexpr double kPatience = 30;  // seconds until a wait fails; under sanitizers an answer takes a while
constexpr const char* kCtrlC = "\x03";
constexpr const char* kCtrlD = "\x04";
constexpr const char* kUp = "\033[A";
constexpr const char* kListening = "\033[?2004h";  // bracketed paste on: the prompt reads
constexpr const char* kNotListening = "\033[?2004l";

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {});
}

std::string paste(const std::string& text) { return "\033[200~" + text + "\033[201~"; }

/// `quern run ARGS` as the leader of a session on a terminal of 24 x 80, with HOME in a directory of its own.
class Chat {
  public:
    /// `stdout_file`: standard output goes there, the rest to the terminal.
    Chat(const TempDir& home, const std::vector<std::string>& args, const std::string& stdout_file = "") {
        winsize size{24, 80, 0, 0};
        REQUIRE(openpty(&fd_, &terminal_, nullptr, nullptr, &size) == 0);
        REQUIRE(tcgetattr(terminal_, &before_) == 0);
        fcntl(fd_, F_SETFL, O_NONBLOCK);
        std::vector<std::string> words = {QUERN_BINARY, "run", "-t", "2"};
        words.insert(words.end(), args.begin(), args.end());
        std::vector<std::string> variables = {"HOME=" + home.str(), "TERM=xterm", "LC_ALL=C.UTF-8"};
        for (const char* name : {"ASAN_OPTIONS", "UBSAN_OPTIONS", "LSAN_OPTIONS"})
            if (const char* value = std::getenv(name)) variables.push_back(std::string(name) + "=" + value);
        const auto pointers = [](std::vector<std::string>& texts) {
            std::vector<char*> out;
            for (std::string& text : texts) out.push_back(text.data());
            out.push_back(nullptr);
            return out;
        };
        const auto argv = pointers(words), envp = pointers(variables);
        const int out = stdout_file.empty() ? terminal_ : open(stdout_file.c_str(), O_WRONLY | O_CREAT, 0600);
        REQUIRE(out >= 0);
        pid_ = fork();
        REQUIRE(pid_ >= 0);
        if (pid_ == 0) {
            setsid();
            ioctl(terminal_, TIOCSCTTY, 0);
            dup2(terminal_, 0);
            dup2(out, 1);
            dup2(terminal_, 2);
            for (int fd = 3; fd < 64; ++fd) close(fd);
            execve(argv[0], argv.data(), envp.data());
            _exit(126);
        }
        if (out != terminal_) close(out);
    }
    ~Chat() {
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            waitpid(pid_, nullptr, 0);
        }
        close(fd_);
        close(terminal_);
    }
    Chat(const Chat&) = delete;
    Chat& operator=(const Chat&) = delete;

    /// Types all of it, reading what comes back meanwhile: the terminal holds only a few KB each way.
    void type(const std::string& keys) {
        const double end = now() + kPatience;
        for (size_t sent = 0; sent < keys.size() && now() < end;) {
            pollfd ready{fd_, POLLIN | POLLOUT, 0};
            poll(&ready, 1, 100);
            take();
            if ((ready.revents & POLLOUT) == 0) continue;
            const ssize_t n = write(fd_, keys.data() + sent, keys.size() - sent);
            if (n > 0) sent += static_cast<size_t>(n);
        }
    }

    /// Waits for `text` after what earlier waits found.
    bool sees(const std::string& text, double seconds = kPatience) {
        const double end = now() + seconds;
        while (true) {
            if (const size_t at = screen_.find(text, mark_); at != std::string::npos) {
                mark_ = at + text.size();
                return true;
            }
            const double left = end - now();
            if (left <= 0) return false;
            pollfd ready{fd_, POLLIN, 0};
            poll(&ready, 1, static_cast<int>(left * 1000) + 1);
            take();
        }
    }

    /// The prompt is shown and reads keys.
    bool prompts() { return sees("> ") && sees(kListening); }

    /// What came since the last successful wait.
    std::string rest() const { return screen_.substr(mark_); }
    const std::string& screen() const { return screen_; }

    /// Its exit code, or 128 + signal; -1 if it does not end.
    int wait() {
        int status = 0;
        for (const double end = now() + kPatience; now() < end;) {
            pollfd ready{fd_, POLLIN, 0};
            poll(&ready, 1, 5);
            take();
            if (waitpid(pid_, &status, WNOHANG) != pid_) continue;
            pid_ = -1;
            take();
            return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        }
        return -1;
    }

    void send(int signal) const { kill(pid_, signal); }

    termios settings() const {
        termios now{};
        tcgetattr(terminal_, &now);
        return now;
    }
    bool restored() const {
        const termios after = settings();
        return after.c_iflag == before_.c_iflag && after.c_oflag == before_.c_oflag &&
               after.c_cflag == before_.c_cflag && after.c_lflag == before_.c_lflag &&
               std::memcmp(after.c_cc, before_.c_cc, sizeof after.c_cc) == 0;
    }
    /// Bracketed paste was switched off after it was last switched on.
    bool paste_is_off() const {
        const size_t off = screen_.rfind(kNotListening), on = screen_.rfind(kListening);
        return on == std::string::npos || (off != std::string::npos && off > on);
    }

  private:
    void take() {
        char bytes[4096];
        for (ssize_t n; (n = read(fd_, bytes, sizeof bytes)) > 0;)
            screen_.append(bytes, static_cast<size_t>(n));
    }

    int fd_ = -1, terminal_ = -1;
    pid_t pid_ = -1;
    termios before_{};
    std::string screen_;
    size_t mark_ = 0;
};

}  // namespace

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
        REQUIRE(chat.sees("the maximum context length is 4096 tokens"));  // said, and the chat goes on
        REQUIRE(chat.prompts());
        chat.type(paste(text) + "\r");
        REQUIRE(chat.sees("the maximum context length is 4096 tokens"));
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
