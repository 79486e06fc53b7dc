// Models on several devices by layers: groups of simulated devices, and a request whose logits are all recorded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "counted_backend.h"
#include "engine_harness.h"
#include "ggml-like/stage_group.h"

namespace quern::test {

/// Stages that look like devices: each has `total` bytes of memory, or those of `totals`.
struct DeviceStages {
    explicit DeviceStages(int stages)
        : DeviceStages(std::vector<int64_t>(static_cast<size_t>(stages), int64_t{1} << 34)) {}
    explicit DeviceStages(const std::vector<int64_t>& totals) {
        std::vector<std::unique_ptr<Backend>> list;
        for (const int64_t total : totals) {
            auto stage = std::make_unique<CountedBackend>(total);
            each.push_back(stage.get());
            list.push_back(std::move(stage));
        }
        group = std::make_unique<StageGroup>(std::move(list));
    }
    std::vector<CountedBackend*> each;
    std::unique_ptr<Backend> group;
};

/// A loaded checkpoint whose layers are shared out so; on one device with one share.
struct SplitModel {
    SplitModel(const std::string& checkpoint, const std::vector<double>& shares, bool device = false,
               OpenOptions options = {.tokenizer = false})
        : backend(on(static_cast<int>(shares.size()), device)),
          model(load_model(checkpoint, *backend, std::move(options), {}, shares)) {}

    static std::unique_ptr<Backend> on(int stages, bool device) {
        if (stages == 1) return device ? test::device() : test::cpu();
        return device ? std::move(DeviceStages(stages).group) : make_cpu_stages(2, stages);
    }

    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
};

/// A prompt's logits and the answer, with the logits that its tokens were chosen from.
struct Outcome {
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    std::string error;
    int64_t cached = 0;

    friend bool operator==(const Outcome&, const Outcome&) = default;
};

inline Request recorded(std::vector<int32_t> prompt, Outcome& to, bool prompt_logits, int64_t tokens = 12) {
    Request r;
    r.prompt = std::move(prompt);
    r.sampling.temperature = 0;
    r.max_tokens = tokens;
    r.on_logits = [&to](int32_t, std::span<const float> row) {
        to.logits.insert(to.logits.end(), row.begin(), row.end());
    };
    if (prompt_logits)
        r.on_prompt_logits = [&to](const PromptLogits& rows) {
            to.logits.insert(to.logits.end(), rows.values.begin(), rows.values.end());
        };
    return r;
}

inline void take(Engine& engine, RequestId id, Outcome& to) {
    Result result = engine.take(id);
    to.tokens = std::move(result.tokens);
    to.error = result.error;
    to.cached = result.cached_tokens;
}

inline Outcome run(Engine& engine, std::vector<int32_t> prompt, bool prompt_logits = false) {
    Outcome out;
    const RequestId id = engine.submit(recorded(std::move(prompt), out, prompt_logits));
    while (!engine.finished(id)) engine.step();
    take(engine, id, out);
    return out;
}

/// All of them at the same time, each submitted some steps after the one before.
inline std::vector<Outcome> run_together(Engine& engine, const std::vector<std::vector<int32_t>>& prompts) {
    std::vector<Outcome> out(prompts.size());
    std::vector<RequestId> ids;
    for (size_t i = 0; i < prompts.size(); ++i) {
        ids.push_back(engine.submit(recorded(prompts[i], out[i], false, 6 + static_cast<int64_t>(i))));
        engine.step();
    }
    while (engine.step()) {
    }
    for (size_t i = 0; i < prompts.size(); ++i) take(engine, ids[i], out[i]);
    return out;
}

}  // namespace quern::test
