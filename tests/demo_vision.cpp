// What the demo checkpoint says about pictures: greedy answers to questions of tests/vectors/demo/vision, which
// scripts/train_demo_vision.py writes (DIR/vectors) with what PyTorch answered.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "engine_harness.h"
#include "ggml-like/json.h"
#include "models/tokenizer.h"
#include "tools/common/images/read_images.h"
#include "tools/engine/chat_session.h"
#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

const std::string kVectors = test::source_dir() + "/tests/vectors/demo/vision/";

struct SeeingDemo {
    SeeingDemo()
        : backend(make_cpu_backend(2)),
          model(load_model(test::source_dir() + "/models/demo", *backend, {.vision = true})) {}
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;

    Message message(const std::string& picture, const std::string& question) const {
        Message m{.role = "user", .content = question};
        m.images.push_back(
            {.image = read_image_file(kVectors + picture, *model, model->info().vision->sizes)});
        return m;
    }
    Request request(const std::vector<Message>& messages, bool thinking) const {
        const RenderedPrompt prompt = model->chat().render(messages, nullptr, {.thinking = thinking});
        Request r{.prompt = encode_prompt(prompt, *model->tokenizer()), .images = prompt.images()};
        r.sampling.temperature = 0;
        r.max_tokens = 60;
        r.stop_ids = model->generation().eos_ids;
        return r;
    }
};

struct Question {
    std::string image, kind, question, expect;
    bool thinking = false;
};

std::vector<Question> questions() {
    std::ifstream file(kVectors + "questions.jsonl");
    std::vector<Question> list;
    std::set<std::pair<std::string, bool>> kinds;
    for (std::string line; std::getline(file, line);) {
        const auto q = nlohmann::json::parse(line);
        list.push_back({q.at("image"), q.at("kind"), q.at("question"), q.at("expect"), q.at("thinking")});
        kinds.emplace(list.back().kind, list.back().thinking);
    }
    REQUIRE(kinds.size() == 10);  // five kinds, direct and with thinking
    return list;
}

TEST_SUITE("model") {
    TEST_CASE("demo: what it sees, alone and in a crowd") {
        const SeeingDemo demo;
        Engine alone(*demo.model, *demo.backend, {.context = 512});
        ChatSession session(alone);
        Engine crowd(*demo.model, *demo.backend, {.context = 512, .sequences = 10});
        std::vector<RequestId> ids;
        std::vector<std::vector<int32_t>> tokens;
        for (const Question& q : questions()) {
            CAPTURE(q.image);
            CAPTURE(q.question);
            const std::vector<Message> messages = {demo.message(q.image, q.question)};
            ChatSettings settings{.thinking = q.thinking, .max_tokens = 60};
            settings.sampling.temperature = 0;
            const ChatAnswer answer = session.respond(messages, settings, {});
            CHECK(answer.reason == FinishReason::stop);
            CHECK(answer.message.content == q.expect);
            CHECK((answer.reasoning_tokens > 0) == q.thinking);
            tokens.push_back(alone.run(demo.request(messages, q.thinking)).tokens);
            CHECK(static_cast<int64_t>(tokens.back().size()) >= answer.answer_tokens);
            ids.push_back(crowd.submit(demo.request(messages, q.thinking)));
        }
        while (crowd.step()) {
        }
        for (size_t i = 0; i < ids.size(); ++i) {
            CAPTURE(i);
            const Result result = crowd.take(ids[i]);
            CHECK(result.error == "");
            CHECK(result.tokens == tokens[i]);
        }
    }

    TEST_CASE("demo: another question about a picture takes its rows from the kept state") {
        const SeeingDemo demo;
        Engine warm(*demo.model, *demo.backend, {.context = 512, .cache_bytes = 64 << 20});
        Engine cold(*demo.model, *demo.backend, {.context = 512});
        const std::string words =
            "You are a helpful assistant. Answer questions about pictures. They show digits, circles, "
            "squares, triangles, stars and crosses. Answer questions about colours, numbers and shapes. Be "
            "brief and say what is in the picture. Answer all questions in one short sentence.";
        std::string system = words.substr(0, words.find('.') + 1);
        const auto asking = [&](const std::string& question) {
            return demo.request({{.role = "system", .content = system}, demo.message("022.png", question)},
                                false);
        };
        const auto end_of_picture = [&] {
            const Request r = asking("x");
            const auto& keys = r.images.front()->keys;
            return std::search(r.prompt.begin(), r.prompt.end(), keys.begin(), keys.end()) -
                   r.prompt.begin() + static_cast<int64_t>(keys.size());
        };
        while (end_of_picture() % kPageTokens != 0) {  // where states are kept
            REQUIRE(system.size() < words.size());
            system += words[system.size()];
        }
        const int64_t end = end_of_picture();
        const std::pair<std::string, std::string> known[] = {
            {"Describe the picture.", "Four yellow circles."},
            {"Which colour do you see?", "It is yellow."},
            {"Which shape do you see?", "They are circles."},
            {"Count them.", "There are 4."},
        };
        for (const auto& answered : known) {
            const std::string &question = answered.first, &expect = answered.second;
            CAPTURE(question);
            const Result result = warm.run(asking(question));
            CHECK(result.error == "");
            CHECK(result.cached_tokens == (question == known[0].first ? 0 : end));
            CHECK(demo.model->tokenizer()->decode(result.tokens, true) == expect);
            CHECK(result.tokens == cold.run(asking(question)).tokens);
        }
    }
}

}  // namespace
}  // namespace quern
