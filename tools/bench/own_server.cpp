#include "tools/bench/own_server.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"

namespace quern {

OwnServer::OwnServer(const std::vector<std::string>& flags) {
    std::vector<std::string> words = {"quern", "serve", "--port", "0", "--log-format", "none"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) FAIL(runtime, "no pipe to a server could be made");
    pid_ = ::fork();
    if (pid_ == 0) {
        ::dup2(ends[1], 2);
        ::execv("/proc/self/exe", argv.data());
        ::_exit(127);
    }
    ::close(ends[1]);
    said_ = ends[0];
    if (pid_ < 0) FAIL(runtime, "no server could be started");
    std::string text;
    char buffer[4096];
    for (ssize_t n; url_.empty() && (n = ::read(said_, buffer, sizeof buffer)) > 0;) {
        text.append(buffer, static_cast<size_t>(n));
        const size_t at = text.find(" at http://"), end = text.find('\n', at);
        if (at != std::string::npos && end != std::string::npos) url_ = text.substr(at + 4, end - at - 4);
    }
    if (url_.empty()) {
        stop();
        FAIL(runtime, "the server to measure did not start: {}", printable(text, 1000));
    }
}

OwnServer::~OwnServer() { stop(); }

void OwnServer::stop() {
    if (pid_ > 0) {
        ::kill(pid_, SIGTERM);
        ::close(said_);  // before it ends, so that it never waits for a reader
        int status = 0;
        ::waitpid(pid_, &status, 0);
    }
    pid_ = -1;
}

}  // namespace quern
