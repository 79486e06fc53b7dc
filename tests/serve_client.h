// Requests to a server under test: through an HTTP client and through bare sockets.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "ggml-like/json.h"
#include "server_process.h"

namespace quern::test {

using json = nlohmann::ordered_json;

/// A tool that needs no arguments.
inline const json kTime =
    json::parse(R"({"type":"function","function":{"name":"get_time","parameters":{"type":"object",
    "properties":{"zone":{"type":"string"}}}}})");

inline json question(const std::string& text) {
    return {{"messages", {{{"role", "user"}, {"content", text}}}}, {"temperature", 0}};
}

struct Reply {
    int status;
    json body;
};

inline Reply post(const ServerProcess& server, const std::string& path, const json& body) {
    auto c = server.client();
    const auto r = c.Post(path, body.is_string() ? body.get<std::string>() : body.dump(), "application/json");
    REQUIRE(r);
    return {r->status, json::parse(r->body, nullptr, false)};
}

inline Reply chat(const ServerProcess& server, const json& body) {
    return post(server, "/v1/chat/completions", body);
}

/// The data of all events of a stream; checks its frames.
inline std::vector<std::string> stream(const ServerProcess& server, json body,
                                       const std::string& path = "/v1/chat/completions") {
    body["stream"] = true;
    auto c = server.client();
    const auto r = c.Post(path, body.dump(), "application/json");
    REQUIRE(r);
    CHECK(r->status == 200);
    CHECK(r->get_header_value("Content-Type") == "text/event-stream");
    CHECK(r->get_header_value("Cache-Control") == "no-cache");
    std::vector<std::string> events;
    for (size_t at = 0; at < r->body.size();) {
        const size_t end = r->body.find("\n\n", at);
        REQUIRE(end != std::string::npos);
        const std::string frame = r->body.substr(at, end - at);
        if (const size_t data = frame.find("data: "); data != std::string::npos)
            events.push_back(frame.substr(data + 6));
        at = end + 2;
    }
    return events;
}

/// A connection that can be left at any time.
class Raw {
  public:
    explicit Raw(int port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<uint16_t>(port));
        inet_pton(AF_INET, "127.0.0.1", &address.sin_addr);
        REQUIRE(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
        const timeval patience{.tv_sec = 20, .tv_usec = 0};
        setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    }
    ~Raw() { ::close(fd_); }
    void send(const std::string& text) {
        for (size_t at = 0; at < text.size();) {
            const ssize_t n = ::send(fd_, text.data() + at, text.size() - at, MSG_NOSIGNAL);
            if (n <= 0) return;  // refused before all was read
            at += static_cast<size_t>(n);
        }
    }
    void end_sending() { ::shutdown(fd_, SHUT_WR); }
    std::string receive(size_t at_most = 4096) {
        std::string out(at_most, '\0');
        const ssize_t n = ::recv(fd_, out.data(), out.size(), 0);
        out.resize(n > 0 ? static_cast<size_t>(n) : 0);
        return out;
    }

  private:
    int fd_;
};

inline std::string http(const std::string& path, const std::string& body, const std::string& headers = "") {
    return "POST " + path +
           " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\n" + headers + "\r\n" + body;
}

}  // namespace quern::test
