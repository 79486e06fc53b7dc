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
    pad(b.temperature, temperature, chosen, logits > 0 ? temperature[0] : 0.0f);
}

void fill_next_ids(StepPlan& step, const std::vector<Slice>& slices) {
    auto* ids = step.plan->input<int32_t>(step.next_ids);
    std::fill_n(ids, step.next_ids->elements(), 0);
    for (const Slice& slice : slices) {
        const std::vector<int32_t>& tokens = slice.sequence->tokens;
        for (int64_t p = slice.begin; p < slice.begin + slice.count; ++p, ++ids)
            if (const auto next = static_cast<size_t>(p + 1); next < tokens.size()) *ids = tokens[next];
    }
}

InputRows input_rows(const Slice& slice) {
    const Sequence& s = *slice.sequence;
    InputRows rows{.state = &s.state,
                   .begin = slice.begin,
                   .tokens = {},
                   .logit_rows = slice.logit_rows,
                   .temperature = s.request.sampling.temperature,
                   .journal = !slice.draft.empty()};
    for (int64_t i = 0; i < slice.count; ++i) rows.tokens.push_back(slice.token(slice.begin + i));
    return rows;
}

}  // namespace

void fill_inputs(StepPlan& step, const std::vector<InputRows>& list) {
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
    for (size_t i = 0; i < list.size(); ++i) {
        const InputRows& rows = list[i];
        const auto count = static_cast<int64_t>(rows.tokens.size());
        start[i] = row;
        slots[i] = rows.state->slot;
        committed[i] = static_cast<int32_t>(rows.state->journaled);
        journal[i] = rows.journal ? 1 : 0;
        std::copy(rows.state->pages.begin(), rows.state->pages.end(),
                  pages + static_cast<int64_t>(i) * step.shape.pages);
        for (int64_t k = 0; k < count; ++k, ++row) {
            token_ids[row] = rows.tokens[static_cast<size_t>(k)];
            positions[row] = static_cast<int32_t>(rows.begin + k);
            row_sequence[row] = static_cast<int32_t>(i);
            if (k < count - rows.logit_rows) continue;
            logit_rows[logits] = row;
            temperature[logits++] = rows.temperature;
        }
    }
    start[list.size()] = row;
    fill_padding(step, list.size(), logits);
}

void fill_inputs(StepPlan& step, const std::vector<Slice>& slices) {
    std::vector<InputRows> list;
    for (const Slice& slice : slices) list.push_back(input_rows(slice));
    fill_inputs(step, list);
    if (step.next_ids != nullptr) fill_next_ids(step, slices);
}

}  // namespace quern
