#include "tools/engine/stage_memory.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "tools/engine/result_rooms.h"
#include "tools/engine/state_pool.h"

namespace quern {
namespace {

/// Rows of prompts in a step: of several steps each stage has one at the same time.
constexpr int64_t kStagedStep = 2048;

/// What the last device has beside its layers.
const char* at_the_end(const MemoryPlan& plan) {
    return plan.mtp ? ", head, MTP layer" : plan.dflash ? ", head, drafter" : ", head";
}

std::string stage_name(const Model& model, const Backend& backend, int stage, const MemoryPlan& plan) {
    const LayerRange own = model.of_stage(stage).own_layers();
    return fmt::format("device {} of {} ({}{}{}), {}, {}", stage + 1, model.stages(),
                       stage == 0 ? "embedding, " : "", describe(own),
                       stage + 1 == model.stages() ? at_the_end(plan) : "", backend.of_stage(stage).name(),
                       backend.of_stage(stage).description());
}

std::vector<MemoryPlan> plan_each(const Model& model, const Backend& backend, const EngineOptions& options,
                                  bool weights_placed) {
    std::vector<MemoryPlan> plans;
    EngineOptions each = options;
    if (each.step_tokens == 0 && backend.captures()) each.step_tokens = kStagedStep;
    const int64_t results =
        ResultRooms::bytes(steps_on_their_way(backend, options), options.sequences, model.info().vocab_rows);
    for (int s = 0; s < model.stages(); ++s) {
        const bool last = s + 1 == model.stages();
        plans.push_back(make_memory_plan(model.of_stage(s), backend.of_stage(s), each, weights_placed,
                                         last ? results : 0));
        plans.back().device_name = stage_name(model, backend, s, plans.back());
        for (StateSpec& spec : plans.back().specs) spec.stage = s;
    }
    return plans;
}

/// A kept state has a part on every device that has recurrent state.
void keep_as_many(std::vector<MemoryPlan>& plans) {
    int64_t least = -1;
    for (const MemoryPlan& p : plans)
        if (snapshots_bytes(p.specs, 1) > 0)
            least = least < 0 ? p.kept_states : std::min(least, p.kept_states);
    for (MemoryPlan& p : plans) {
        p.kept_states = std::max<int64_t>(0, least);
        p.kept = snapshots_bytes(p.specs, p.kept_states);
    }
}

void add_weights(MemoryPlan& sum, const MemoryPlan& part) {
    sum.mapped += part.mapped;
    for (const MemoryPlan::Group& g : part.weights) {
        const auto same = std::find_if(sum.weights.begin(), sum.weights.end(),
                                       [&](const MemoryPlan::Group& own) { return own.name == g.name; });
        if (same == sum.weights.end())
            sum.weights.push_back(g);
        else
            same->bytes += g.bytes;
    }
}

void add(MemoryPlan& sum, const MemoryPlan& part) {
    add_weights(sum, part);
    sum.specs.insert(sum.specs.end(), part.specs.begin(), part.specs.end());
    for (const auto field :
         {&MemoryPlan::token_bytes, &MemoryPlan::kv, &MemoryPlan::slot_bytes, &MemoryPlan::recurrent,
          &MemoryPlan::kept, &MemoryPlan::arena, &MemoryPlan::inputs, &MemoryPlan::between,
          &MemoryPlan::results, &MemoryPlan::reserve})
        sum.*field += part.*field;
}

}  // namespace

MemoryPlan plan_stages(const Model& model, const Backend& backend, const EngineOptions& options,
                       bool weights_placed) {
    CHECK(model.stages() == backend.stages(), "[stages] a model of {} stages on {}", model.stages(),
          backend.stages());
    std::vector<MemoryPlan> plans = plan_each(model, backend, options, weights_placed);
    if (options.context == 0) {
        EngineOptions fixed = options;
        fixed.context = plans.front().context;
        for (const MemoryPlan& p : plans) fixed.context = std::min(fixed.context, p.context);
        plans = plan_each(model, backend, fixed, weights_placed);
        for (MemoryPlan& p : plans) p.context_chosen = true;
    }
    keep_as_many(plans);
    MemoryPlan sum = plans.front();
    for (size_t s = 1; s < plans.size(); ++s) add(sum, plans[s]);
    sum.device_name = backend.name() + ", " + backend.description();
    sum.device = backend.memory_info();
    sum.stages = std::move(plans);
    return sum;
}

}  // namespace quern
