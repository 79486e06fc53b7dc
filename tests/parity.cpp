// Logits and greedy tokens of tiny random Qwen3_5Moe and Qwen3_5 checkpoints against transformers in float32.
// Vectors: tests/vectors/parity, made by scripts/make_parity_vectors.py.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "engine_harness.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/safetensors.h"
#include "models/checkpoint_files.h"
#include "ops/second_backend.h"

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
         fs::recursive_directory_iterator(fs::path(test::source_dir()) / "tests/vectors/parity"))
        if (entry.path().string().ends_with(".golden.safetensors")) list.push_back(entry.path());
    std::sort(list.begin(), list.end());
    return list;
}

struct Difference {
    double error = 0;  // |ours - theirs| / |theirs| over all compared positions
    bool same_tokens = false;
};

Difference compare(const fs::path& path, std::unique_ptr<Backend> backend, int64_t step_tokens) {
    const Golden golden = read_golden(path);
    std::string checkpoint = path.string();
    checkpoint.resize(checkpoint.size() - std::strlen(".golden.safetensors"));
    const test::Loaded l(checkpoint, std::move(backend));
    const int64_t vocab = l.model->info().vocab_rows;

    double difference = 0, norm = 0;
    size_t next = 0;
    Request request;
    request.prompt = golden.prompt;
    request.sampling.temperature = 0;
    request.max_tokens = static_cast<int64_t>(golden.greedy.size());
    request.on_prompt_logits = [&](const PromptLogits& logits) {
        for (size_t i = 0; i < logits.count(); ++i) {
            const int64_t position = logits.first + static_cast<int64_t>(i);
            if (next == golden.positions.size() || golden.positions[next] != position) continue;
            const float* expected = golden.logits.data() + static_cast<int64_t>(next++) * vocab;
            for (int64_t v = 0; v < vocab; ++v) {
                difference += std::pow(static_cast<double>(logits.row(i)[v]) - expected[v], 2);
                norm += std::pow(static_cast<double>(expected[v]), 2);
            }
        }
    };
    Engine engine(*l.model, *l.backend, {.step_tokens = step_tokens, .prompt_logits = step_tokens});
    const Result result = engine.run(std::move(request));
    CHECK(result.error == "");
    CHECK(next == golden.positions.size());
    return {std::sqrt(difference / norm), result.tokens == golden.greedy};
}

/// What rounding activations to BF16 costs transformers itself on each checkpoint, by "model/format".
std::map<std::string, double> bf16_errors() {
    const std::string path = test::source_dir() + "/tests/vectors/parity/manifest.json";
    const nlohmann::json manifest = parse_json(read_text_file(path, 1 << 20), path);
    std::map<std::string, double> errors;
    for (const auto& model : manifest.at("models"))
        for (const auto& [format, measured] : model.at("formats").items())
            errors[model.at("model").get<std::string>() + "/" + format] = measured.at("bf16");
    return errors;
}

TEST_SUITE("cpu") {
    TEST_CASE("parity with transformers") {
        const auto list = goldens();
        CHECK(list.size() >= 40);  // 11 models in 1 to 8 formats
        for (const fs::path& path : list) {
            CAPTURE(path.string());
            const Difference found = compare(path, make_cpu_backend(2), 64);
            CHECK(found.error < 1e-4);
            CHECK(found.same_tokens);
        }
    }
}

TEST_SUITE("cuda") {
    TEST_CASE("gpu model: parity with transformers, as near as its own BF16") {
        REQUIRE_NOTHROW(test::make_test_cuda_backend());
        const auto bf16 = bf16_errors();
        int compared = 0;
        for (const fs::path& path : goldens()) {
            std::string name = path.parent_path().filename() / path.filename();
            name.resize(name.size() - std::strlen(".golden.safetensors"));
            for (const int64_t step_tokens : {512, 1}) {
                CAPTURE(name);
                CAPTURE(step_tokens);
                CHECK(compare(path, test::make_test_cuda_backend(), step_tokens).error < 1.5 * bf16.at(name));
                ++compared;
            }
        }
        MESSAGE(compared << " comparisons");
    }
}

}  // namespace
}  // namespace quern
