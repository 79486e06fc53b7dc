// HTTP as clients and proxies speak it: chunks, compressed bodies, requests in advance, half-closed connections, pages of
// other origins, and errors in the form of the API that was asked.
#include <fmt/format.h>
#include <zlib.h>

#include <memory>

#include "serve_client.h"
#include "tools/serve/json_repair.h"

namespace quern {
namespace {

using namespace test;

const std::string kHost = "Host: localhost\r\n", kJson = "Content-Type: application/json\r\n";

/// Everything until the server closes.
std::string receive_all(Raw& raw) {
    std::string all;
    for (std::string piece = raw.receive(); !piece.empty(); piece = raw.receive()) all += piece;
    return all;
}

std::string ask(const ServerProcess& server, const std::string& request) {
    Raw raw(server.port());
    raw.send(request);
    raw.end_sending();
    std::string reply = receive_all(raw);
    const std::string interim = "HTTP/1.1 100 Continue\r\n\r\n";  // asks whether we are still there
    while (reply.starts_with(interim)) reply.erase(0, interim.size());
    return reply;
}

int status_of(const std::string& reply) { return reply.size() > 12 ? std::atoi(reply.c_str() + 9) : 0; }

json body_of(const std::string& reply) {
    return json::parse(reply.substr(reply.find("\r\n\r\n") + 4), nullptr, false);
}

size_t count(const std::string& text, const std::string& part) {
    size_t n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
    return n;
}

std::string chunked(const std::string& path, const std::string& body, size_t size,
                    const std::string& headers = "") {
    std::string out = "POST " + path + " HTTP/1.1\r\n" + kHost + kJson +
                      "Transfer-Encoding: chunked\r\nConnection: close\r\n" + headers + "\r\n";
    for (size_t at = 0; at < body.size(); at += size) {
        const std::string piece = body.substr(at, size);
        out += fmt::format("{:x}\r\n{}\r\n", piece.size(), piece);
    }
    return out + "0\r\n\r\n";
}

std::string gzip(const std::string& text) {
    z_stream s{};
    REQUIRE(deflateInit2(&s, 9, Z_DEFLATED, 15 + 16, 9, Z_DEFAULT_STRATEGY) == Z_OK);
    std::string out(deflateBound(&s, text.size()), '\0');
    s.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
    s.avail_in = static_cast<uInt>(text.size());
    s.next_out = reinterpret_cast<Bytef*>(out.data());
    s.avail_out = static_cast<uInt>(out.size());
    REQUIRE(deflate(&s, Z_FINISH) == Z_STREAM_END);
    out.resize(s.total_out);
    deflateEnd(&s);
    return out;
}

json sum() {
    json body = question("What is 3 + 4?");
    body["max_tokens"] = 40;
    return body;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("json repair: halves of surrogate pairs become U+FFFD, all else stays") {
        CHECK(repaired_json(R"({"a":"\ud83d"})") == R"({"a":"\ufffd"})");
        CHECK(repaired_json(R"(["\uDE00x"])") == R"(["\ufffdx"])");
        CHECK(repaired_json(R"(["\ud83d\ud83d\ude00"])") == R"(["\ufffd\ud83d\ude00"])");
        CHECK(repaired_json("\"\xed\xa0\xbd\"").find("\xef\xbf\xbd") == 1);
        for (const std::string good : {R"("\ud83d\ude00")", R"("\\ud83d")", R"("\\\\ud83d \n \u00e9")",
                                       "\"\xf0\x9f\x98\x80\"", R"("\)", R"("\ud8)", ""})
            CHECK(repaired_json(good) == good);
        CHECK(repaired_json(R"("\\\ud83d")") == R"("\\\ufffd")");
    }
}

TEST_SUITE("model") {
    TEST_CASE("serve: bodies in chunks and compressed ones are read, within the same limit") {
        const ServerProcess server({"--max-body", "1048576"});
        const std::string path = "/v1/chat/completions", text = sum().dump();
        const json expected = chat(server, sum()).body["choices"];
        for (const size_t size : {size_t{1}, size_t{7}, size_t{100000}}) {
            const std::string reply = ask(server, chunked(path, text, size));
            CHECK(status_of(reply) == 200);
            CHECK(body_of(reply)["choices"] == expected);
        }
        const std::string packed = gzip(text);
        CHECK(body_of(ask(server, http(path, packed,
                                       "Content-Encoding: GZip\r\nConnection: close\r\n")))["choices"] ==
              expected);
        CHECK(body_of(ask(server, chunked(path, packed, 20, "Content-Encoding: gzip\r\n")))["choices"] ==
              expected);
        CHECK(status_of(ask(server, http(path, packed.substr(0, 40), "Content-Encoding: gzip\r\n"))) == 400);
        CHECK(status_of(ask(server, http(path, text, "Content-Encoding: gzip\r\n"))) == 400);
        CHECK(status_of(ask(server, http(path, text, "Content-Encoding: br\r\n"))) == 415);
        // 64 MB that are 64 KB on the way; the same without compression, and in chunks of unknown number.
        const std::string large(64 << 20, ' ');
        const std::string bomb = ask(server, http(path, gzip(large), "Content-Encoding: gzip\r\n"));
        CHECK(status_of(bomb) == 413);
        CHECK(body_of(bomb)["error"]["message"].get<std::string>().find("--max-body") != std::string::npos);
        CHECK(status_of(ask(server, chunked(path, large.substr(0, 2 << 20), 65536))) == 413);
        CHECK(status_of(ask(server, http(path, large.substr(0, 2 << 20)))) == 413);
        const std::string head = "POST " + path + " HTTP/1.1\r\n" + kHost + kJson;
        CHECK(status_of(ask(server, head + "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")) == 501);
        CHECK(status_of(ask(
                  server, head + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n")) == 400);
        CHECK(chat(server, sum()).body["choices"] == expected);
    }

    TEST_CASE("serve: requests sent in advance are answered in their order") {
        const ServerProcess server;
        const std::string get = "GET /health HTTP/1.1\r\n" + kHost + "\r\n",
                          drop = "DELETE /v1/models HTTP/1.1\r\n" + kHost + "\r\n";
        const std::string tokens = http("/tokenize", R"({"content":"one two"})");
        const std::string all = ask(server, get + tokens + get + tokens + get);
        CHECK(count(all, "HTTP/1.1 200 OK") == 5);
        CHECK(count(all, R"({"status":"ok"})") == 3);
        CHECK(all.find(R"({"tokens")") > all.find(R"({"status")"));
        const auto begun = std::chrono::steady_clock::now();
        CHECK(status_of(ask(server, drop)) == 405);
        CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(5));
    }

    TEST_CASE("serve: who only closed its own side of the connection gets the answer") {
        const ServerProcess server;
        for (const bool streamed : {false, true}) {
            CAPTURE(streamed);
            json body = sum();
            body["stream"] = streamed;
            body["max_tokens"] = 200;
            body["ignore_eos"] = true;
            const std::string reply =
                ask(server, http("/v1/chat/completions", body.dump(), "Connection: close\r\n"));
            CHECK(reply.find(streamed ? "data: [DONE]" : R"("finish_reason":"length")") != std::string::npos);
        }
        CHECK(server.metric("quern_cancelled_total{phase=\"decode\"}") == 0);
        CHECK(server.metric("quern_cancelled_total{phase=\"prefill\"}") == 0);
    }

    TEST_CASE("serve: pages of other origins may ask with any header, and read errors") {
        const ServerProcess server({"--cors-origins", "https://app.example", "--api-key", "secret"});
        const std::string origin = "Origin: https://app.example\r\n", close = "Connection: close\r\n";
        const std::string asked = "authorization,x-stainless-lang,anthropic-dangerous-direct-browser-access";
        const std::string preflight = ask(
            server, "OPTIONS /v1/messages HTTP/1.1\r\n" + kHost + origin + close +
                        "Access-Control-Request-Method: POST\r\nAccess-Control-Request-Headers: " + asked +
                        "\r\n\r\n");
        CHECK(status_of(preflight) == 204);
        CHECK(preflight.find("Access-Control-Allow-Headers: " + asked) != std::string::npos);
        const std::string allowed = "Access-Control-Allow-Origin: https://app.example";
        for (const std::string& request :
             {"GET /v1/models HTTP/1.1\r\n" + kHost + origin + "\r\n",
              "GET /nowhere HTTP/1.1\r\n" + kHost + origin + "\r\n",
              http("/v1/chat/completions", "{}", origin), http("/v1/embeddings", "{}", origin),
              "GET /health HTTP/1.1\r\n" + kHost + origin + "\r\n",
              http("/v1/chat/completions", "{", origin + "Authorization: Bearer secret\r\n")}) {
            const std::string reply = ask(server, request);
            CAPTURE(reply);
            CHECK(reply.find(allowed) != std::string::npos);
            CHECK(reply.find("X-Quern-Ignored, X-Not-Enforced\r\n") !=
                  std::string::npos);  // pages may read them
            CHECK(reply.find("X-Request-Id: ") != std::string::npos);
        }
        const std::string foreign =
            ask(server, "OPTIONS /v1/messages HTTP/1.1\r\n" + kHost + "Origin: https://evil.example\r\n\r\n");
        CHECK(foreign.find("Access-Control-Allow-Origin") == std::string::npos);
    }

    TEST_CASE("serve: errors have the form of the API that was asked") {
        const ServerProcess server({"--api-key", "secret"});
        const std::string key = "Authorization: Bearer secret\r\n";
        const auto error = [&](const std::string& path, const std::string& body, const std::string& headers,
                               int status) {
            const std::string reply = ask(server, http(path, body, headers));
            CAPTURE(path);
            CHECK(status_of(reply) == status);
            return body_of(reply);
        };
        for (const char* path : {"/v1/embeddings", "/v1/images/generations", "/v1/audio/speech"})
            CHECK(error(path, "{}", key, 404)["error"]["code"] == "not_supported");
        CHECK(error("/v1/chat/completions", "{", key, 400)["error"]["code"] == "invalid_json");
        CHECK(error("/v1/chat/completions", "{}", "", 401)["error"]["type"] == "authentication_error");
        for (const json& e : {error("/v1/messages", "{}", "", 401), error("/v1/messages", "{", key, 400),
                              error("/v1/nothing", "{}", key + "anthropic-version: 2023-06-01\r\n", 404)}) {
            CHECK(e["type"] == "error");
            CHECK(e["error"]["message"].is_string());
        }
        CHECK(error("/api/embed", "{}", key, 404)["error"].is_string());
        CHECK(error("/api/nothing", "{}", key, 404)["error"].is_string());
        const std::string wide = "GET /health HTTP/1.1\r\n" + kHost + "X-Wide: " + std::string(40000, 'y');
        CHECK(status_of(ask(server, wide + "\r\n\r\n")) == 431);
    }

    TEST_CASE("serve: half of an emoji is no reason to refuse a conversation") {
        const ServerProcess server;
        const std::string body =
            R"({"max_tokens": 2, "messages": [{"role": "user", "content": "cut \ud83d off"}]})";
        CHECK(chat(server, json(body)).status == 200);
        CHECK(post(server, "/apply-template", json(body))
                  .body["prompt"]
                  .get<std::string>()
                  .find("cut \xef\xbf\xbd off") != std::string::npos);
    }

    TEST_CASE("serve: a stream that waits says so from time to time") {
        const ServerProcess server({"-np", "1"});
        json endless = sum();
        endless["stream"] = endless["ignore_eos"] = true;
        endless.erase("max_tokens");
        Raw first(server.port()), second(server.port()), third(server.port());
        first.send(http("/v1/chat/completions", endless.dump()));
        CHECK(server.reaches("quern_requests_running", 1));
        second.send(http("/v1/chat/completions", endless.dump()));
        third.send(http("/v1/messages",
                        R"({"max_tokens":9,"stream":true,"messages":[{"role":"user","content":"x"}]})"));
        std::string comments, events;
        while (comments.find(": ping\n\n") == std::string::npos) comments += second.receive();
        while (events.find("event: ping\n") == std::string::npos) events += third.receive();
        CHECK(comments.find("\"content\":\"\"") != std::string::npos);  // nothing of the answer yet
        CHECK(events.find("message_start") != std::string::npos);
    }

    TEST_CASE("serve: health answers an address that has all its connections") {
        const ServerProcess server({"--peer-connections", "4"});
        std::this_thread::sleep_for(std::chrono::seconds(1));  // for those that asked whether it is ready
        std::vector<std::unique_ptr<Raw>> idle;
        for (int i = 0; i < 100; ++i) idle.push_back(std::make_unique<Raw>(server.port()));
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        CHECK(status_of(ask(server, "GET /health HTTP/1.1\r\n" + kHost + "\r\n")) == 200);
        const std::string other = ask(server, "GET /v1/models HTTP/1.1\r\n" + kHost + "\r\n");
        CHECK(status_of(other) == 429);
        CHECK(body_of(other)["error"]["code"] == "too_many_connections");
    }
}

}  // namespace quern
