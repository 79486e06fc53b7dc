// A loaded checkpoint, a single sequence stepped by hand, random prompts, and where the tests' files are.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "models/weight_placement.h"
#include "tools/engine/engine.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/state_pool.h"

namespace quern::test {

/// The source tree; on a machine that did not build the tests, QUERN_SOURCE_DIR in the environment says where it is.
inline std::string source_dir() {
    const char* moved = std::getenv("QUERN_SOURCE_DIR");
    return moved != nullptr ? moved : QUERN_SOURCE_DIR;
}

/// A tiny checkpoint of tests/vectors/parity.
inline std::string parity(const std::string& checkpoint) {
    return source_dir() + "/tests/vectors/parity/" + checkpoint;
}

inline std::vector<int32_t> random_ids(const Model& model, size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::vector<int32_t> ids(count);
    for (int32_t& id : ids) id = static_cast<int32_t>(random() % static_cast<unsigned>(model.info().vocab));
    return ids;
}

struct Loaded {
    Loaded(const std::string& checkpoint, std::unique_ptr<Backend> on, bool tokenizer = false)
        : backend(std::move(on)), model(load_model(checkpoint, *backend, {.tokenizer = tokenizer})) {}
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;
};

/// Steps a single sequence by hand, so that its state can be saved and restored.
class Stepper {
  public:
    explicit Stepper(Loaded& l, int64_t slots = 3, int64_t pages = 12)
        : l_(l),
          pages_(pages),
          specs(l.model->state_specs(
              {.kv = l.backend->activation_dtype(), .conv = l.backend->activation_dtype()})),
          pool(*l.backend, specs, slots, pages),
          workspace_(*l.backend, 64 << 20, 1 << 20),
          plans_(*l.model, *l.backend, pool, workspace_, 4) {}

    /// Logits of the last token.
    std::vector<float> run(SequenceState& s, std::span<const int32_t> tokens,
                           StepKind kind = StepKind::prompt) {
        const auto count = static_cast<int64_t>(tokens.size());
        pool.grow(s, s.length + count);
        StepPlan& step = plans_.get({.kind = kind,
                                     .tokens = count,
                                     .sequences = 1,
                                     .logit_rows = 1,
                                     .pages = pages_,
                                     .vocab = l_.model->info().vocab},
                                    PlanUse::sometimes);
        Plan& p = *step.plan;
        for (int64_t i = 0; i < count; ++i) {
            p.input<int32_t>(step.batch.token_ids)[i] = tokens[static_cast<size_t>(i)];
            p.input<int32_t>(step.batch.positions)[i] = static_cast<int32_t>(s.length + i);
            p.input<int32_t>(step.batch.row_sequence)[i] = 0;
        }
        p.input<int32_t>(step.batch.start)[0] = 0;
        p.input<int32_t>(step.batch.start)[1] = static_cast<int32_t>(count);
        p.input<int32_t>(step.batch.slots)[0] = s.slot;
        std::copy(s.pages.begin(), s.pages.end(), p.input<int32_t>(step.batch.pages));
        p.input<int32_t>(step.batch.committed)[0] = 0;
        p.input<int32_t>(step.batch.journal)[0] = 0;
        if (step.batch.logits_from != nullptr)
            p.input<int32_t>(step.batch.logits_from)[0] = static_cast<int32_t>(count - 1);
        p.input<int32_t>(step.batch.logit_rows)[0] = static_cast<int32_t>(count - 1);
        p.input<float>(step.batch.temperature)[0] = 1;
        p.run();
        s.length += count;
        std::vector<float> logits(static_cast<size_t>(step.logits->elements()));
        l_.backend->download(logits.data(), step.logits->data, step.logits->bytes());
        return logits;
    }

  private:
    Loaded& l_;
    int64_t pages_;

  public:
    std::vector<StateSpec> specs;
    StatePool pool;

  private:
    Workspace workspace_;
    PlanCache plans_;
};

}  // namespace quern::test
