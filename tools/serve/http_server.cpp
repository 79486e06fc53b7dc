#include "tools/serve/http_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "tools/common/httplib.h"
// The library's definitions, once in the program; its loop over a connection's requests, which the one below is like, stands
// on functions and a class that are declared nowhere else.
#include <httplib.cc>

#include "ggml-like/check.h"
#include "tools/serve/connection_stream.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSendBuffer = 128 << 10;
constexpr size_t kMaxHeaderBytes = 32 << 10;
constexpr size_t kCrowded = 32;  // connections of one address beyond those that it may have
constexpr int kCrowdedSeconds = 3;

/// A connection and until when its client must have done its part.
struct Connection {
    socket_t socket;
    std::string peer;
    bool crowded = false;                       // more than its address may have
    std::optional<Clock::time_point> deadline;  // none: it is our turn
    bool last = false;                          // the client was told that this was the last reply
    ConnectionStream* stream = nullptr;
};

/// Shuts connections down whose deadline passed.
class Watchdog {
  public:
    Watchdog() : thread_([this] { run(); }) {}
    ~Watchdog() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        thread_.join();
    }

    /// Of one address at most `most`, and then a few crowded ones, of which the oldest goes if there is one more.
    std::list<Connection>::iterator add(socket_t socket, const std::string& peer, size_t most) {
        const std::lock_guard lock(mutex_);
        size_t ordinary = 0, crowded = 0;
        Connection* oldest = nullptr;
        for (Connection& c : connections_) {
            if (c.peer != peer) continue;
            ++(c.crowded ? crowded : ordinary);
            if (c.crowded && oldest == nullptr) oldest = &c;
        }
        const bool full = most > 0 && ordinary >= most;
        if (full && crowded >= kCrowded) ::shutdown(oldest->socket, SHUT_RDWR);
        return connections_.insert(connections_.end(),
                                   {.socket = socket, .peer = peer, .crowded = full, .deadline = {}});
    }
    /// Before the socket is closed: its number may be another connection's afterwards.
    void remove(std::list<Connection>::iterator connection) {
        const std::lock_guard lock(mutex_);
        connections_.erase(connection);
    }
    void expect_within(Connection& connection, int64_t seconds) {
        const std::lock_guard lock(mutex_);
        connection.deadline = Clock::now() + std::chrono::seconds(seconds);
    }
    void give_more(Connection& connection, int64_t seconds) {
        const std::lock_guard lock(mutex_);
        if (connection.deadline) *connection.deadline += std::chrono::seconds(seconds);
    }
    void expect_nothing(Connection& connection) {
        const std::lock_guard lock(mutex_);
        connection.deadline.reset();
    }
    void shut_all() {
        const std::lock_guard lock(mutex_);
        for (const Connection& c : connections_) ::shutdown(c.socket, SHUT_RDWR);
    }
    /// Closes connections that wait for their clients. True: there are no others.
    bool shut_waiting() {
        const std::lock_guard lock(mutex_);
        bool all = true;
        for (const Connection& c : connections_) {
            if (c.deadline) ::shutdown(c.socket, SHUT_RDWR);
            all = all && c.deadline;
        }
        return all;
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        while (!wake_.wait_for(lock, std::chrono::milliseconds(500), [&] { return stopping_; })) {
            const auto now = Clock::now();
            for (Connection& c : connections_)
                if (c.deadline && *c.deadline < now) ::shutdown(c.socket, SHUT_RDWR);
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    bool stopping_ = false;
    std::list<Connection> connections_;
    std::thread thread_;
};

/// A thread for each connection, up to a number; what comes beyond is turned away at once. cpp-httplib's own
/// pool may leave a connection waiting behind others although it could have a thread.
class Workers final : public httplib::TaskQueue {
  public:
    explicit Workers(size_t most) : most_(most) {}
    ~Workers() override { shutdown(); }

    bool enqueue(std::function<void()> job) override {
        const std::lock_guard lock(mutex_);
        if (stopping_) return false;
        if (jobs_.size() >= idle_) {
            if (threads_.size() >= most_) return false;
            threads_.emplace_back();
            threads_.back() = std::thread([this, self = std::prev(threads_.end())] { run(self); });
        }
        jobs_.push_back(std::move(job));
        work_.notify_one();
        join_finished();
        return true;
    }

    void shutdown() override {
        std::unique_lock lock(mutex_);
        stopping_ = true;
        work_.notify_all();
        finished_one_.wait(lock, [&] { return threads_.empty(); });
        join_finished();
    }

  private:
    void run(std::list<std::thread>::iterator self) {
        std::unique_lock lock(mutex_);
        while (true) {
            ++idle_;
            const bool any =
                work_.wait_for(lock, std::chrono::seconds(5), [&] { return stopping_ || !jobs_.empty(); });
            --idle_;
            if (!any || jobs_.empty()) break;
            const auto job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            job();
            lock.lock();
        }
        finished_.splice(finished_.end(), threads_, self);
        finished_one_.notify_all();
    }
    void join_finished() {  // they hold nothing any more but their last instructions
        for (std::thread& t : finished_)
            if (t.get_id() != std::this_thread::get_id()) t.join();
        finished_.clear();
    }

    size_t most_, idle_ = 0;
    bool stopping_ = false;
    std::mutex mutex_;
    std::condition_variable work_, finished_one_;
    std::list<std::function<void()>> jobs_;
    std::list<std::thread> threads_, finished_;
};

/// The connection that this thread serves.
thread_local Connection* current = nullptr;

size_t header_bytes(const httplib::Request& r) {
    size_t sum = 0;
    for (const auto& [name, value] : r.headers) sum += name.size() + value.size() + 4;
    return sum;
}

/// Every client skips 100 Continue, asked for or not; an older one than HTTP/1.1 knows no interim replies.
bool nudge(socket_t socket) {
    static constexpr std::string_view kInterim = "HTTP/1.1 100 Continue\r\n\r\n";
    ::send(socket, kInterim.data(), kInterim.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return true;
}

HttpRequest as_request(const httplib::Request& r) {
    const socket_t socket = current != nullptr ? current->socket : INVALID_SOCKET;
    return {.method = r.method,
            .path = r.path,
            .body = r.body,
            .remote = r.remote_addr,
            .id = {},
            .content_length = static_cast<int64_t>(r.get_header_value_u64("Content-Length")),
            .crowded = current != nullptr && current->crowded,
            .header = [&r](const char* name) { return r.get_header_value(name); },
            .header_count = [&r](const char* name) { return r.get_header_value_count(name); },
            .closed = [socket] { return is_half_closed(socket); },
            .reset = [socket] { return is_reset(socket); },
            .nudge = [socket, old = r.version == "HTTP/1.0"] { return !old && nudge(socket); }};
}

/// What cpp-httplib should read in another way than it would.
void prepare(httplib::Request& r) {
    r.headers.erase("Accept-Encoding");  // replies are not compressed
    if (r.method == "DELETE" && !r.has_header("Content-Length") && !r.has_header("Transfer-Encoding"))
        r.headers.emplace("Content-Length", "0");  // it would wait for a body
    if (!r.has_header("Content-Encoding")) return;
    std::string coding = r.get_header_value("Content-Encoding");
    std::transform(coding.begin(), coding.end(), coding.begin(),
                   [](unsigned char c) { return std::tolower(c); });
    r.headers.erase("Content-Encoding");
    if (coding != "identity") r.headers.emplace("Content-Encoding", coding == "x-gzip" ? "gzip" : coding);
}

}  // namespace

class HttpServer::Impl : public httplib::Server {
  public:
    Impl(const HttpLimits& limits, Callbacks callbacks) : limits_(limits), callbacks_(std::move(callbacks)) {
        new_task_queue = [this] { return new Workers(limits_.connections); };
        set_socket_options([](socket_t s) {
            httplib::set_socket_opt(s, SOL_SOCKET, SO_REUSEADDR, 1);
            // Of each connection: a client that does not read holds no more of the system's memory.
            httplib::set_socket_opt(s, SOL_SOCKET, SO_SNDBUF, kSendBuffer);
        });
        set_payload_max_length(static_cast<size_t>(limits_.body_bytes));
        set_read_timeout(limits_.head_seconds);
        set_write_timeout(20);
        set_keep_alive_timeout(limits_.idle_seconds);
        set_keep_alive_max_count(1000);
        set_pre_routing_handler(
            [this](const httplib::Request& r, httplib::Response& out) { return gate(r, out); });
        set_expect_100_continue_handler([this](const httplib::Request& r, httplib::Response& out) {
            return gate(r, out) == HandlerResponse::Handled ? out.status : 100;
        });
        const auto handler = [this](const httplib::Request& r, httplib::Response& out) { answer(r, out); };
        Get(".*", handler);
        Post(".*", handler);
        Delete(".*", handler);
        set_error_handler([this](const httplib::Request& r, httplib::Response& out) {
            if (out.body.empty()) put(callbacks_.fail(status_of(out), as_request(r)), out);
            return HandlerResponse::Handled;
        });
        set_exception_handler([this](const httplib::Request& r, httplib::Response& out, std::exception_ptr) {
            put(callbacks_.fail(500, as_request(r)), out);
        });
        set_logger([this](const httplib::Request&, const httplib::Response& out) {
            if (current == nullptr) return;
            current->last = out.get_header_value("Connection") == "close";
            if (!out.content_provider_) next_request(*current);
        });
    }

    ~Impl() override { stop_and_join(0); }

    void serve() {
        thread_ = std::thread([this] { listen_after_bind(); });
        wait_until_ready();
    }

    void stop_and_join(double patience) {
        stop();
        const auto end = Clock::now() + std::chrono::duration<double>(patience);
        while (!watchdog_.shut_waiting() && Clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        watchdog_.shut_all();
        if (thread_.joinable()) thread_.join();
    }

  private:
    void next_request(Connection& c) {
        watchdog_.expect_within(c, limits_.idle_seconds + limits_.head_seconds);
    }

    /// cpp-httplib says 400 to a head that is too large.
    static int status_of(const httplib::Response& out) {
        const bool large =
            out.status == 400 && current != nullptr && current->stream->head_is_too_large(kMaxHeaderBytes);
        return large ? 431 : out.status;
    }

    HandlerResponse gate(const httplib::Request& r, httplib::Response& out) {
        const HttpRequest request = as_request(r);
        if (header_bytes(r) > kMaxHeaderBytes) {
            put(callbacks_.fail(431, request), out);
            return HandlerResponse::Handled;
        }
        if (auto reply = callbacks_.gate(request)) {
            put(std::move(*reply), out);
            return HandlerResponse::Handled;
        }
        if (current != nullptr) watchdog_.expect_within(*current, limits_.body_seconds);
        return HandlerResponse::Unhandled;
    }

    void answer(const httplib::Request& r, httplib::Response& out) {
        if (current != nullptr) watchdog_.expect_nothing(*current);
        put(callbacks_.handle(as_request(r)), out);
    }

    void put(HttpReply reply, httplib::Response& out) {
        out.status = reply.status;
        for (const auto& [name, value] : reply.headers) out.set_header(name, value);
        if (!reply.stream) {
            out.set_content(std::move(reply.body), reply.type);
            return;
        }
        out.set_chunked_content_provider(
            reply.type,
            [stream = std::move(reply.stream)](size_t, httplib::DataSink& sink) {
                if (!stream([&](std::string_view text) { return sink.write(text.data(), text.size()); }))
                    return false;
                sink.done();
                return true;
            },
            [this](bool) {
                if (current != nullptr) next_request(*current);
            });
    }

    /// As in cpp-httplib, with the connection known to the watchdog.
    bool process_and_close_socket(socket_t socket) override {
        std::string remote, local;
        int remote_port = 0, local_port = 0;
        httplib::detail::get_remote_ip_and_port(socket, remote, remote_port);
        httplib::detail::get_local_ip_and_port(socket, local, local_port);
        const auto connection = watchdog_.add(socket, remote, limits_.peer_connections);
        current = &*connection;
        const bool good = serve_requests(socket, remote, remote_port, local, local_port);
        const bool told = current->last;
        current = nullptr;
        watchdog_.remove(connection);
        if (told) let_read(socket);
        httplib::detail::shutdown_socket(socket);
        httplib::detail::close_socket(socket);
        return good;
    }

    bool serve_requests(socket_t socket, const std::string& remote, int remote_port, const std::string& local,
                        int local_port) {
        ConnectionStream stream(socket, {.read = read_timeout_sec_, .write = write_timeout_sec_},
                                [this, last = size_t{0}](size_t bytes) mutable { more_body(bytes, last); });
        current->stream = &stream;
        watchdog_.expect_within(*current, current->crowded ? kCrowdedSeconds : limits_.head_seconds);
        bool good = false;
        for (size_t left = current->crowded ? 1 : keep_alive_max_count_; left > 0; --left) {
            const bool any = stream.is_readable() ||
                             httplib::detail::keep_alive(svr_sock_, socket, keep_alive_timeout_sec_);
            if (!any) break;
            bool closed = false;
            stream.begin_head();
            good = process_request(stream, remote, remote_port, local, local_port, left == 1, closed,
                                   [&](httplib::Request& r) {
                                       stream.begin_body();
                                       prepare(r);
                                   });
            if (!good || closed || current->last) break;
        }
        return good;
    }

    /// A body that keeps coming has a second more for each KiB.
    void more_body(size_t bytes, size_t& last) {
        if (bytes < last) last = 0;  // another body
        if (bytes - last < 1024) return;
        const size_t more = (bytes - last) / 1024;
        last += 1024 * more;
        watchdog_.give_more(*current, static_cast<int64_t>(more));
    }

    /// Closing while the client still sends would take the reply from it: for a moment, what comes is thrown
    /// away.
    static void let_read(socket_t socket) {
        ::shutdown(socket, SHUT_WR);
        const timeval moment{.tv_sec = 0, .tv_usec = 200'000};
        ::setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &moment, sizeof moment);
        const auto end = Clock::now() + std::chrono::seconds(1);
        char ignored[16384];
        while (Clock::now() < end && ::recv(socket, ignored, sizeof ignored, 0) > 0) {
        }
    }

    HttpLimits limits_;
    Callbacks callbacks_;
    Watchdog watchdog_;
    std::thread thread_;
};

HttpServer::HttpServer(const HttpLimits& limits, Callbacks callbacks)
    : impl_(std::make_unique<Impl>(limits, std::move(callbacks))) {}
HttpServer::~HttpServer() = default;

int HttpServer::bind(const std::string& host, int port) {
    if (port == 0) {
        const int chosen = impl_->bind_to_any_port(host);
        if (chosen > 0) return chosen;
    } else if (impl_->bind_to_port(host, port)) {
        return port;
    }
    FAIL(bind, "cannot listen on {} port {}: {}; choose another with --port, 0 for any that is free", host,
         port, errno == EADDRINUSE ? "another program has that port" : std::strerror(errno));
}

void HttpServer::start() { impl_->serve(); }
void HttpServer::stop(double patience) { impl_->stop_and_join(patience); }

}  // namespace quern
