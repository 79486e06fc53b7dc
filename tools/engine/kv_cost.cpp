#include "tools/engine/kv_cost.h"

#include <chrono>

#include "ggml-like/check.h"
#include "models/tokenizer.h"
#include "tools/engine/sample_text.h"

namespace quern {
namespace {

constexpr int64_t kDeviceTokens = 8192, kCpuTokens = 2000;
constexpr int64_t kReadingRows = 64;  // of logits in a step, and examined together

}  // namespace

std::vector<int32_t> kv_cost_tokens(const Model& model, const Backend& backend) {
    CHECK(model.tokenizer() != nullptr, "[kv_cost] {} has no tokenizer", model.info().name);
    const std::vector<int32_t> text = model.tokenizer()->encode(kSampleText, Tokenizer::Markers::control);
    const int64_t wanted = backend.captures() ? kDeviceTokens : kCpuTokens;
    const auto count = static_cast<size_t>(std::min(wanted, model.info().context - 1));
    std::vector<int32_t> tokens;
    while (!text.empty() && tokens.size() < count) tokens.push_back(text[tokens.size() % text.size()]);
    return tokens;
}

EngineOptions reading_options(const Model& model, int64_t tokens, const std::string& kv_type,
                              const std::string& kv_type_v) {
    return {.context = std::min<int64_t>(tokens + 1, model.info().context),
            .sequences = 1,
            .step_tokens = kReadingRows,
            .prompt_logits = kReadingRows,
            .kv_type = kv_type,
            .kv_type_v = kv_type_v};
}

DenseCost measure_kv_cost(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
                          const std::string& kv_type, const std::string& kv_type_v) {
    const auto begin = std::chrono::steady_clock::now();
    const auto count = static_cast<int64_t>(tokens.size());
    const Reading before = read_text(model, backend, tokens, reading_options(model, count));
    DenseCost cost =
        compare_reading(before, model, backend, reading_options(model, count, kv_type, kv_type_v));
    cost.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return cost;
}

}  // namespace quern
