// Several replicas behind one port: the answers of one, whoever computes them; nobody waits beside a free slot; a device that
// fails is left out, and what its clients had nothing of runs again.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include "counted_backend.h"
#include "models/weight_placement.h"
#include "serve_client.h"
#include "tools/common/load_replicas.h"
#include "tools/engine/engine.h"
#include "tools/engine/kept_states.h"
#include "tools/serve/api.h"

namespace quern {
namespace {

using namespace test;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr const char* kDemo = QUERN_SOURCE_DIR "/models/demo";

/// The CPU as a device, slow if it should be, with an error to come.
struct Device {
    Device() {
        backend.before_run = [this] {
            std::this_thread::sleep_for(std::chrono::milliseconds(slow_ms.load()));
            if (broken) throw Error(ErrorKind::device, "the GPU reported an error in run: gone");
        };
    }
    std::atomic<bool> broken = false;
    std::atomic<int> slow_ms = 0;
    CountedBackend backend{int64_t{8} << 30};
};

bool within(std::chrono::milliseconds patience, const std::function<bool()>& done) {
    const auto end = Clock::now() + patience;
    while (!done()) {
        if (Clock::now() > end) return false;
        std::this_thread::sleep_for(2ms);
    }
    return true;
}

/// A server in this process, with replicas whose devices can fail.
class Server {
  public:
    explicit Server(size_t replicas, int64_t sequences = 2, int64_t queue = 8, double timeout = 3600)
        : metrics(replicas),
          replicas_(metrics, queue),
          api_((set(queue, timeout), options_), replicas_, metrics),
          http_(options_.limits, api_.callbacks()) {
        std::vector<Replicas::One> list;
        for (size_t r = 0; r < replicas; ++r) {
            devices.push_back(std::make_unique<Device>());
            models_.push_back(load_model(kDemo, devices[r]->backend, {}));
            EngineOptions o{.context = 2048, .sequences = sequences, .cache_bytes = int64_t{256} << 20};
            if (r > 0) o.kept = engines_[0]->kept_states();
            o.sharing = static_cast<int64_t>(replicas);
            engines_.push_back(std::make_unique<Engine>(*models_[r], devices[r]->backend, o));
            list.push_back({engines_[r].get(), "GPU " + std::to_string(r)});
        }
        port = http_.bind("127.0.0.1", 0);
        http_.start();
        api_.set_ready(*engines_[0]);
        running_ = std::thread([this, list] {
            try {
                replicas_.run(list, [this] { api_.set_lost(); });
            } catch (const Error& error) {
                code = error.exit_code();
            }
        });
    }
    ~Server() {
        stop();
        http_.stop(30);
    }
    /// Cancels what runs, and waits until all replicas have ended.
    void stop() {
        if (!running_.joinable()) return;
        replicas_.stop();
        running_.join();
    }
    /// Waits until all replicas have ended by themselves.
    void join() { running_.join(); }

    std::string ask(const json& body, const std::string& path = "/v1/chat/completions") const {
        httplib::Client c("127.0.0.1", port);
        c.set_read_timeout(120);
        const auto r = c.Post(path, body.dump(), "application/json");
        return r ? std::to_string(r->status) + " " + r->body : std::string();
    }
    json get(const std::string& path, int* status = nullptr) const {
        httplib::Client c("127.0.0.1", port);
        const auto r = c.Get(path);
        REQUIRE(r);
        if (status != nullptr) *status = r->status;
        return json::parse(r->body, nullptr, false);
    }
    int64_t running(size_t replica) const { return metrics.replica(replica).running; }

    Metrics metrics;
    std::vector<std::unique_ptr<Device>> devices;
    int port = 0;
    std::atomic<int> code = 0;

  private:
    void set(int64_t queue, double timeout) {
        options_.log_requests = false;
        options_.queue = queue;
        options_.timeout = timeout;
    }

    ServeOptions options_;
    Replicas replicas_;
    std::vector<std::unique_ptr<Model>> models_;
    std::vector<std::unique_ptr<Engine>> engines_;
    Api api_;
    HttpServer http_;
    std::thread running_;
};

json story(int tokens, bool stream = false, const std::string& about = "a mill") {
    json body = question("Tell me a story of " + about + ".");
    body["max_tokens"] = tokens;
    body["ignore_eos"] = true;
    body["stream"] = stream;
    body["temperature"] = 1;
    body["seed"] = 11;
    return body;
}

/// What depends on the request alone.
json content(const std::string& answer) {
    REQUIRE(answer.find("200 ") == 0);
    const json body = json::parse(answer.substr(4));
    return {body["choices"][0]["message"], body["usage"]["completion_tokens"]};
}

/// Tokens for /v1/completions, of which a state is kept.
json numbers(int64_t count, int seed) {
    json list = json::array();
    for (int64_t i = 0; i < count; ++i) list.push_back((i * 37 + seed * 101 + i * i) % 900);
    return list;
}

json completion(const json& prompt, int tokens) {
    return {{"prompt", prompt},
            {"max_tokens", tokens},
            {"ignore_eos", true},
            {"temperature", 0},
            {"logprobs", 1}};
}

json choice(const std::string& answer, int64_t* cached = nullptr) {
    REQUIRE(answer.find("200 ") == 0);
    const json body = json::parse(answer.substr(4));
    if (cached != nullptr) *cached = body["usage"]["prompt_tokens_details"]["cached_tokens"];
    return body["choices"][0];
}

TEST_SUITE("model") {
    TEST_CASE("serve replicas: the answers of one, alone, in a crowd and from states of others") {
        const std::vector<std::string> flags = {"--synthetic", "tiny", "--mix", "xs",
                                                "-c",          "2048", "-np",   "3"};
        std::vector<std::string> two = flags;
        two.insert(two.end(), {"--data-parallel", "2"});
        const ServerProcess one(flags), both(two);
        std::vector<json> bodies;
        for (int i = 0; i < 12; ++i) bodies.push_back(completion(numbers(90 + 45 * i, i), 12));
        const auto all = [&](const ServerProcess& server, bool together) {
            std::vector<json> answers(bodies.size());
            const auto ask = [&](size_t i) {
                answers[i] = post(server, "/v1/completions", bodies[i]).body["choices"];
            };
            if (together) {
                std::vector<std::thread> people;
                for (size_t i = 0; i < bodies.size(); ++i) people.emplace_back(ask, i);
                for (std::thread& person : people) person.join();
            } else {
                for (size_t i = 0; i < bodies.size(); ++i) ask(i);
            }
            return answers;
        };
        const std::vector<json> expected = all(one, false);
        CHECK(all(both, true) == expected);
        CHECK(all(both, true) == expected);  // with the states that were left
        CHECK(all(both, false) == expected);
        for (int i = 0; i < 12; ++i)
            for (int more = 0; more < 30; ++more) bodies[static_cast<size_t>(i)]["prompt"].push_back(more);
        CHECK(all(both, true) == all(one, false));
        auto c = both.client();
        CHECK(json::parse(c.Get("/props")->body)["total_slots"] == 6);
        const json slots = json::parse(c.Get("/slots")->body);
        REQUIRE(slots.size() == 6);
        CHECK(slots[5]["replica"] == 1);
        CHECK(slots[0]["states"]["kept"].size() > 0);
        const std::string metrics = c.Get("/metrics")->body;
        for (const char* line : {"quern_replica_up{replica=\"1\"} 1\n", "quern_requests_total 48\n",
                                 "quern_step_seconds_count{replica=\"1\"}"})
            CHECK(metrics.find(line) != std::string::npos);
        for (const char* replica : {"0", "1"}) {  // both have worked
            const std::string name = std::string("quern_answer_tokens_total{replica=\"") + replica + "\"} ";
            CHECK(std::atoi(metrics.c_str() + metrics.find(name) + name.size()) > 48 * 12 / 4);
        }
    }

    TEST_CASE("serve replicas: one alone says what it always said") {
        const Metrics metrics;
        const std::string text = metrics.text();
        CHECK(text.find("replica") == std::string::npos);
        CHECK(text.find("\nquern_requests_running 0\n") != std::string::npos);
        CHECK(text.find("\nquern_step_seconds_bucket{le=\"0.002\"} 0\n") != std::string::npos);
        const ServerProcess server({"--synthetic", "tiny", "-np", "2"});
        auto c = server.client();
        CHECK_FALSE(json::parse(c.Get("/slots")->body)[0].contains("replica"));
        CHECK_FALSE(json::parse(c.Get("/props")->body).contains("replicas"));
        CHECK(c.Get("/health")->body == R"({"status":"ok"})");
    }

    TEST_CASE("serve replicas: nobody waits while a slot is free, and the queue has its limits") {
        Server server(2, 1, 1);
        for (const auto& device : server.devices) device->slow_ms = 20;
        std::vector<std::thread> people;
        std::vector<std::string> answers(3);
        for (size_t i = 0; i < 2; ++i) {
            people.emplace_back([&, i] { answers[i] = server.ask(story(30)); });
            REQUIRE(
                within(5s, [&] { return server.running(0) + server.running(1) == static_cast<int>(i) + 1; }));
        }
        CHECK(server.running(0) == 1);
        CHECK(server.running(1) == 1);
        people.emplace_back([&] { answers[2] = server.ask(story(30)); });
        REQUIRE(within(5s, [&] { return server.metrics.queued() == 1; }));
        CHECK(server.ask(story(5)).find("429") == 0);
        for (std::thread& person : people) person.join();
        for (const std::string& answer : answers) CHECK(content(answer) == content(answers[0]));
        CHECK(within(1s, [&] { return server.metrics.queued() == 0; }));
    }

    TEST_CASE("serve replicas: a follow-up goes where there is room, and takes the state along") {
        Server server(2, 1);
        int64_t cached = 0;
        const json prompt = numbers(700, 1);
        server.ask(completion(prompt, 4), "/v1/completions");
        const size_t home = server.metrics.replica(0).computed_tokens > 0 ? 0 : 1;
        json next = prompt;
        for (int i = 0; i < 20; ++i) next.push_back(i);
        choice(server.ask(completion(next, 4), "/v1/completions"), &cached);
        CHECK(cached == 640);
        CHECK(server.metrics.replica(1 - home).computed_tokens == 0);  // it was where its state is
        REQUIRE(within(5s, [&] { return server.running(0) + server.running(1) == 0; }));
        for (const auto& device : server.devices) device->slow_ms = 20;
        std::thread busy([&] { server.ask(completion(numbers(300, 9), 100), "/v1/completions"); });
        REQUIRE(within(5s, [&] { return server.running(0) + server.running(1) == 1; }));
        const size_t taken = server.running(0) == 1 ? 0 : 1;
        json last = next;
        for (int i = 0; i < 70; ++i) last.push_back(i + 5);
        const json warm = choice(server.ask(completion(last, 6), "/v1/completions"), &cached);
        CHECK(cached == 704);
        CHECK(server.metrics.replica(1 - taken).cached_tokens >= 704);
        json again = completion(last, 6);
        again["cache_prompt"] = false;
        CHECK(choice(server.ask(again, "/v1/completions")) == warm);
        busy.join();
        CHECK(server.metrics.replica(taken).answer_tokens + server.metrics.replica(1 - taken).answer_tokens ==
              4 + 4 + 6 + 6 + 100);
    }

    TEST_CASE("serve replicas: clients that leave the queue, and requests that wait too long") {
        Server server(2, 1, 8, 1.0);
        for (const auto& device : server.devices) device->slow_ms = 20;
        std::vector<std::thread> people;
        std::vector<std::string> answers(3);
        for (size_t i = 0; i < 2; ++i) people.emplace_back([&, i] { answers[i] = server.ask(story(2000)); });
        REQUIRE(within(5s, [&] { return server.running(0) + server.running(1) == 2; }));
        {
            Raw raw(server.port);
            raw.send(http("/v1/chat/completions", story(5, true).dump()));
            REQUIRE(within(5s, [&] { return server.metrics.queued() == 1; }));
        }
        CHECK(within(5s, [&] { return server.metrics.queued() == 0; }));
        CHECK(server.metrics.cancelled[0] == 1);
        people.emplace_back([&] { answers[2] = server.ask(story(2000)); });
        for (std::thread& person : people) person.join();
        for (const std::string& answer : answers) CHECK(answer.find("504") == 0);
    }

    TEST_CASE("serve replicas: a device that fails is left out, and what nobody has seen runs again") {
        Server server(2, 2);
        const json expected = content(server.ask(story(60)));
        for (const auto& device : server.devices) device->slow_ms = 10;
        std::vector<std::string> whole(6);
        std::string streamed[4];
        std::vector<std::thread> people;
        for (std::string& answer : streamed)
            people.emplace_back([&] { answer = server.ask(story(60, true)); });
        REQUIRE(within(5s, [&] { return server.running(0) == 2 && server.running(1) == 2; }));
        for (std::string& answer : whole) people.emplace_back([&] { answer = server.ask(story(60)); });
        REQUIRE(within(5s, [&] { return server.metrics.queued() == 6; }));
        // until these answer, and others of those are done: some of both kinds run on each device
        REQUIRE(within(20s, [&] { return server.metrics.queued() <= 4; }));
        server.devices[1]->broken = true;
        const auto failed = Clock::now();
        int status = 0;
        json health;
        REQUIRE(within(1s, [&] {
            health = server.get("/health", &status);
            return health.contains("warning");
        }));
        CHECK(status == 200);
        CHECK(health["status"] == "ok");
        CHECK(health["warning"].get<std::string>().find("GPU 1: the GPU reported an error in run: gone") !=
              std::string::npos);
        CHECK(Clock::now() - failed < 1s);
        CHECK_FALSE(server.metrics.replica(1).up);
        for (std::thread& person : people) person.join();
        for (const std::string& answer : whole) CHECK(content(answer) == expected);
        const json props = server.get("/props");
        CHECK(props["replicas"][0]["up"] == true);
        CHECK(props["replicas"][1]["up"] == false);
        CHECK(content(server.ask(story(60))) == expected);  // the other one goes on

        server.devices[0]->broken = true;  // the last one
        std::thread last([&] { whole[0] = server.ask(story(60)); });
        server.join();
        last.join();
        CHECK(server.code == 5);
        CHECK(whole[0].find("503") == 0);
        CHECK(server.get("/health", &status)["error"]["code"] == "device_error");
        CHECK(status == 503);
        CHECK(server.ask(story(5)).find("503") == 0);
    }

    TEST_CASE("serve replicas: an answer that is on its way ends with the device's error, within a second") {
        Server server(2, 1);
        for (const auto& device : server.devices) device->slow_ms = 10;
        std::string streamed[2], whole[2];
        std::vector<std::thread> people;
        for (std::string& answer : streamed)
            people.emplace_back([&] { answer = server.ask(story(200, true)); });
        REQUIRE(within(5s, [&] { return server.running(0) == 1 && server.running(1) == 1; }));
        for (std::string& answer : whole) people.emplace_back([&] { answer = server.ask(story(9)); });
        REQUIRE(within(5s, [&] { return server.metrics.queued() == 2; }));
        std::this_thread::sleep_for(300ms);  // both have sent something
        const int64_t before = server.metrics.failed;
        server.devices[0]->broken = true;
        CHECK(within(1s, [&] { return server.metrics.failed == before + 1; }));
        for (std::thread& person : people) person.join();
        const bool first = streamed[0].find("device_error") != std::string::npos;
        CHECK(streamed[first ? 0 : 1].find("the GPU reported an error in run: gone") != std::string::npos);
        CHECK(streamed[first ? 1 : 0].find("device_error") == std::string::npos);
        CHECK(streamed[first ? 1 : 0].find("[DONE]") != std::string::npos);
        CHECK(content(whole[0]) == content(whole[1]));
    }

    TEST_CASE(
        "serve replicas: a stream that has not begun runs again, too, and so do several answers of one "
        "request") {
        Server server(2, 2);
        json several = story(12, false, "a stone");
        several["n"] = 2;
        const json streamed = story(12, true);
        const std::string expected = server.ask(streamed);
        const auto texts = [](const std::string& answer) {  // without ids and times
            std::string all;
            for (size_t at = answer.find("data: {"); at != std::string::npos;
                 at = answer.find("data: {", at + 1)) {
                const json event = json::parse(answer.substr(at + 6, answer.find('\n', at) - at - 6));
                for (const json& c : event.value("choices", json::array())) all += c["delta"].dump();
            }
            return all;
        };
        const std::string both = server.ask(several);
        REQUIRE(both.find("200 ") == 0);
        REQUIRE(within(5s, [&] { return server.running(0) + server.running(1) == 0; }));
        for (const auto& device : server.devices) device->slow_ms = 300;
        std::string answers[3];
        std::vector<std::thread> people;
        for (int i = 0; i < 2; ++i) people.emplace_back([&, i] { answers[i] = server.ask(streamed); });
        people.emplace_back([&] { answers[2] = server.ask(several); });
        REQUIRE(within(5s, [&] { return server.running(0) > 0 && server.running(1) > 0; }));
        server.devices[1]->broken = true;  // in the step that reads their prompts
        REQUIRE(within(1s, [&] { return !server.metrics.replica(1).up; }));
        for (const auto& device : server.devices) device->slow_ms = 0;
        for (std::thread& person : people) person.join();
        for (int i = 0; i < 2; ++i) {
            CHECK(answers[i].find("error") == std::string::npos);
            CHECK(texts(answers[i]) == texts(expected));
        }
        REQUIRE(answers[2].find("200 ") == 0);
        CHECK(json::parse(answers[2].substr(4))["choices"] == json::parse(both.substr(4))["choices"]);
        CHECK(server.metrics.failed == 0);
    }

    TEST_CASE("serve replicas: all devices fail at once: everyone is told, nobody hangs") {
        Server server(3, 1);
        for (const auto& device : server.devices) device->slow_ms = 5;
        std::vector<std::string> answers(6);
        std::vector<std::thread> people;
        for (std::string& answer : answers) people.emplace_back([&] { answer = server.ask(story(1500)); });
        REQUIRE(within(5s, [&] { return server.metrics.queued() == 3; }));
        for (const auto& device : server.devices) device->broken = true;
        const auto failed = Clock::now();
        server.join();
        for (std::thread& person : people) person.join();
        CHECK(Clock::now() - failed < 1s);
        CHECK(server.code == 5);
        for (const std::string& answer : answers) {
            CHECK(answer.find("503") == 0);
            CHECK(answer.find("device_error") != std::string::npos);
        }
    }

    TEST_CASE("serve replicas: SIGTERM lets the answers of all of them end, and saves their states") {
        const std::vector<std::string> flags = {"--data-parallel", "2", "-np", "1", "-c", "2048",
                                                "--drain-timeout", "60"};
        ServerProcess server(flags);
        std::vector<std::string> answers(3);
        std::vector<std::thread> people;
        for (std::string& answer : answers)
            people.emplace_back([&] {
                auto c = server.client();
                const auto r = c.Post("/v1/chat/completions", story(40).dump(), "application/json");
                answer = r ? std::to_string(r->status) + " " + r->body : "";
            });
        REQUIRE(within(10s, [&] {
            auto c = server.client();
            const auto r = c.Get("/metrics");
            return r && r->body.find("\nquern_requests_total 3\n") != std::string::npos;
        }));
        server.signal(SIGTERM);
        for (std::thread& person : people) person.join();
        for (const std::string& answer : answers) CHECK(content(answer) == content(answers[0]));
        CHECK(server.wait() == 0);
    }

    TEST_CASE("serve replicas: what cannot be told apart from a split, or named, is refused") {
        const auto refused = [](std::vector<std::string> args) {
            std::vector<char*> argv;
            args.insert(args.begin(), {"quern", "--synthetic", "tiny"});
            for (std::string& a : args) argv.push_back(a.data());
            ServeOptions options;
            try {
                parse_serve_options(static_cast<int>(argv.size()), argv.data(), options);
                const LoadOptions load{
                    .synthetic = "tiny", .mix = "xs", .gpu = options.gpu, .devices = options.devices};
                load_replicas(load, options.replicas);
            } catch (const Error& error) {
                return std::string(error.what());
            }
            return std::string();
        };
        const auto says = [&](std::vector<std::string> args, const char* part) {
            const std::string text = refused(std::move(args));
            CAPTURE(text);
            CHECK(text.find(part) != std::string::npos);
        };
        says({"-dp", "2", "-tp", "2"}, "--data-parallel and -tp 2");
        says({"--data-parallel-size", "2", "-sm", "layer"}, "leave out -sm layer");
        says({"--data-parallel", "0"}, "--data-parallel");
        says({"--data-parallel", "2", "--device", "0", "-ngl", "0"},
             "--device names 1 GPU, and --data-parallel asks for 2");
        CHECK(refused({"--data-parallel", "2", "-ngl", "0"}) == "");
    }
}

}  // namespace
}  // namespace quern
