// ApiClient: asks a server that speaks the OpenAI API, and takes the times of its answers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ggml-like/json.h"

namespace quern {

struct ServerAddress {
    std::string url, key;  // http://HOST:PORT
};

/// One answer.
struct Sample {
    bool good = false;
    double first_ms = 0, total_ms = 0;
    std::vector<double> gaps_ms;  // between pieces of the answer
    int64_t prompt = 0, answer = 0, cached = 0, drafted = 0, accepted = 0;
    std::string text;  // without the thinking
};

/// One connection; not for several threads.
class ApiClient {
  public:
    explicit ApiClient(const ServerAddress& server);
    ~ApiClient();

    /// Streams the answer to a chat request, or with "prompt" in it to a completion; the fields that stream it are added.
    Sample ask(nlohmann::ordered_json body);
    /// A JSON document; null if there is none.
    nlohmann::ordered_json get(const std::string& path);

  private:
    struct Connection;
    std::unique_ptr<Connection> connection_;
};

/// What a server says of itself.
struct ServerFacts {
    std::string model;
    int64_t context = 0;  // tokens; 0: unknown
};
/// Throws Error(usage) for an invalid URL and Error(runtime) if nobody answers there.
ServerFacts greet(const ServerAddress& server);

/// `count` requests, `people` of them at a time, each person the next one when the last one is answered.
struct Crowd {
    std::vector<Sample> samples;
    double seconds = 0;
};
Crowd ask_all(const ServerAddress& server, int64_t people, int64_t count,
              const std::function<nlohmann::ordered_json(int64_t number)>& body);

/// Requests, tokens, and their times (ttft: to the first token; tpot: a token after it; itl: between pieces), with the names of
/// `vllm bench serve`.
nlohmann::ordered_json summary(const Crowd& crowd, int64_t people);

/// The value that so many of all are not above; 0 without values.
double percentile(std::vector<double> values, double share);

}  // namespace quern
