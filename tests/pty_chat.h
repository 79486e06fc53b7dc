// quern run on a pseudo-terminal, with the keys a person would press.
#pragma once

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
#include <string>
#include <vector>

#include "checkpoint_writer.h"
#include "ggml-like/json.h"

#include <doctest/doctest.h>

namespace quern::test::pty {

inline constexpr double kPatience =
    30;  // seconds until a wait fails; under sanitizers an answer takes a while
inline constexpr const char* kCtrlC = "\x03";
inline constexpr const char* kCtrlD = "\x04";
inline constexpr const char* kUp = "\033[A";
inline constexpr const char* kListening = "\033[?2004h";  // bracketed paste on: the prompt reads
inline constexpr const char* kNotListening = "\033[?2004l";

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), {});
}

inline std::string paste(const std::string& text) { return "\033[200~" + text + "\033[201~"; }

/// `quern run ARGS` as the leader of a session on a terminal, with HOME in a directory of its own.
class Chat {
  public:
    /// `stdout_file`: standard output goes there, the rest to the terminal.
    Chat(const TempDir& home, const std::vector<std::string>& args, const std::string& stdout_file = "",
         unsigned short columns = 80)
        : Chat(home, quern_run(args), stdout_file, columns, nullptr) {}

    /// A shell, for what needs job control.
    static Chat shell(const TempDir& home) { return Chat(home, {"/bin/sh", "-i"}, "", 80, nullptr); }

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
    void resize(unsigned short columns) const {
        const winsize size{24, columns, 0, 0};
        ioctl(terminal_, TIOCSWINSZ, &size);
    }

    /// Whether what is typed is shown, within some time.
    bool echoes(bool on) const {
        for (const double end = now() + kPatience; now() < end; usleep(5000))
            if (((settings().c_lflag & ECHO) != 0) == on) return true;
        return false;
    }

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
    Chat(const TempDir& home, std::vector<std::string> words, const std::string& stdout_file,
         unsigned short columns, std::nullptr_t) {
        winsize size{24, columns, 0, 0};
        REQUIRE(openpty(&fd_, &terminal_, nullptr, nullptr, &size) == 0);
        REQUIRE(tcgetattr(terminal_, &before_) == 0);
        fcntl(fd_, F_SETFL, O_NONBLOCK);
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
    static std::vector<std::string> quern_run(const std::vector<std::string>& args) {
        std::vector<std::string> words = {QUERN_BINARY, "run", "-t", "2"};
        words.insert(words.end(), args.begin(), args.end());
        return words;
    }

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

}  // namespace quern::test::pty
