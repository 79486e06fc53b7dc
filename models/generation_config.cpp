#include "models/generation_config.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"

namespace quern {
namespace {

std::optional<float> number(const Checkpoint& checkpoint, const char* key) {
    const nlohmann::json& g = checkpoint.generation_config();
    const auto it = g.find(key);
    if (it == g.end() || it->is_null()) return {};
    if (!it->is_number() || !std::isfinite(it->get<float>()))
        FAIL(model, "{}: '{}' should be a number, but is {}", checkpoint.files().generation_config, key,
             it->dump());
    return it->get<float>();
}

void read_eos(const Checkpoint& checkpoint, int64_t vocab_rows, std::vector<int32_t>& ids) {
    const nlohmann::json& g = checkpoint.generation_config();
    const auto eos = g.find("eos_token_id");
    if (eos == g.end() || eos->is_null()) return;
    ids.clear();
    for (const nlohmann::json& id : eos->is_array() ? *eos : nlohmann::json::array({*eos})) {
        if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= vocab_rows)
            FAIL(model, "{}: 'eos_token_id' should be token ids below {}, but has {}",
                 checkpoint.files().generation_config, vocab_rows, id.dump());
        ids.push_back(id.get<int32_t>());
    }
}

}  // namespace

GenerationDefaults read_generation_defaults(const Checkpoint& checkpoint,
                                            const std::vector<int32_t>& config_eos, int64_t vocab_rows) {
    GenerationDefaults d;
    d.eos_ids = config_eos;
    const nlohmann::json& g = checkpoint.generation_config();
    if (!g.is_object()) {
        d.origin = "built in: the checkpoint has no generation_config.json";
        return d;
    }
    d.origin = "generation_config.json";
    d.temperature = number(checkpoint, "temperature");
    d.top_p = number(checkpoint, "top_p");
    d.min_p = number(checkpoint, "min_p");
    d.repetition_penalty = number(checkpoint, "repetition_penalty");
    if (const auto k = number(checkpoint, "top_k")) d.top_k = static_cast<int>(std::clamp(*k, 0.0f, 1e9f));
    const auto do_sample = g.find("do_sample");
    d.greedy = do_sample != g.end() && do_sample->is_boolean() && !do_sample->get<bool>();
    read_eos(checkpoint, vocab_rows, d.eos_ids);
    return d;
}

}  // namespace quern
