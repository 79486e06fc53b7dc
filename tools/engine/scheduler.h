// Scheduler: which rows run next. Pure host code: knows sequences and row budgets, no tensors and no device.
//
// A step has rows of prompts or rows of answers, never both (StepKind). Where both are waiting they take
// turns: a prompt step comes only when every answer has had a row since the last one. So an answer waits
// for one prompt step at most, and prompts always move on.
//
// Prompts that arrive while a step runs share the next prompt step. They never wait for others: people whose answers
// end in the same step usually ask again during the next one, and so share a prompt step anyway; of requests that come
// at random, an unnoticeable wait would collect hardly any.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ggml-like/ops/batch.h"
#include "tools/engine/sequence.h"

namespace quern {

/// Rows of one answer in a step at most: tokens that follow whatever the model says. Drafts may be longer.
inline constexpr int64_t kMaxAnswerSlice = 8;

/// Rows of one sequence in a step: its tokens [begin, begin + count), of which a draft may be the last.
struct Slice {
    Sequence* sequence;  // null: it has ended since the step was launched
    int64_t begin;
    int64_t count;
    int64_t logit_rows;  // so many of the last rows get logits: of a prompt's part that is not the last, none
    bool last;           // it has the sequence's newest token, whose logits choose the next one
    std::vector<int32_t> draft = {};  // tokens after the sequence's own, to verify (drafter.h)
    bool late = false;                // these are on the device only, and -1 here, until the step has ended

    int64_t end() const { return begin + count; }
    bool goes_on() const { return sequence != nullptr && !sequence->done(); }
    bool wants_prompt_logits() const {
        return sequence->request.on_prompt_logits && begin < sequence->prompt_tokens();
    }

    int32_t token(int64_t position) const {
        const auto at = static_cast<size_t>(position), own = sequence->tokens.size();
        return at < own ? sequence->tokens[at] : draft[at - own];
    }
};

struct Step {
    StepKind kind = StepKind::prompt;
    std::vector<Slice> slices;
    DraftRows draft_rows{};  // StepSize::draft_rows
};

/// Rows in one step at most; the first three are at least kPageTokens.
struct StepLimits {
    int64_t prompt_rows;    // of prompts, while no answer runs
    int64_t gap_rows;       // of prompts, while answers run, if they are at the beginning of their prompts
    int64_t prompt_logits;  // of prompts that want all their logits
    int64_t answer_rows;
    /// While answers run, a row after so many tokens counts as two rows, after twice as many as three: attention makes it
    /// take as long. 0: each counts as one.
    int64_t gap_depth = 0;
};

class Scheduler {
  public:
    explicit Scheduler(const StepLimits& limits) : limits_(limits) {}

    /// Steps that are on their way.
    struct Others {
        int64_t answers = 0;  // that they have rows of
        int64_t steps =
            1;  // on their way at the same time, with the next one: each gets its share of the answers
    };
    /// The next step of `running`, which is in order of arrival; it counts as run. It has at least one row if
    /// anything is pending.
    ///
    /// Prompt step: beside answers it is short, so that these wait for no longer than some rows take. A slice ends at a
    /// multiple of kPageTokens of its sequence, at a cut or at the end of the prompt; a prompt without room for such a slice
    /// waits. The oldest prompt gets half of the rows, rounded up to
    /// kPageTokens; the rest goes to the prompts with the fewest rows left, so that short ones do not wait for long
    /// ones, and then to the oldest again.
    ///
    /// Answer step: one row of every answer, or of its share of them, those that waited longest first; then further rows of
    /// answers that have more, kMaxAnswerSlice each at most.
    Step next(std::span<Sequence* const> running, const Others& others);
    Step next(std::span<Sequence* const> running) { return next(running, {}); }

  private:
    Step prompt_step(std::vector<Sequence*> prompts, int64_t rows, int64_t depth) const;
    Step answer_step(std::vector<Sequence*> answers, int64_t most) const;

    StepLimits limits_;
    int64_t steps_ = 0, last_prompt_step_ = 0;  // steps are counted from 1
};

}  // namespace quern
