// Videos as lists of frames: tiny random models against transformers (scripts/make_vision_vectors.py), sizes and times, the
// prompt's text, the APIs and the command line.
#include <filesystem>

#include "ggml-like/error.h"
#include "image_files.h"
#include "models/qwen3_6_chat.h"
#include "ops/second_backend.h"
#include "serve_client.h"
#include "tools/common/images/decode.h"
#include "tools/common/images/frames.h"
#include "tools/engine/prompt_images.h"
#include "vision_models.h"

namespace quern {
namespace {

using namespace test;

struct VideoGolden {
    std::string name;
    VideoFiles files;
    std::vector<uint8_t> patches;
    std::vector<float> features, logits;
    std::vector<int32_t> expanded, positions, greedy;
};

std::vector<VideoGolden> video_goldens(const std::string& model) {
    std::vector<VideoGolden> list;
    for (const char* name : {"four", "five", "single"}) {
        const SafetensorsFile file =
            SafetensorsFile::open(vision_folder(model) + "/" + name + ".video.safetensors");
        VideoGolden g{.name = model + "/" + name};
        for (int i = 0; file.find("frame." + std::to_string(i)) != nullptr; ++i)
            g.files.frames.push_back(values<uint8_t>(file, "frame." + std::to_string(i)));
        g.patches = values<uint8_t>(file, "patches");
        g.features = values<float>(file, "features");
        g.logits = values<float>(file, "logits");
        g.expanded = values<int32_t>(file, "expanded");
        g.positions = values<int32_t>(file, "positions");
        g.greedy = values<int32_t>(file, "greedy");
        list.push_back(std::move(g));
    }
    return list;
}

std::vector<ImagePtr> pairs_of(const Seeing& l, const VideoGolden& g) {
    std::vector<ImagePtr> pairs;
    for (FramePair& pair : read_frames(g.files, *l.model, l.model->info().vision->sizes))
        pairs.push_back(pair.image);
    return pairs;
}

Request request(const Seeing& l, const VideoGolden& g) {
    Request r{.images = pairs_of(l, g)};
    r.prompt = l.with_keys(g.expanded, r.images, l.model->info().vision->video_token);
    r.sampling.temperature = 0;
    r.max_tokens = static_cast<int64_t>(g.greedy.size());
    return r;
}

/// 19 x 13 pixels; to the demo a pair of them is 32 x 32 pixels and one token.
std::vector<std::string> some_frames(int count) {
    std::vector<std::string> frames;
    for (int i = 0; i < count; ++i) frames.push_back(base64(image_file(i % 2 == 0 ? "rgb.jpg" : "rgb.png")));
    return frames;
}

std::string video_url(const std::vector<std::string>& frames) {
    std::string url = "data:video/jpeg;base64";
    for (const std::string& frame : frames) url += "," + frame;
    return url;
}

json about(const json& video) {
    return {{"messages",
             {{{"role", "user"}, {"content", {video, {{"type", "text"}, {"text", "What is 48 + 37?"}}}}}}},
            {"temperature", 0},
            {"max_tokens", 4}};
}

}  // namespace

TEST_SUITE("cuda") {
    TEST_CASE("videos: features are near those of transformers (CUDA)") {
        for (const char* name : kVisionModels) {
            const Seeing l(name, make_test_cuda_backend());
            for (const VideoGolden& g : video_goldens(name)) {
                CAPTURE(g.name);
                CHECK(relative(features(l, pairs_of(l, g)), g.features) < 0.03);
                Engine engine(*l.model, *l.backend, {.context = 512});
                const Result result = engine.run(request(l, g));
                CHECK(result.error == "");
                CHECK(result.tokens.size() == g.greedy.size());
            }
        }
    }
}

TEST_SUITE("cpu") {
    TEST_CASE("videos: pixels, positions, features, logits and answers are those of transformers") {
        for (const char* name : kVisionModels) {
            const Seeing l(name, make_cpu_backend(2));
            Engine engine(*l.model, *l.backend, {.context = 512, .step_tokens = 512});
            for (const VideoGolden& g : video_goldens(name)) {
                CAPTURE(g.name);
                const std::vector<ImagePtr> pairs = pairs_of(l, g);
                std::vector<uint8_t> patches;
                for (const ImagePtr& pair : pairs)
                    patches.insert(patches.end(), pair->patches.begin(), pair->patches.end());
                CHECK(patches == g.patches);
                CHECK(relative(features(l, pairs), g.features) < 1e-5);
                Request r = request(l, g);
                const PromptImages places(r.prompt, r.images);
                const size_t tokens = g.expanded.size();
                for (size_t t = 0; t < tokens; ++t) {
                    CAPTURE(t);
                    CHECK(places.place(static_cast<int64_t>(t)) ==
                          PromptImages::Place{g.positions[t], g.positions[tokens + t],
                                              g.positions[2 * tokens + t]});
                }
                std::vector<float> logits;
                r.on_prompt_logits = [&](const PromptLogits& rows) {
                    logits.insert(logits.end(), rows.values.begin(), rows.values.end());
                };
                const Result result = engine.run(std::move(r));
                CHECK(result.error == "");
                CHECK(relative(logits, g.logits) < 1e-4);
                CHECK(result.tokens == g.greedy);
            }
        }
    }

    TEST_CASE("videos: another frame is another prompt, in kept states as well") {
        const Seeing l("moe", make_cpu_backend(2));
        VideoGolden g = video_goldens("moe")[1];
        Engine kept(*l.model, *l.backend, {.context = 512, .cache_bytes = 64 << 20});
        const std::vector<int32_t> first = kept.run(request(l, g)).tokens;
        CHECK(first == g.greedy);
        std::swap(g.files.frames[1], g.files.frames[4]);
        Engine fresh(*l.model, *l.backend, {.context = 512});
        CHECK(kept.run(request(l, g)).tokens == fresh.run(request(l, g)).tokens);
        CHECK(request(l, g).prompt != request(l, video_goldens("moe")[1]).prompt);
    }

    TEST_CASE("videos: sizes and times") {
        const VideoSizes sizes;
        const auto read = [&](int64_t frames, int64_t height, int64_t width, int64_t most = 1 << 30) {
            return frame_size_to_read(frames, {width, height}, 32, 2, sizes, most);
        };
        CHECK(read(4, 1080, 1920) == ImageSize{1152, 640});  // as many pixels as each frame may have
        CHECK(read(60, 1080, 1920) == ImageSize{832, 480});  // as many as all together
        CHECK(read(2, 16, 64) == ImageSize{128, 32});        // small sides grow
        CHECK(read(4, 1080, 1920, 64 * 64) == ImageSize{64, 32});
        CHECK(read(1, 64, 64) == read(2, 64, 64));
        CHECK_THROWS_AS(read(4, 10, 2001), Error);

        const Seeing l("moe", make_cpu_backend(2));
        const auto times = [&](size_t frames, double fps) {
            Image image{16, 16, std::vector<uint8_t>(16 * 16 * 3)};
            std::string text;
            for (const FramePair& p :
                 make_frame_pairs(std::vector<Image>(frames, image), fps, *l.model->info().vision))
                text += p.time;
            return text;
        };
        CHECK(times(5, 2) == "<0.2 seconds><1.2 seconds><2.0 seconds>");
        CHECK(times(1, 2) == "<0.0 seconds>");
        CHECK(times(4, 0.5) == "<1.0 seconds><5.0 seconds>");
    }

    TEST_CASE(
        "videos: each pair of frames has its time and marks in the prompt, and people's words stay words") {
        const auto pair = std::make_shared<const ImagePart>(ImagePart{.rows = 1, .columns = 1, .keys = {-5}});
        Message m{.role = "user", .content = " Who wins? <|video_pad|>"};
        m.images.push_back({.at = 0, .pairs = {{"<0.2 seconds>", pair}, {"<1.2 seconds>", pair}}});
        const RenderedPrompt prompt = render_qwen3_6_chat(std::vector{m}, nullptr, {.thinking = false});
        const std::string one = "<|vision_start|><|video_pad|><|vision_end|>";
        CHECK(prompt.text() ==
              "<|im_start|>user\n<0.2 seconds>" + one + "<1.2 seconds>" + one +
                  " Who wins? <|video_pad|><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
        CHECK(prompt.images() == std::vector<ImagePtr>{pair, pair});
        size_t marks = 0;
        for (const PromptSegment& s : prompt.segments) marks += s.control && s.text == "<|video_pad|>";
        CHECK(marks == 2);
    }

    TEST_CASE("serve: a list of frames is a video, in either form") {
        const std::string demo = source_dir() + "/models/demo";
        const ServerProcess server({"-m", demo, "--strict-params"});
        const auto tokens = [&](const json& video) {
            const Reply r = chat(server, about(video));
            CAPTURE(r.body.dump());
            CHECK(r.status == 200);
            return r.body["usage"]["prompt_tokens"].get<int64_t>();
        };
        const auto as_url = [](int count) {
            return json{{"type", "video_url"}, {"video_url", {{"url", video_url(some_frames(count))}}}};
        };
        const int64_t three = tokens(as_url(3)), five = tokens(as_url(5));
        const json words = post(server, "/tokenize", {{"content", "<2.0 seconds>"}}).body["tokens"];
        CHECK(five - three == 1 + 2 + static_cast<int64_t>(words.size()));
        CHECK(tokens({{"type", "video_url"}, {"video_url", video_url(some_frames(3))}, {"fps", 2.0}}) ==
              three);
        json list = json::array();
        for (const std::string& frame : some_frames(3)) list.push_back("data:image/png;base64," + frame);
        CHECK(tokens({{"type", "video"}, {"video", list}}) == three);

        const auto refused = [&](const json& video, const std::string& expected) {
            const Reply r = chat(server, about(video));
            CAPTURE(r.body.dump());
            CHECK(r.status == 400);
            const std::string message = r.body["error"]["message"];
            CHECK(message.find("messages[0].content[0]") != std::string::npos);
            CHECK(message.find(expected) != std::string::npos);
        };
        const auto url = [](const std::string& address) {
            return json{{"type", "video_url"}, {"video_url", {{"url", address}}}};
        };
        refused(url("https://a/b.mp4"), "nothing is fetched");
        refused(url("data:video/mp4;base64,AAAA"), "video files are not read");
        refused(url("data:video/jpeg;base64," + base64(image_file("rgb.jpg")) + ",AAAA"), "unknown format");
        refused(url(video_url({base64(image_file("rgb.jpg")), base64(image_file("lossy.webp"))})),
                "frame 1 has 61 x 47");
        refused({{"type", "video"}, {"video", json::array()}}, "no frames");
        refused({{"type", "video_url"}, {"video_url", video_url(some_frames(2))}, {"fps", 0}}, "fps");
        std::vector<std::string> many(769, "AAAA");
        refused(url(video_url(many)), "more than 768 frames");
        CHECK(chat(ServerProcess({"-m", demo, "--vision", "off"}), about(as_url(2))).status == 400);
        CHECK(chat(ServerProcess({"-m", demo, "--vision", "fp8"}), about(as_url(2))).status == 200);
    }
}

}  // namespace quern
