#include "launches/step_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "tools/engine/plan_cache.h"
#include "tools/engine/scheduler.h"

namespace quern::test {

namespace fs = std::filesystem;

std::vector<ModelChoice> all_models() {
    std::vector<ModelChoice> list;
    for (const char* shape : {"qwen3.6-35b-a3b", "qwen3.6-27b-shape", "tiny", "tiny-dense"})
        for (const char* mix : {"aeon", "xs", "fp8-head"}) list.push_back({shape, mix});
    for (const char* kv : {"fp8", "nvfp4", "tq4", "k8v4"})
        for (const char* shape : {"qwen3.6-35b-a3b", "tiny"})
            list.push_back({.shape = shape, .mix = "aeon", .kv = kv});
    for (const char* mix : {"aeon", "xs", "nvidia", "qwen-fp8"})
        for (const int ranks : {2, 4})
            for (const char* shape : {"qwen3.6-35b-a3b", "qwen3.6-27b-shape"})
                list.push_back({.shape = shape, .mix = mix, .ranks = ranks});
    return list;
}

std::vector<ModelChoice> some_models() {
    return {{"qwen3.6-35b-a3b", "aeon"},
            {"qwen3.6-35b-a3b", "xs"},
            {"qwen3.6-27b-shape", "fp8-head"},
            {"tiny", "fp8-head"},
            {"tiny-dense", "aeon"},
            {.shape = "qwen3.6-35b-a3b", .mix = "aeon", .kv = "fp8"},
            {.shape = "tiny", .mix = "aeon", .kv = "tq4"},
            {.shape = "qwen3.6-35b-a3b", .mix = "aeon", .ranks = 2},
            {.shape = "qwen3.6-27b-shape", .mix = "aeon", .ranks = 4}};
}

std::vector<ModelChoice> small_checkpoints() {
    const fs::path parity = fs::path(QUERN_SOURCE_DIR) / "tests/vectors/parity";
    std::vector<ModelChoice> list;
    for (const auto& entry : fs::recursive_directory_iterator(parity))
        if (entry.path().filename() == "config.json")
            list.push_back({.shape = entry.path().parent_path().string(), .mix = ""});
    std::sort(list.begin(), list.end(),
              [](const ModelChoice& a, const ModelChoice& b) { return a.shape < b.shape; });
    return list;
}

std::string name_of(const ModelChoice& c) {
    if (const fs::path path = c.shape; c.mix.empty())
        return (path.parent_path().filename() / path.filename()).string();
    const std::string name = c.shape + " " + c.mix;
    const std::string cache = c.kv == "auto" ? "" : " kv " + c.kv;
    return name +
           (c.dense == DenseFormat::as_stored ? "" : std::string(" dense ") + dense_format_name(c.dense)) +
           cache + (c.ranks == 1 ? "" : fmt::format(" on {} ranks", c.ranks));
}

std::vector<BatchShape> all_steps(const PlacedModel& model) {
    std::vector<BatchShape> steps;
    for (int64_t rows = 1; rows <= kMaxAnswerRows; ++rows) steps.push_back(model.answers(rows));
    for (const int64_t rows : {2, 8, 9, 16, 17, 33, 64})
        steps.push_back(model.answers(rows, (rows + kMaxAnswerSlice - 1) / kMaxAnswerSlice));
    for (const int64_t rows : {1, 2, 50, 64, 65, 200, 1000, 2048, 8192}) steps.push_back(model.prompt(rows));
    for (const int64_t rows : {2, 65, 2048}) steps.push_back(model.prompt(rows, 2));
    for (const int64_t rows : {64, 200}) {
        steps.push_back(model.prompt(rows));
        steps.back().logit_rows = rows;
    }
    return steps;
}

std::vector<BatchShape> some_steps(const PlacedModel& model) {
    std::vector<BatchShape> steps;
    for (const int64_t rows : {1, 2, 8, 9, 17, 64}) steps.push_back(model.answers(rows));
    for (const int64_t rows : {1, 50, 64, 65, 2048}) steps.push_back(model.prompt(rows));
    return steps;
}

std::string name_of(const BatchShape& shape) {
    return fmt::format("{}, {} rows of {} sequences, {} with logits",
                       shape.kind == StepKind::answer ? "answer" : "prompt", shape.tokens, shape.sequences,
                       shape.logit_rows);
}

}  // namespace quern::test
