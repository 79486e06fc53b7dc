// A device that fails while answers run: everyone is told, and the server ends.
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "counted_backend.h"
#include "ggml-like/json.h"
#include "models/weight_placement.h"
#include "tools/common/httplib.h"
#include "tools/engine/engine.h"
#include "tools/serve/api.h"

namespace quern {
namespace {

using json = nlohmann::ordered_json;

constexpr const char* kDemo = QUERN_SOURCE_DIR "/models/demo";

/// The CPU, with an error to come.
struct Failing {
    Failing() {
        backend.before_run = [this] {
            if (broken) throw Error(ErrorKind::device, "the GPU reported an error in run: gone");
        };
    }
    std::atomic<bool> broken = false;
    test::CountedBackend backend{int64_t{8} << 30};
};

std::string story(bool stream) {
    return json{{"messages", {{{"role", "user"}, {"content", "Tell me a story."}}}},
                {"max_tokens", 100000},
                {"ignore_eos", true},
                {"stream", stream}}
        .dump();
}

TEST_SUITE("model") {
    TEST_CASE("engine: an error of the device ends all requests and goes on to the caller") {
        Failing f;
        const auto model = load_model(kDemo, f.backend, {});
        Engine engine(*model, f.backend, {.context = 256, .sequences = 1});
        Request request;
        request.prompt = {1, 2, 3};
        const RequestId running = engine.submit(request), queued = engine.submit(request);
        engine.step();
        f.broken = true;
        CHECK_THROWS_WITH_AS(engine.step(), doctest::Contains("gone"), Error);
        for (const RequestId id : {running, queued}) {
            REQUIRE(engine.finished(id));
            const Result result = engine.take(id);
            CHECK(result.reason == FinishReason::error);
            CHECK(result.error.find("gone") != std::string::npos);
        }
    }

    TEST_CASE("serve: a reader that is far behind is given up") {
        Mailbox mailbox;
        int64_t sent = 1;
        while (mailbox.push({}) && sent < 100000) ++sent;
        CHECK(sent > 1000);  // a pause of a reader is nothing
        CHECK(sent < 100000);
        CHECK(mailbox.overflowed());
        int64_t received = 0;
        while (mailbox.pop(std::chrono::milliseconds(0))) ++received;
        CHECK(received == sent);
    }

    TEST_CASE("serve: readers of many mailboxes are woken after a flush, and at the end") {
        using namespace std::chrono_literals;
        constexpr int kReaders = 9;
        std::vector<std::shared_ptr<Mailbox>> mailboxes;
        for (int i = 0; i < kReaders; ++i) mailboxes.push_back(std::make_shared<Mailbox>());
        std::atomic<int> read = 0;
        std::vector<std::thread> readers;
        for (const auto& mailbox : mailboxes)
            readers.emplace_back([&] {
                for (int step = 0; step < 3; ++step)
                    if (const auto event = mailbox->pop(60s)) read += event->choice;
            });
        const auto all_have_read = [&](int steps) {
            const auto begun = std::chrono::steady_clock::now();
            while (read < steps * kReaders && std::chrono::steady_clock::now() - begun < 30s)
                std::this_thread::sleep_for(1ms);
            return read == steps * kReaders;
        };
        {
            Notifier notifier;
            const auto deliver = [&](size_t from, size_t to) {
                for (size_t i = from; i < to; ++i) {
                    notifier.add(mailboxes[i]);
                    mailboxes[i]->put({.choice = 1});
                }
            };
            deliver(0, kReaders);
            notifier.flush();
            CHECK(all_have_read(1));
            for (size_t i = 0; i < kReaders; ++i) {  // one at a time
                deliver(i, i + 1);
                notifier.flush();
            }
            CHECK(all_have_read(2));
            deliver(0, kReaders);
        }
        CHECK(all_have_read(3));
        for (std::thread& reader : readers) reader.join();
    }

    TEST_CASE("serve: a device that fails: answers end with its error, /health says so") {
        Failing f;
        const auto model = load_model(kDemo, f.backend, {});
        Engine engine(*model, f.backend, {.context = 4096, .sequences = 2});
        ServeOptions options;
        options.log_requests = false;
        Metrics metrics;
        Replicas replicas(metrics, 8);
        Api api(options, replicas, metrics);
        HttpServer server(options.limits, api.callbacks());
        const int port = server.bind("127.0.0.1", 0);
        server.start();
        api.set_ready(engine);
        int code = 0;
        std::thread running([&] {
            try {
                replicas.run({{&engine, "CPU"}}, [&] { api.set_lost(); });
            } catch (const Error& error) {
                code = error.exit_code();
            }
        });
        const auto ask = [&](bool stream) {
            httplib::Client c("127.0.0.1", port);
            c.set_read_timeout(120);
            const auto r = c.Post("/v1/chat/completions", story(stream), "application/json");
            return r ? std::to_string(r->status) + " " + r->body : std::string();
        };
        std::string whole, streamed, queued;
        std::thread people[] = {std::thread([&] { whole = ask(false); }),
                                std::thread([&] { streamed = ask(true); }),
                                std::thread([&] { queued = ask(false); })};
        while (metrics.running() + metrics.queued() < 3)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        f.broken = true;
        running.join();
        CHECK(code == 5);
        httplib::Client c("127.0.0.1", port);
        const auto health = c.Get("/health");
        REQUIRE(health);
        CHECK(health->status == 503);
        CHECK(health->body.find("device_error") != std::string::npos);
        CHECK(ask(false).find("503") == 0);
        server.stop(60);  // replies on their way are not cut off
        for (std::thread& person : people) person.join();
        for (const std::string& answer : {whole, queued}) {
            CHECK(answer.find("503") == 0);
            CHECK(answer.find("the GPU reported an error in run: gone") != std::string::npos);
        }
        CHECK(streamed.find("200") == 0);
        CHECK(streamed.find("device_error") != std::string::npos);
    }
}

}  // namespace
}  // namespace quern
