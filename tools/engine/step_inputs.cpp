#include "tools/engine/step_inputs.h"

#include <algorithm>

namespace quern {
namespace {

/// If the step is padded: empty sequences after the real ones, and rows that belong to none; where these are computed,
/// they are copies of the first row.
void fill_padding(StepPlan& step, size_t filled, int64_t logits) {
    Plan& p = *step.plan;
    const auto pad = [](const Tensor* t, auto* values, size_t from, auto value) {
        std::fill(values + from, values + t->shape[0], value);
    };
    const Batch& b = step.batch;
    auto *start = p.input<int32_t>(b.start), *slots = p.input<int32_t>(b.slots),
         *ids = p.input<int32_t>(b.token_ids);
    auto* temperature = p.input<float>(b.temperature);
    const auto rows = static_cast<size_t>(start[filled]);
    pad(b.start, start, filled + 1, start[filled]);
    pad(b.slots, slots, filled, slots[0]);
    pad(b.token_ids, ids, rows, ids[0]);
    pad(b.positions, p.input<int32_t>(b.positions), rows, 0);
    pad(b.row_sequence, p.input<int32_t>(b.row_sequence), rows, -1);
    pad(b.committed, p.input<int32_t>(b.committed), filled, 0);
    pad(b.journal, p.input<int32_t>(b.journal), filled, 0);
    const auto chosen = static_cast<size_t>(logits);
    pad(b.logit_rows, p.input<int32_t>(b.logit_rows), chosen, 0);
    pad(b.temperature, temperature, chosen, temperature[0]);
}

}  // namespace

void fill_inputs(StepPlan& step, const std::vector<Slice>& slices) {
    Plan& plan = *step.plan;
    auto* token_ids = plan.input<int32_t>(step.batch.token_ids);
    auto* positions = plan.input<int32_t>(step.batch.positions);
    auto* row_sequence = plan.input<int32_t>(step.batch.row_sequence);
    auto* start = plan.input<int32_t>(step.batch.start);
    auto* slots = plan.input<int32_t>(step.batch.slots);
    auto* pages = plan.input<int32_t>(step.batch.pages);
    auto* logit_rows = plan.input<int32_t>(step.batch.logit_rows);
    auto* temperature = plan.input<float>(step.batch.temperature);
    auto* committed = plan.input<int32_t>(step.batch.committed);
    auto* journal = plan.input<int32_t>(step.batch.journal);
    std::fill_n(pages, step.shape.sequences * step.shape.pages, 0);

    int32_t row = 0;
    int64_t logits = 0;
    for (size_t i = 0; i < slices.size(); ++i) {
        const Slice& slice = slices[i];
        const Sequence& s = *slice.sequence;
        start[i] = row;
        slots[i] = s.state.slot;
        committed[i] = static_cast<int32_t>(s.state.journaled);
        journal[i] = slice.draft.empty() ? 0 : 1;
        std::copy(s.state.pages.begin(), s.state.pages.end(),
                  pages + static_cast<int64_t>(i) * step.shape.pages);
        const int64_t end = slice.begin + slice.count;
        for (int64_t t = slice.begin; t < end; ++t, ++row) {
            token_ids[row] = slice.token(t);
            positions[row] = static_cast<int32_t>(t);
            row_sequence[row] = static_cast<int32_t>(i);
            if (t < end - slice.logit_rows) continue;
            logit_rows[logits] = row;
            temperature[logits++] = s.request.sampling.temperature;
        }
    }
    start[slices.size()] = row;
    fill_padding(step, slices.size(), logits);
}

}  // namespace quern
