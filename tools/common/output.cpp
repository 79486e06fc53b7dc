#include "tools/common/output.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "ggml-like/check.h"

namespace quern {
namespace {

/// Bytes written, or -1 with errno: EPIPE means the reader has gone.
ssize_t write_some(int fd, std::string_view text) {
    while (true) {
        const ssize_t n = ::write(fd, text.data(), text.size());
        if (n >= 0) return n;
        if (errno == EAGAIN || errno == EWOULDBLOCK) {
            pollfd waiting{fd, POLLOUT, 0};
            ::poll(&waiting, 1, 1000);
        } else if (errno != EINTR) {
            return -1;
        }
    }
}

}  // namespace

bool Output::write(std::string_view text) {
    if (closed_) return false;
    if (!text.empty()) last_ = text.back();
    while (!text.empty()) {
        const ssize_t n = write_some(fd_, text);
        if (n < 0 && errno == EPIPE) {
            closed_ = true;
            return false;
        }
        if (n < 0) {
            const char* name = fd_ == STDOUT_FILENO ? "standard output" : "standard error";
            FAIL(runtime, "cannot write to {}: {}", name, std::strerror(errno));
        }
        text.remove_prefix(static_cast<size_t>(n));
    }
    return true;
}

bool Output::is_terminal() const { return ::isatty(fd_) == 1; }

void print(std::string_view text) { Output(STDOUT_FILENO).write(text); }

void note(std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = write_some(STDERR_FILENO, text);
        if (n <= 0) return;
        text.remove_prefix(static_cast<size_t>(n));
    }
}

void open_standard_descriptors() {
    // open() returns the lowest free descriptor, so going upwards fills exactly the closed ones.
    const int modes[] = {O_RDONLY, O_RDONLY, O_WRONLY};
    for (int fd = 0; fd < 3; ++fd) {
        if (::fcntl(fd, F_GETFD) >= 0) continue;
        if (::open("/dev/null", modes[fd]) < 0) return;
    }
}

}  // namespace quern
