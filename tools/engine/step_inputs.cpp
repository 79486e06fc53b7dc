#include "tools/engine/step_inputs.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "tools/engine/sampler.h"

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
    for (int64_t axis = 0; b.rope != nullptr && axis < 3; ++axis)
        std::fill(p.input<int32_t>(b.rope) + axis * b.rope->shape[1] + static_cast<int64_t>(rows),
                  p.input<int32_t>(b.rope) + (axis + 1) * b.rope->shape[1], 0);
    pad(b.row_sequence, p.input<int32_t>(b.row_sequence), rows, -1);
    pad(b.committed, p.input<int32_t>(b.committed), filled, 0);
    pad(b.journal, p.input<int32_t>(b.journal), filled, 0);
    if (b.logits_from != nullptr) pad(b.logits_from, p.input<int32_t>(b.logits_from), filled, start[filled]);
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
            if (const auto next = static_cast<size_t>(p + 1); next < tokens.size())
                *ids = std::max(tokens[next], 0);
    }
}

/// The features of images that the rows, and what follows each slice, are embedded by.
void fill_image_rows(StepPlan& step, const std::vector<Slice>& slices) {
    Plan& p = *step.plan;
    const Batch& b = step.batch;
    const int64_t width = b.image_rows->shape[1];
    auto* source = p.input<int32_t>(b.image_source);
    auto* rows = p.input<float>(b.image_rows);
    auto* next = step.next_source != nullptr ? p.input<int32_t>(step.next_source) : nullptr;
    std::fill_n(source, b.image_source->elements(), -1);
    if (next != nullptr) std::fill_n(next, step.next_source->elements(), -1);
    int64_t row = 0, image_row = 0;
    for (const Slice& slice : slices) {
        const PromptImages& images = slice.sequence->images;
        const int64_t end = slice.begin + slice.count;
        for (int64_t t = slice.begin; t < end + (next != nullptr ? 1 : 0); ++t) {
            const float* features = images.row(t, width);
            if (features == nullptr) continue;
            std::memcpy(rows + image_row * width, features, static_cast<size_t>(width) * sizeof(float));
            if (t < end) source[row + t - slice.begin] = static_cast<int32_t>(image_row);
            if (next != nullptr && t > slice.begin)
                next[row + t - 1 - slice.begin] = static_cast<int32_t>(image_row);
            ++image_row;
        }
        row += slice.count;
    }
}

InputRows input_rows(const Slice& slice) {
    const Sequence& s = *slice.sequence;
    InputRows rows{.state = &s.state,
                   .begin = slice.begin,
                   .tokens = {},
                   .logit_rows = slice.logit_rows,
                   .temperature = reads_highest_alone(s.request) ? -1.0f : s.request.sampling.temperature,
                   .journal = !slice.draft.empty(),
                   .late_from = slice.count - std::ssize(slice.draft),
                   .late = slice.late ? std::ssize(slice.draft) : 0,
                   .images = &s.images};
    for (int64_t i = 0; i < slice.count; ++i) rows.tokens.push_back(slice.token(slice.begin + i));
    return rows;
}

/// The three axes are `stride` apart.
void set_rope(int32_t* rope, int64_t stride, const InputRows& rows, int64_t token) {
    const auto plain = static_cast<int32_t>(token);
    const PromptImages::Place place =
        rows.images != nullptr ? rows.images->place(token) : PromptImages::Place{plain, plain, plain};
    rope[0] = place.time, rope[stride] = place.row, rope[2 * stride] = place.column;
}

}  // namespace

bool reads_highest_alone(const Request& r) { return takes_highest(r.sampling) && !r.allow && !r.on_logits; }

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
    auto* logits_from =
        step.batch.logits_from != nullptr ? plan.input<int32_t>(step.batch.logits_from) : nullptr;
    auto* rope = step.batch.rope != nullptr ? plan.input<int32_t>(step.batch.rope) : nullptr;
    auto* source =
        step.batch.draft_source != nullptr ? plan.input<int32_t>(step.batch.draft_source) : nullptr;
    std::fill_n(pages, step.shape.sequences * step.shape.pages, 0);
    if (source != nullptr) std::fill_n(source, step.shape.tokens, -1);
    auto* follows = step.batch.follows != nullptr ? plan.input<int32_t>(step.batch.follows) : nullptr;
    if (follows != nullptr) std::fill_n(follows, step.shape.sequences, 0);

    int32_t row = 0;
    int64_t logits = 0;
    for (size_t i = 0; i < list.size(); ++i) {
        const InputRows& rows = list[i];
        const auto count = static_cast<int64_t>(rows.tokens.size());
        CHECK(rows.late == 0 || (source != nullptr && list.size() == 1), "[plan] {} drafts come late",
              rows.late);
        for (int64_t k = 0; k < rows.late; ++k) source[rows.late_from + k] = static_cast<int32_t>(k);
        start[i] = row;
        if (logits_from != nullptr) logits_from[i] = static_cast<int32_t>(row + count - rows.logit_rows);
        slots[i] = rows.state->slot;
        committed[i] = static_cast<int32_t>(rows.state->journaled);
        journal[i] = rows.journal ? 1 : 0;
        CHECK(!rows.journal || step.shape.verifies, "[plan] drafts in a step without");
        if (rows.follows) CHECK(follows != nullptr, "[plan] rows of this pass follow no choice");
        if (rows.follows) follows[i] = 1;
        std::copy(rows.state->pages.begin(), rows.state->pages.end(),
                  pages + static_cast<int64_t>(i) * step.shape.pages);
        for (int64_t k = 0; k < count; ++k, ++row) {
            token_ids[row] =
                std::max(rows.tokens[static_cast<size_t>(k)], 0);  // those of images are replaced
            positions[row] = static_cast<int32_t>(rows.begin + k);
            if (rope != nullptr) set_rope(rope + row, step.shape.tokens, rows, rows.begin + k);
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
    if (step.batch.image_rows != nullptr) fill_image_rows(step, slices);
}

}  // namespace quern
