// fill_inputs: all that changes from step to step.
#pragma once

#include <vector>

#include "tools/engine/plan_cache.h"
#include "tools/engine/scheduler.h"

namespace quern {

/// Rows of one sequence in a plan.
struct InputRows {
    const SequenceState* state;
    int64_t begin;                // position of the first row
    std::vector<int32_t> tokens;  // one a row
    int64_t logit_rows = 0;       // so many of the last rows get logits
    float temperature = 0;        // negative: of logits nobody reads more than the highest (ops/logits_top.h)
    bool journal = false;         // whether the rows go to the journal
    int64_t late_from = 0, late = 0;       // rows whose tokens are in StateRole::drafts: the first, how many
    bool follows = false;                  // whether they begin after what the last step chose
    const PromptImages* images = nullptr;  // of the sequence; null: none
};

/// Whether nobody reads more of its rows of logits than which is the highest.
bool reads_highest_alone(const Request& request);

/// Writes ids, positions, slots, pages and temperatures of the rows, in order, into the inputs of the plan, whose shape has
/// room for all of them.
void fill_inputs(StepPlan& step, const std::vector<InputRows>& rows);
void fill_inputs(StepPlan& step, const std::vector<Slice>& slices);

}  // namespace quern
