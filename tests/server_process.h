// `quern serve` as a child process on a port of its own.
#pragma once

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tools/common/httplib.h"

namespace quern {

class ServerProcess {
  public:
    explicit ServerProcess(std::vector<std::string> flags = {}) {
        int fds[2];
        REQUIRE(pipe(fds) == 0);
        std::vector<std::string> args = {QUERN_BINARY, "serve", "--port", "0", "-t", "2"};
        args.insert(args.end(), flags.begin(), flags.end());
        std::vector<char*> argv;
        for (std::string& a : args) argv.push_back(a.data());
        argv.push_back(nullptr);
        pid_ = fork();
        if (pid_ == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that crashes leaves nothing behind
            dup2(fds[1], STDERR_FILENO);
            dup2(open("/dev/null", O_RDWR), STDOUT_FILENO);
            execv(argv[0], argv.data());
            _exit(127);
        }
        close(fds[1]);
        log_ = fdopen(fds[0], "r");
        char line[512];
        while (port_ == 0 && std::fgets(line, sizeof line, log_) != nullptr) {
            const std::string text = line;
            const size_t at = text.find(" port ");
            if (at != std::string::npos) port_ = std::atoi(text.c_str() + at + 6);
        }
        drain_ = std::thread([this] {
            char rest[512];
            while (std::fgets(rest, sizeof rest, log_) != nullptr) {
            }
        });
        REQUIRE(port_ > 0);
        wait_ready();
    }
    ~ServerProcess() {
        if (pid_ > 0) {
            kill(pid_, SIGKILL);
            wait();
        }
        drain_.join();
        std::fclose(log_);
    }

    httplib::Client client() const {
        httplib::Client c("127.0.0.1", port_);
        c.set_read_timeout(600);
        return c;
    }
    int port() const { return port_; }
    void signal(int number) { kill(pid_, number); }
    /// The exit code; 128 + number for a signal.
    int wait() {
        int status = 0;
        waitpid(pid_, &status, 0);
        pid_ = -1;
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    /// The value of a metric.
    double metric(const std::string& name) const {
        auto c = client();
        const auto r = c.Get("/metrics", {{"Authorization", "Bearer secret"}});
        REQUIRE(r);
        const size_t at = r->body.find("\n" + name + " ");
        REQUIRE(at != std::string::npos);
        return std::atof(r->body.c_str() + at + name.size() + 2);
    }
    /// Waits until the metric has that value, a minute at most.
    bool reaches(const std::string& name, double value) const {
        for (int i = 0; i < 600; ++i) {
            if (metric(name) == value) return true;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        return false;
    }

  private:
    void wait_ready() {
        auto c = client();
        for (int i = 0; i < 600; ++i) {
            const auto r = c.Get("/health");
            if (r && r->status == 200) return;
            if (r) CHECK(r->status == 503);
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        FAIL("the server did not become ready");
    }

    pid_t pid_ = -1;
    int port_ = 0;
    std::FILE* log_ = nullptr;
    std::thread drain_;
};

}  // namespace quern
