// HttpServer: cpp-httplib behind our own types, with the limits that a public server needs.
//
// One thread for each connection, up to a limit. Every phase of a connection has a deadline (waiting for a request, its
// head, its body), so a client that sends a byte now and then holds nothing for long. Bodies come with a length or in
// chunks, as they are or compressed (gzip, deflate); the limit holds for what is sent and for what it becomes. Requests
// may be sent in advance. A client that only closed its own side of the connection gets its reply. An address that has
// all the connections it may have is admitted for a moment more: `crowded` requests, which the gate should refuse
// unless they are about the server's health.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace quern {

struct HttpRequest {
    std::string method, path, body, remote;
    std::string id;  // set by the handler
    int64_t content_length = 0;
    bool crowded = false;                                 // its address has too many connections
    std::function<std::string(const char* name)> header;  // its value; empty if absent
    std::function<size_t(const char* name)> header_count;
    std::function<bool()> closed;  // the client sends no more: it has gone, or waits for its answer
    std::function<bool()> reset;   // the client has gone; known only after a write to it
    /// Writes an interim reply, after which `reset` tells. False: this client understands none.
    std::function<bool()> nudge;
};

/// Writes to a streamed body. False: the client has gone.
using HttpWriter = std::function<bool(std::string_view)>;

struct HttpReply {
    int status = 200;
    std::string body;
    std::string type = "application/json";
    std::vector<std::pair<std::string, std::string>> headers;
    /// If set, the body is what this writes. False ends the connection without a proper end of the body.
    std::function<bool(const HttpWriter&)> stream;
};

struct HttpLimits {
    int64_t body_bytes = 32 << 20;
    size_t connections = 1200;
    size_t peer_connections = 400;  // of one address; 0: no limit
    int idle_seconds = 30;          // between two requests of a connection
    int head_seconds = 10;          // for request line and headers
    int body_seconds = 30;          // and one more for each KiB that came
};

class HttpServer {
  public:
    /// `gate` sees a request before its body is read and may answer it; `handle` answers the others. `fail` makes the
    /// reply to an invalid HTTP request, of which little may be known. All are called on many threads.
    struct Callbacks {
        std::function<std::optional<HttpReply>(const HttpRequest&)> gate;
        std::function<HttpReply(HttpRequest)> handle;
        std::function<HttpReply(int status, const HttpRequest&)> fail;
    };
    HttpServer(const HttpLimits& limits, Callbacks callbacks);
    /// Stops.
    ~HttpServer();
    HttpServer(const HttpServer&) = delete;
    HttpServer& operator=(const HttpServer&) = delete;

    /// Returns the port. `port` 0: one that is free. Throws Error(bind).
    int bind(const std::string& host, int port);
    /// Serves on threads of its own.
    void start();
    /// Accepts nothing more, gives running replies `patience` seconds to end, closes all connections and waits for their
    /// threads; handlers that stream must return soon.
    void stop(double patience);

  private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace quern
