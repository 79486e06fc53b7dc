// Logits and greedy tokens of tiny random Qwen3_5Moe checkpoints against transformers in float32.
// Vectors: tests/vectors/parity, made by scripts/make_parity_vectors.py.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "ggml-like/safetensors.h"
#include "models/model.h"
#include "tools/engine/engine.h"

namespace quern {
namespace {

namespace fs = std::filesystem;

template <typename T>
std::vector<T> values(const SafetensorsFile& file, const char* name) {
    const SafeTensor* t = file.find(name);
    REQUIRE_MESSAGE(t != nullptr, name);
    std::vector<T> list((t->end - t->begin) / sizeof(T));
    std::memcpy(list.data(), t->data, list.size() * sizeof(T));
    return list;
}

struct Golden {
    std::vector<int32_t> prompt, greedy, positions;
    std::vector<float> logits;
};

Golden read_golden(const fs::path& path) {
    const SafetensorsFile file = SafetensorsFile::open(path.string());
    return {values<int32_t>(file, "prompt_ids"), values<int32_t>(file, "greedy_ids"),
            values<int32_t>(file, "positions"), values<float>(file, "logits")};
}

std::vector<fs::path> goldens() {
    std::vector<fs::path> list;
    for (const auto& entry :
         fs::recursive_directory_iterator(fs::path(QUERN_SOURCE_DIR) / "tests/vectors/parity"))
        if (entry.path().string().ends_with(".golden.safetensors")) list.push_back(entry.path());
    std::sort(list.begin(), list.end());
    return list;
}

void compare(const fs::path& path) {
    const Golden golden = read_golden(path);
    std::string checkpoint = path.string();
    checkpoint.resize(checkpoint.size() - std::strlen(".golden.safetensors"));
    const auto backend = make_cpu_backend(2);
    const auto model = load_model(checkpoint, *backend, {.tokenizer = false, .progress = {}});
    const int64_t vocab = model->info().vocab_rows;

    double difference = 0, norm = 0;
    size_t next = 0;
    Request request;
    request.prompt = golden.prompt;
    request.sampling.temperature = 0;
    request.max_tokens = static_cast<int64_t>(golden.greedy.size());
    request.on_prompt_logits = [&](int64_t position, const float* logits) {
        if (next == golden.positions.size() || golden.positions[next] != position) return;
        const float* expected = golden.logits.data() + static_cast<int64_t>(next++) * vocab;
        for (int64_t v = 0; v < vocab; ++v) {
            difference += std::pow(static_cast<double>(logits[v]) - expected[v], 2);
            norm += std::pow(static_cast<double>(expected[v]), 2);
        }
    };
    Engine engine(*model, *backend, {.step_tokens = 64, .prompt_logits = 64});
    const Result result = engine.run(std::move(request));
    CHECK(result.error == "");
    CHECK(next == golden.positions.size());
    CHECK(std::sqrt(difference / norm) < 1e-4);
    CHECK(result.tokens == golden.greedy);
}

TEST_SUITE("cpu") {
    TEST_CASE("parity with transformers") {
        const auto list = goldens();
        CHECK(list.size() >= 24);  // 8 models, 3 formats each, at least
        for (const fs::path& path : list) {
            CAPTURE(path.string());
            compare(path);
        }
    }
}

}  // namespace
}  // namespace quern
