// Logits and greedy tokens of tiny random Qwen3_5Moe and Qwen3_5 checkpoints against transformers in float32.
// Vectors: tests/vectors/parity, made by scripts/make_parity_vectors.py.
#include <doctest/doctest.h>

#include <algorithm>
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
    double error = 0;   // |ours - theirs| / |theirs| over all compared positions
    double median = 0;  // of one position
    bool same_tokens = false;
};

/// Logits of the prompt as rows of a prompt, or as rows of an answer: then only its first token is the
/// prompt, and the others are the only ones that may come next.
Difference compare(const fs::path& path, std::unique_ptr<Backend> backend, StepKind kind) {
    const Golden golden = read_golden(path);
    std::string checkpoint = path.string();
    checkpoint.resize(checkpoint.size() - std::strlen(".golden.safetensors"));
    const test::Loaded l(checkpoint, std::move(backend));
    const int64_t vocab = l.model->info().vocab_rows;

    double difference = 0, norm = 0;
    std::vector<double> errors;  // of each compared position
    size_t next = 0;
    const auto add = [&](int64_t position, std::span<const float> row) {
        if (next == golden.positions.size() || golden.positions[next] != position) return;
        const float* expected = golden.logits.data() + static_cast<int64_t>(next++) * vocab;
        double row_difference = 0, row_norm = 0;
        for (int64_t v = 0; v < vocab; ++v) {
            row_difference += std::pow(static_cast<double>(row[static_cast<size_t>(v)]) - expected[v], 2);
            row_norm += std::pow(static_cast<double>(expected[v]), 2);
        }
        difference += row_difference;
        norm += row_norm;
        errors.push_back(std::sqrt(row_difference / row_norm));
    };
    Request request;
    request.prompt = golden.prompt;
    request.sampling.temperature = 0;
    request.max_tokens = static_cast<int64_t>(golden.greedy.size());
    size_t position = 0;  // of the row that the next token is chosen from
    if (kind == StepKind::prompt) {
        request.on_prompt_logits = [&](const PromptLogits& logits) {
            for (size_t i = 0; i < logits.count(); ++i)
                add(logits.first + static_cast<int64_t>(i), logits.row(i));
        };
    } else {
        request.prompt.resize(1);
        request.max_tokens += static_cast<int64_t>(golden.prompt.size()) - 1;
        request.allow = [&](int32_t id) {
            return position + 1 >= golden.prompt.size() || id == golden.prompt[position + 1];
        };
        request.on_logits = [&](int32_t, std::span<const float> row) {
            add(static_cast<int64_t>(position++), row);
        };
    }
    const auto given = static_cast<ptrdiff_t>(golden.prompt.size() - request.prompt.size());
    Engine engine(*l.model, *l.backend, {.step_tokens = 64});
    Result result = engine.run(std::move(request));
    CHECK(result.error == "");
    CHECK(next == golden.positions.size());
    result.tokens.erase(result.tokens.begin(), result.tokens.begin() + given);
    REQUIRE(!errors.empty());
    const auto middle = errors.begin() + static_cast<ptrdiff_t>(errors.size() / 2);
    std::nth_element(errors.begin(), middle, errors.end());
    return {std::sqrt(difference / norm), *middle, result.tokens == golden.greedy};
}

/// What rounding activations to BF16 costs transformers itself on each checkpoint, by "model/format". A routing choice
/// that flips decides the error over all positions, but not the median's: tests/vectors/parity/README.md.
std::map<std::string, Difference> bf16_differences() {
    const std::string path = test::source_dir() + "/tests/vectors/parity/manifest.json";
    const nlohmann::json manifest = parse_json(read_text_file(path, 1 << 20), path);
    std::map<std::string, Difference> differences;
    for (const auto& model : manifest.at("models"))
        for (const auto& [format, measured] : model.at("formats").items())
            differences[model.at("model").get<std::string>() + "/" + format] = {
                .error = measured.at("bf16"), .median = measured.at("bf16_median")};
    return differences;
}

TEST_SUITE("cpu") {
    TEST_CASE("parity with transformers") {
        const auto list = goldens();
        CHECK(list.size() >= 40);  // 11 models in 1 to 8 formats
        for (const fs::path& path : list) {
            CAPTURE(path.string());
            for (const StepKind kind : {StepKind::prompt, StepKind::answer}) {
                const Difference found = compare(path, make_cpu_backend(2), kind);
                CHECK(found.error < 1e-4);
                CHECK(found.same_tokens);
            }
        }
    }
}

TEST_SUITE("cuda") {
    TEST_CASE("gpu model: parity with transformers, as near as its own BF16") {
        REQUIRE_NOTHROW(test::make_test_cuda_backend());
        const auto bf16 = bf16_differences();
        int compared = 0;
        double nearest = 0;  // to the limit of a median, in units of transformers' own
        for (const fs::path& path : goldens()) {
            std::string name = path.parent_path().filename() / path.filename();
            name.resize(name.size() - std::strlen(".golden.safetensors"));
            for (const StepKind kind : {StepKind::prompt, StepKind::answer}) {
                CAPTURE(name);
                CAPTURE(kind);
                const Difference found = compare(path, test::make_test_cuda_backend(), kind);
                CHECK(found.error < 1.5 * bf16.at(name).error);
                CHECK(found.median < 1.5 * bf16.at(name).median);
                nearest = std::max(nearest, found.median / bf16.at(name).median);
                ++compared;
            }
        }
        MESSAGE(compared << " comparisons, medians at most " << nearest << " times transformers' own");
    }
}

}  // namespace
}  // namespace quern
