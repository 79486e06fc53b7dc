// ConnectionStream: a connection as cpp-httplib reads and writes it. Lives as long as the connection, so that requests
// sent in advance are not lost.
#pragma once

#include <poll.h>

#include <algorithm>
#include <functional>

#include "tools/common/httplib.h"

namespace quern {

/// The client has gone: it answered with a reset, or both sides have closed.
inline bool is_reset(socket_t socket) {
    pollfd state{.fd = socket, .events = 0, .revents = 0};
    return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0;
}

/// The client sends no more. Whether it still reads is another question.
inline bool is_half_closed(socket_t socket) {
    pollfd state{.fd = socket, .events = POLLRDHUP, .revents = 0};
    return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLERR | POLLHUP)) != 0;
}

class ConnectionStream final : public httplib::Stream {
  public:
    struct Timeouts {
        time_t read = 0, write = 0;  // seconds without any byte
    };
    /// `more_body`: called with the bytes of a body so far, each time that some came.
    ConnectionStream(socket_t socket, Timeouts timeouts, std::function<void(size_t)> more_body)
        : socket_(socket, timeouts.read, 0, timeouts.write, 0), more_body_(std::move(more_body)) {}

    void begin_head() {
        head_ = {};
        body_bytes_ = 0;
    }
    void begin_body() { head_.ended = true; }
    /// Whether the head being read is longer, or has more or longer lines, than is taken.
    bool head_is_too_large(size_t max_bytes) const {
        return !head_.ended && (head_.bytes > max_bytes || head_.longest > CPPHTTPLIB_HEADER_MAX_LENGTH ||
                                head_.lines > CPPHTTPLIB_HEADER_MAX_COUNT);
    }

    ssize_t read(char* to, size_t size) override {
        const ssize_t n = socket_.read(to, size);
        if (n > 0) count(std::string_view(to, static_cast<size_t>(n)));
        return n;
    }
    ssize_t write(const char* from, size_t size) override { return socket_.write(from, size); }
    bool is_readable() const override { return socket_.is_readable(); }
    bool wait_readable() const override { return socket_.wait_readable(); }
    bool wait_writable() const override { return socket_.wait_writable(); }
    bool is_peer_alive() const override { return !is_reset(socket_.socket()); }
    void get_remote_ip_and_port(std::string& ip, int& port) const override {
        socket_.get_remote_ip_and_port(ip, port);
    }
    void get_local_ip_and_port(std::string& ip, int& port) const override {
        socket_.get_local_ip_and_port(ip, port);
    }
    socket_t socket() const override { return socket_.socket(); }
    time_t duration() const override { return socket_.duration(); }
    void set_read_timeout(time_t sec, time_t usec) override { socket_.set_read_timeout(sec, usec); }

  private:
    struct Head {
        size_t bytes = 0, lines = 0, line = 0, longest = 0;
        bool ended = false;
    };
    void count(std::string_view bytes) {
        if (head_.ended) return more_body_(body_bytes_ += bytes.size());
        head_.bytes += bytes.size();
        for (const char c : bytes) {
            head_.longest = std::max(head_.longest, ++head_.line);
            if (c != '\n') continue;
            ++head_.lines;
            head_.line = 0;
        }
    }

    httplib::detail::SocketStream socket_;
    std::function<void(size_t)> more_body_;
    Head head_;
    size_t body_bytes_ = 0;
};

}  // namespace quern
