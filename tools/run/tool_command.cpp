#include "tools/run/tool_command.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"

namespace quern {
namespace {

constexpr size_t kLongestResult = 1 << 20;
constexpr int kPollMs = 100;

bool can_run(const std::string& program) {
    if (program.find('/') != std::string::npos) return ::access(program.c_str(), X_OK) == 0;
    const char* path = std::getenv("PATH");
    std::istringstream folders(path == nullptr ? "" : path);
    for (std::string folder; std::getline(folders, folder, ':');)
        if (::access((folder + "/" + program).c_str(), X_OK) == 0) return true;
    return false;
}

/// A child with a pipe to its standard input and one from its standard output.
class Child {
  public:
    Child(const std::string& program, const std::string& name) {
        int in[2], out[2];
        if (::pipe2(in, O_CLOEXEC) != 0 || ::pipe2(out, O_CLOEXEC) != 0)
            FAIL(runtime, "cannot make a pipe for {}: too many open files?", program);
        pid_ = ::fork();
        if (pid_ == 0) {
            ::dup2(in[0], STDIN_FILENO);
            ::dup2(out[1], STDOUT_FILENO);
            for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) ::signal(signal, SIG_DFL);
            ::execlp(program.c_str(), program.c_str(), name.c_str(), nullptr);
            ::_exit(127);
        }
        ::close(in[0]);
        ::close(out[1]);
        to_ = in[1];
        from_ = out[0];
        ::fcntl(to_, F_SETFL, O_NONBLOCK);
        if (pid_ < 0) FAIL(runtime, "cannot start {}", program);
    }
    ~Child() {
        close_input();
        ::close(from_);
        if (pid_ > 0) {
            ::kill(pid_, SIGTERM);
            wait();
        }
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;

    /// Gives it `input` and takes what it writes until it closes its output, `go_on` says no, or that is too long.
    std::string talk(std::string_view input, const std::function<bool()>& go_on) {
        std::string output;
        while (go_on() && output.size() <= kLongestResult) {
            if (input.empty()) close_input();
            pollfd ready[2] = {{from_, POLLIN, 0}, {to_, POLLOUT, 0}};
            if (::poll(ready, to_ < 0 ? 1 : 2, kPollMs) < 0 && errno != EINTR) break;
            if (to_ >= 0 && ready[1].revents != 0) {
                const ssize_t n = ::write(to_, input.data(), input.size());
                if (n > 0) input.remove_prefix(static_cast<size_t>(n));
                if (n < 0 && errno != EAGAIN && errno != EINTR) input = {};  // it reads no more
            }
            if (ready[0].revents == 0) continue;
            char bytes[4096];
            const ssize_t n = ::read(from_, bytes, sizeof bytes);
            if (n == 0 || (n < 0 && errno != EINTR)) break;
            if (n > 0) output.append(bytes, static_cast<size_t>(n));
        }
        return output;
    }

    /// Its exit code, or 128 + signal.
    int wait() {
        int status = 0;
        while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
        }
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }

  private:
    void close_input() {
        if (to_ >= 0) ::close(to_);
        to_ = -1;
    }

    pid_t pid_ = -1;
    int to_ = -1, from_ = -1;
};

}  // namespace

ToolCommand::ToolCommand(const std::string& program, Signals& signals,
                         std::function<bool(const std::string& what)> agree)
    : program_(program), signals_(signals), agree_(std::move(agree)) {
    if (!can_run(program))
        FAIL(usage, "--tool-cmd: '{}' is no program that can be run; give its path, or a name in PATH",
             printable(program));
}

std::vector<Message> ToolCommand::answer(const std::vector<ToolCall>& calls, bool& declined) const {
    std::vector<Message> out;
    for (const ToolCall& call : calls) {
        const bool yes = agree_(fmt::format("{} {} gets {}", program_, printable(call.name, 100),
                                            printable(call.arguments, 1000)));
        declined |= !yes;
        out.push_back({.role = "tool",
                       .content = yes ? run(call) : "error: the user does not want this call",
                       .tool_call_id = call.id});
    }
    return out;
}

std::string ToolCommand::run(const ToolCall& call) const {
    const QuietTerminal quiet(signals_);
    Child child(program_, call.name);
    const auto go_on = [this] { return !signals_.interrupted() && signals_.terminated() == 0; };
    std::string output = child.talk(call.arguments, go_on);
    if (!go_on()) return "error: the user has stopped this call";
    if (output.size() > kLongestResult) return "error: the result is longer than 1 MiB";
    while (output.ends_with('\n')) output.pop_back();
    if (!is_utf8(output)) return "error: the result is not UTF-8 text";
    const int code = child.wait();
    if (code == 0) return output;
    return fmt::format("error: exit code {}{}{}", code, output.empty() ? "" : "\n", output);
}

}  // namespace quern
