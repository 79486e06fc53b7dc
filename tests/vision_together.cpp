// Images together with drafts and packed KV caches: the same answers, and drafts that are as good after an image as without one.
#include "models/chat_format.h"
#include "models/tokenizer.h"
#include "tools/bench/quality.h"
#include "tools/common/images/decode.h"
#include "tools/common/images/read_images.h"
#include "tools/engine/replay_drafter.h"
#include "vision_models.h"

namespace quern {
namespace {

using namespace test;

std::vector<Request> some_requests(const Seeing& l) {
    std::vector<Request> list;
    for (const char* name : {"one", "two", "three", "wide"}) {
        const SafetensorsFile file =
            SafetensorsFile::open(vision_folder("dense") + "/" + name + ".golden.safetensors");
        std::vector<Image> images;
        for (int i = 0; file.find("image." + std::to_string(i)) != nullptr; ++i)
            images.push_back(decode_image(values<uint8_t>(file, "image." + std::to_string(i))));
        Request r{.images = l.read(images)};
        r.prompt = l.with_keys(values<int32_t>(file, "expanded"), r.images, l.model->info().vision->token);
        r.sampling.temperature = list.size() % 2 == 0 ? 0.0f : 1.0f;
        r.sampling.seed = list.size();
        r.max_tokens = 24;
        r.drafts.full = true;
        list.push_back(std::move(r));
    }
    return list;
}

using Answers = std::vector<std::vector<int32_t>>;

Answers alone(const Seeing& l, const char* kv) {
    Answers answers;
    for (Request& r : some_requests(l)) {
        Engine engine(*l.model, *l.backend, {.context = 512, .kv_type = kv});
        answers.push_back(engine.run(std::move(r)).tokens);
    }
    return answers;
}

Answers together(const Seeing& l, Engine& engine) {
    std::vector<RequestId> ids;
    for (Request& r : some_requests(l)) ids.push_back(engine.submit(std::move(r)));
    while (engine.step()) {
    }
    Answers answers;
    for (const RequestId id : ids) {
        Result result = engine.take(id);
        CHECK(result.error == "");
        answers.push_back(std::move(result.tokens));
    }
    return answers;
}

/// The share of the MTP layer's drafts that the demo accepts; after a question about an image or without.
double foreseen(const Model& model, Engine& engine, bool seeing) {
    int64_t drafted = 0, accepted = 0;
    const auto questions = read_questions(source_dir() + "/models/demo/eval.jsonl");
    const auto drawing =
        read_image_file(source_dir() + "/models/demo/drawing.png", model, engine.image_sizes());
    for (size_t i = 0; i < questions.size(); i += 24) {
        std::vector<Message> messages = questions[i].messages;
        if (seeing) {
            Message look{.role = "user", .content = "What do you see?"};
            look.images.push_back({.image = drawing});
            const auto at = messages.begin() + (messages.front().role == "system");
            messages.insert(at, {look, {.role = "assistant", .content = "An orange 4."}});
        }
        const RenderedPrompt prompt =
            model.chat().render(messages, questions[i].tools, {.thinking = questions[i].thinking});
        Request r{.prompt = encode_prompt(prompt, *model.tokenizer()), .images = prompt.images()};
        r.sampling.temperature = 0;
        r.max_tokens = 60;
        r.stop_ids = model.generation().eos_ids;
        r.drafts.full = true;
        r.on_round = [&](int64_t, std::span<const int32_t> draft, int64_t kept) {
            drafted += static_cast<int64_t>(draft.size());
            accepted += kept;
        };
        CHECK(engine.run(std::move(r)).error == "");
    }
    REQUIRE(drafted > 100);
    return static_cast<double>(accepted) / static_cast<double>(drafted);
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("vision: drafts, packed KV caches, kept states and a crowd, all together, change no answer") {
        const Seeing l("dense", make_cpu_backend(2));
        const Answers plain = alone(l, "auto");
        int differing = 0;
        for (const char* kv : {"fp8", "nvfp4", "tq4", "k8v4"}) {
            CAPTURE(std::string(kv));
            const Answers expected = alone(l, kv);
            differing += expected != plain;
            auto replay = std::make_shared<ReplayDrafter>(std::vector<double>{0.9, 0.7, 0.5}, 5);
            std::vector<Request> requests = some_requests(l);
            for (size_t i = 0; i < requests.size(); ++i) replay->expect(requests[i].prompt, expected[i]);
            for (const bool mtp : {true, false}) {
                CAPTURE(mtp);
                EngineOptions options{
                    .context = 512,
                    .sequences = 4,
                    .step_tokens = 64,
                    .kv_type = kv,
                    .cache_bytes = 64 << 20,
                    .speculation = {.kind = mtp ? DrafterKind::mtp : DrafterKind::automatic, .draft_max = 3}};
                if (!mtp) options.drafter = replay;
                Engine engine(*l.model, *l.backend, options);
                for (int round = 0; round < 2; ++round) CHECK(together(l, engine) == expected);
                CHECK(engine.cache_stats().hits > 0);
            }
        }
        CHECK(differing > 0);  // or no format was in use
    }
}

TEST_SUITE("model") {
    TEST_CASE("vision: the demo's MTP layer foresees as much after an image as without" *
              doctest::test_suite("slow")) {
        const auto backend = make_cpu_backend(2);
        const auto model =
            load_model(source_dir() + "/models/demo", *backend, {.mtp = MtpUse::required, .vision = true});
        Engine engine(*model, *backend,
                      {.context = 1024, .speculation = {.kind = DrafterKind::mtp, .draft_max = 1}});
        const double without = foreseen(*model, engine, false), with = foreseen(*model, engine, true);
        MESSAGE("accepted " << without << " without, " << with << " with images");
        CHECK(without > 0.7);
        CHECK(with > without - 0.15);
    }
}

}  // namespace quern
