// Sequence: one request on its way through the engine.
#pragma once

#include <chrono>
#include <deque>

#include "tools/engine/engine.h"
#include "tools/engine/prompt_images.h"
#include "tools/engine/request.h"
#include "tools/engine/state_pool.h"

namespace quern {

struct Sequence {
    using Clock = std::chrono::steady_clock;

    RequestId id = 0;
    Request request;
    Result result;
    SequenceState state;
    std::vector<int32_t> tokens;  // prompt and answer; state.length of them are in the state
    PromptImages images;
    std::deque<int64_t> cuts;  // the next lengths at which the state is kept
    int64_t last_step = 0;     // the scheduler's number of the last step with rows of this sequence
    bool cancelled = false;
    Clock::time_point submitted = Clock::now(), started{}, first_token{};

    int64_t prompt_tokens() const { return static_cast<int64_t>(request.prompt.size()); }
    int64_t pending() const { return static_cast<int64_t>(tokens.size()) - state.length; }
    bool in_prompt() const { return state.length < prompt_tokens(); }
    bool wants_prompt_logits() const { return request.on_prompt_logits && in_prompt(); }
    bool done() const { return result.reason != FinishReason::none; }
};

}  // namespace quern
