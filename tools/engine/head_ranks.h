// What ranks have computed of the head, each for its own rows, as the engine reads it: of all rows.
#pragma once

#include "tools/engine/plan_cache.h"

namespace quern {

/// Columns of the logits: rows of the whole head.
int64_t logit_columns(const StepPlan& step);
/// Downloads logits_top's rows (ops/logits_top.h) of the whole head to `top`, kTopWords each: of several ranks merged, the sums
/// as if one rank had made them, but for rounding. `temperatures`: those of the rows.
void download_top(const StepPlan& step, std::span<const float> temperatures, int32_t* top);
/// Downloads `count` rows of logits, from `row` on, to `to` [count, logit_columns].
void download_logits(const StepPlan& step, int64_t row, int64_t count, float* to);

/// The highest logits of one row, from those of ranks: `tops` kTopWords each, ids of rank r from r * `rows` on. Those of ranks
/// whose ids all are `vocab` or more are not read. Exact if all others are: one whose ids are all -infinity is not.
void merge_top(std::span<const int32_t* const> tops, int64_t rows, int64_t vocab, float temperature,
               int32_t* out);

}  // namespace quern
