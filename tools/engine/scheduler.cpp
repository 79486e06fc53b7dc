#include "tools/engine/scheduler.h"

#include <algorithm>

#include "tools/engine/page_tokens.h"

namespace quern {
namespace {

/// How many rows of a prompt run if at most `most` may: up to its next cut, its end, or a multiple of kPageTokens.
int64_t ready_rows(const Sequence& s, int64_t most) {
    const int64_t begin = s.state.length;
    const int64_t end = s.cuts.empty() ? s.prompt_tokens() : std::min(s.cuts.front(), s.prompt_tokens());
    if (end - begin <= most) return end - begin;
    return std::max<int64_t>(0, round_down_to_page(begin + most) - begin);
}

/// Hands out the rows of a prompt step. `depth`: StepLimits::gap_depth.
class PromptRows {
  public:
    PromptRows(int64_t rows, int64_t logits, int64_t depth) : rows_(rows), logits_(logits), depth_(depth) {}

    /// Adds rows of the prompt to `slice` that count as up to `most`. The first that are asked for are a page at least, so that
    /// a prompt moves on.
    void grow(Slice& slice, int64_t most) {
        Sequence& s = *slice.sequence;
        const int64_t before = slice.begin + slice.count;
        most = std::min(most, rows_);
        most = first_ ? std::max(fitting(most, before), std::min<int64_t>(most, kPageTokens))
                      : fitting(most, before);
        first_ = false;
        if (s.wants_prompt_logits()) most = std::min(most, logits_);
        const int64_t more = ready_rows(s, slice.count + most) - slice.count;
        if (more <= 0) return;
        slice.count += more;
        rows_ = std::max<int64_t>(0, rows_ - counted(more, before));
        if (s.wants_prompt_logits()) logits_ -= more;
    }
    int64_t left() const { return rows_; }

  private:
    /// As how many rows these count, after so many tokens; and how many count as `rows`.
    int64_t counted(int64_t rows, int64_t before) const {
        return depth_ > 0 ? rows + (rows * before + depth_ - 1) / depth_ : rows;
    }
    int64_t fitting(int64_t rows, int64_t before) const {
        return depth_ > 0 ? rows * depth_ / (depth_ + before) : rows;
    }

    int64_t rows_, logits_, depth_;
    bool first_ = true;
};

}  // namespace

Step Scheduler::next(std::span<Sequence* const> running, const Others& others) {
    ++steps_;
    std::vector<Sequence*> prompts, answers;
    for (Sequence* s : running) (s->in_prompt() ? prompts : answers).push_back(s);
    const bool due = std::any_of(answers.begin(), answers.end(),
                                 [&](const Sequence* s) { return s->last_step <= last_prompt_step_; });
    const bool prompts_next = !prompts.empty() && !due;
    const auto all = static_cast<int64_t>(answers.size()) + others.answers;
    const int64_t rows = all == 0 ? limits_.prompt_rows : limits_.gap_rows,
                  depth = all == 0 ? 0 : limits_.gap_depth;
    Step step = prompts_next ? prompt_step(std::move(prompts), rows, depth)
                             : answer_step(std::move(answers), (all + others.steps - 1) / others.steps);
    for (const Slice& slice : step.slices) slice.sequence->last_step = steps_;
    if (prompts_next) last_prompt_step_ = steps_;
    return step;
}

Step Scheduler::prompt_step(std::vector<Sequence*> prompts, int64_t rows, int64_t depth) const {
    std::stable_sort(prompts.begin() + 1, prompts.end(),
                     [](const Sequence* a, const Sequence* b) { return a->pending() < b->pending(); });
    Step step{.kind = StepKind::prompt, .slices = {}};
    for (Sequence* s : prompts) step.slices.push_back({s, s->state.length, 0, 0, false});
    PromptRows budget(rows, limits_.prompt_logits, depth);
    Slice& oldest = step.slices.front();
    budget.grow(oldest, prompts.size() > 1 ? round_up_to_page((rows + 1) / 2) : rows);
    for (auto slice = step.slices.begin() + 1; slice != step.slices.end(); ++slice)
        budget.grow(*slice, budget.left());
    budget.grow(oldest, budget.left());
    std::erase_if(step.slices, [](const Slice& slice) { return slice.count == 0; });
    for (Slice& slice : step.slices) {
        slice.last = slice.count == slice.sequence->pending();
        slice.logit_rows = slice.sequence->wants_prompt_logits() ? slice.count : slice.last ? 1 : 0;
    }
    return step;
}

Step Scheduler::answer_step(std::vector<Sequence*> answers, int64_t most) const {
    std::stable_sort(answers.begin(), answers.end(),
                     [](const Sequence* a, const Sequence* b) { return a->last_step < b->last_step; });
    most = std::min(most, limits_.answer_rows);
    if (static_cast<int64_t>(answers.size()) > most) answers.resize(static_cast<size_t>(most));
    int64_t left = limits_.answer_rows - static_cast<int64_t>(answers.size());
    Step step{.kind = StepKind::answer, .slices = {}};
    for (Sequence* s : answers) {
        const int64_t more = std::min({s->pending() - 1, kMaxAnswerSlice - 1, left});
        left -= more;
        step.slices.push_back({s, s->state.length, 1 + more, 1, 1 + more == s->pending()});
    }
    return step;
}

}  // namespace quern
