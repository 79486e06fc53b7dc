#include "tools/serve/http_server.h"

#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <condition_variable>
#include <list>
#include <map>
#include <mutex>
#include <thread>

#include "ggml-like/check.h"
#include "tools/common/httplib.h"

namespace quern {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSendBuffer = 128 << 10;
constexpr size_t kMaxHeaderBytes = 32 << 10;

/// A connection and until when its client must have done its part.
struct Connection {
    socket_t socket;
    std::optional<Clock::time_point> deadline;  // none: it is our turn
    bool last = false;                          // the client was told that this was the last reply
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

    std::list<Connection>::iterator add(socket_t socket) {
        const std::lock_guard lock(mutex_);
        return connections_.insert(connections_.end(), {.socket = socket, .deadline = {}});
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

/// Connections of each address.
class Peers {
  public:
    explicit Peers(size_t most) : most_(most) {}

    /// False: the address has as many as it may have.
    bool enter(const std::string& peer) {
        const std::lock_guard lock(mutex_);
        size_t& count = counts_[peer];
        if (most_ > 0 && count >= most_) return false;
        ++count;
        return true;
    }
    void leave(const std::string& peer) {
        const std::lock_guard lock(mutex_);
        const auto at = counts_.find(peer);
        if (--at->second == 0) counts_.erase(at);
    }

  private:
    size_t most_;
    std::mutex mutex_;
    std::map<std::string, size_t> counts_;
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

bool is_reset(socket_t socket) {
    pollfd state{.fd = socket, .events = 0, .revents = 0};
    return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0;
}

size_t header_bytes(const httplib::Request& r) {
    size_t sum = 0;
    for (const auto& [name, value] : r.headers) sum += name.size() + value.size() + 4;
    return sum;
}

HttpRequest as_request(const httplib::Request& r) {
    return {.method = r.method,
            .path = r.path,
            .body = r.body,
            .remote = r.remote_addr,
            .id = {},
            .content_length = static_cast<int64_t>(r.get_header_value_u64("Content-Length")),
            .header = [&r](const char* name) { return r.get_header_value(name); },
            .header_count = [&r](const char* name) { return r.get_header_value_count(name); },
            .closed = [&r] { return r.is_connection_closed(); },
            .reset = [socket = current != nullptr ? current->socket
                                                  : INVALID_SOCKET] { return is_reset(socket); }};
}

}  // namespace

class HttpServer::Impl : public httplib::Server {
  public:
    Impl(const HttpLimits& limits, Callbacks callbacks)
        : limits_(limits), callbacks_(std::move(callbacks)), peers_(limits.peer_connections) {
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
        set_error_handler([this](const httplib::Request&, httplib::Response& out) {
            if (out.body.empty()) put(callbacks_.fail(out.status), out);
            return HandlerResponse::Handled;
        });
        set_exception_handler([this](const httplib::Request&, httplib::Response& out, std::exception_ptr) {
            put(callbacks_.fail(500), out);
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

    HandlerResponse gate(const httplib::Request& r, httplib::Response& out) {
        if (header_bytes(r) > kMaxHeaderBytes) {
            put(callbacks_.fail(431), out);
            return HandlerResponse::Handled;
        }
        const HttpRequest request = as_request(r);
        if (auto reply = callbacks_.gate(request)) {
            put(std::move(*reply), out);
            return HandlerResponse::Handled;
        }
        if (current != nullptr)
            watchdog_.expect_within(*current, limits_.body_seconds + request.content_length / 1024);
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
        const bool admitted = peers_.enter(remote);
        const bool good =
            admitted ? serve_socket(socket, remote, remote_port, local, local_port) : turn_away(socket);
        if (admitted) peers_.leave(remote);
        httplib::detail::shutdown_socket(socket);
        httplib::detail::close_socket(socket);
        return good;
    }

    bool serve_socket(socket_t socket, const std::string& remote, int remote_port, const std::string& local,
                      int local_port) {
        const auto connection = watchdog_.add(socket);
        current = &*connection;
        watchdog_.expect_within(*current, limits_.head_seconds);
        const bool good = httplib::detail::process_server_socket(
            svr_sock_, socket, keep_alive_max_count_, keep_alive_timeout_sec_, read_timeout_sec_,
            read_timeout_usec_, write_timeout_sec_, write_timeout_usec_,
            [&](httplib::Stream& stream, bool close, bool& closed) {
                const bool went =
                    process_request(stream, remote, remote_port, local, local_port, close, closed, nullptr);
                // cpp-httplib would go on after what is no proper request, and lose requests sent in advance.
                current->last = current->last || stream.is_readable();
                closed = closed || current->last;
                return went;
            });
        const bool told = current->last;
        current = nullptr;
        watchdog_.remove(connection);
        if (told) let_read(socket);
        return good;
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

    /// Without reading anything.
    bool turn_away(socket_t socket) {
        const HttpReply reply = callbacks_.fail(429);
        std::string text = fmt::format(
            "HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Type: {}\r\n"
            "Content-Length: {}\r\n",
            reply.type, reply.body.size());
        for (const auto& [name, value] : reply.headers) text += name + ": " + value + "\r\n";
        text += "\r\n" + reply.body;
        ::send(socket, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        let_read(socket);
        return false;
    }

    HttpLimits limits_;
    Callbacks callbacks_;
    Peers peers_;
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
