#include <algorithm>
#include <cmath>
#include <cstring>
#include <list>
#include <optional>
#include <utility>

#include "ggml-like/check.h"
#include "ggml-like/ops/logits_top.h"
#include "tools/engine/engine_state.h"
#include "tools/engine/head_ranks.h"
#include "tools/engine/page_tokens.h"
#include "tools/engine/sampler.h"
#include "tools/engine/stage_marks.h"
#include "tools/engine/step_inputs.h"

namespace quern {
namespace {

constexpr int64_t kSecondDraw = int64_t{1} << 40;  // beyond every position

bool has_draft(const Slice& slice) { return !slice.draft.empty(); }

/// What accept_drafts has left of this slice on the device.
std::pair<int64_t, int32_t> greedy_choice(const Slice& slice, const StepResults& found, int64_t row) {
    int64_t rows = 1;
    while (rows < slice.count &&
           slice.draft[static_cast<size_t>(rows - 1)] == found.top_of(row + rows - 1)[0])
        ++rows;
    return {rows, found.top_of(row + rows - 1)[0]};
}

/// Sends a step's highest logits to the host, which has them after kVerifiedMark.
void send_top(const StepPlan& plan, int32_t* to) {
    plan.device->send_beside(to, plan.top->data, plan.shape.logit_rows * kTopWords * int64_t{sizeof(int32_t)},
                             kVerifiedMark);
}

/// The state of a sequence that has come to a cut, and may end before it is kept.
class AtCut {
  public:
    AtCut(StatePool& pool, const Sequence& s) : sequence(s), state(pool.hold(s.state)), pool_(pool) {}
    ~AtCut() { pool_.let_go(state); }
    AtCut(const AtCut&) = delete;
    AtCut& operator=(const AtCut&) = delete;

    const Sequence& sequence;
    SequenceState state;

  private:
    StatePool& pool_;
};

}  // namespace

/// Images whose features a step needs and that are not remembered.
std::vector<PromptImages::Item*> Engine::State::missing_images(const Step& step) {
    std::vector<PromptImages::Item*> missing;
    const auto find = [&] {
        missing.clear();
        for (const Slice& slice : step.slices)
            for (PromptImages::Item& item : slice.sequence->images.items())
                // an MTP layer also reads the token after the last one
                if (item.features == nullptr && item.first <= slice.begin + slice.count &&
                    item.end() > slice.begin)
                    missing.push_back(&item);
    };
    find();
    if (missing.empty()) return missing;
    tower.recall(missing);
    find();
    return missing;
}

/// Images are encoded in place of a step that needs them, so that answers wait no longer than for that; and since the tower is waited
/// for and fills inputs that a step on its way may not have read, only when none is and callbacks know of all tokens.
void Engine::State::take_turn(Step step) {
    guarded(step, [&] {
        if (missing_images(step).empty()) return launch(step);
        before_images = std::move(step);
        if (launched.empty() && untold.empty()) encode_images();
    });
}

void Engine::State::encode_images() {
    if (!before_images) return;
    Step step = *std::exchange(before_images, {});
    guarded(step, [&] {
        const std::vector<PromptImages::Item*> missing = missing_images(step);
        if (!missing.empty()) tower.encode(missing);
    });
}

void Engine::State::keep_state(const Sequence& s, const SequenceState& state) {
    CHECK(at_page_end(state.length), "[engine] a state of {} tokens would be kept", state.length);
    const std::span<const int32_t> tokens(s.tokens.data(), static_cast<size_t>(state.length));
    if (cache.wants(tokens)) cache.store(tokens, state, s.request.conversation);
}

/// Makes room for so many tokens in all.
void Engine::State::reserve(Sequence& s, int64_t tokens) {
    cache.make_pages(round_up_to_page(tokens) / kPageTokens - static_cast<int64_t>(s.state.pages.size()));
    pool.grow(s.state, tokens);
}

void Engine::State::launch(Step& step) {
    const auto begun = Sequence::Clock::now();
    // Drafts may depend on what callbacks make of the last tokens.
    if (speculation)
        speculation->draft(
            step, [this](Sequence& s, int64_t tokens) { reserve(s, tokens); }, !untold.empty());
    double until_drafts = seconds(begun, Sequence::Clock::now());
    for (const Slice& slice : step.slices) reserve(*slice.sequence, slice.begin + slice.count);
    StepPlan& plan = plan_for(step);
    plan.await_inputs();
    fill_inputs(plan, step.slices);
    Plan* const next = ready_ahead(step);
    const bool ahead = next != nullptr;
    if (ahead)
        plan.run_before(*next);
    else
        plan.run();
    int64_t rows = 0;
    bool told = false;
    for (const Slice& slice : step.slices) {
        rows += slice.logit_rows;
        told |= slice.wants_prompt_logits();
        if (!slice.draft.empty()) continue;  // verify() says how many rows are the sequence's
        slice.sequence->state.length = slice.end();
        slice.sequence->state.journaled = 0;
    }
    const int room = results.rooms() > 0 && !told ? results.keep(plan, rows) : -1;
    if (ahead) send_top(plan, static_cast<int32_t*>(host_top.get()));
    if (speculation) speculation->queued(step);
    if (backend.asynchronous()) until_drafts = seconds(begun, Sequence::Clock::now());
    if (ahead) speculation->propose_ahead();
    launched.push_back({std::move(step), &plan, room, ahead, begun, until_drafts});
}

/// Readies the pass that drafts behind this step, if there should be one; else null.
Plan* Engine::State::ready_ahead(const Step& step) {
    const int64_t most = speculation ? speculation->ahead(step) : 0;
    if (most == 0) return nullptr;
    reserve(*step.slices.front().sequence, step.slices.front().end() + most);
    return speculation->ready_ahead(step, most);
}

/// Plans of answers, so that none waits for its own later.
void Engine::State::capture_answers() {
    if (!backend.captures()) return;
    for (int64_t n = 1; n <= std::min(options.sequences, memory.steps.answer_rows); ++n) decode_plan(n);
}

/// The plans that verify drafts of one sequence, so that its first rounds do not wait for them. Those of several sequences
/// are too many, and are captured when they are first needed.
void Engine::State::capture_rounds() {
    BatchShape shape = decode_shape(1, memory.pages(), model.info().vocab);
    shape.pass = pass;
    for (shape.tokens = 2; shape.tokens <= journal_entries(options.speculation); ++shape.tokens)
        plans.get(verify_shape(shape, memory.steps.answer_rows), PlanUse::repeatedly);
}

/// Answer steps of one row a sequence run repeatedly. Those of several rows are rare, unless they verify drafts: these are padded to
/// few shapes where plans are captured.
StepPlan& Engine::State::plan_for(const Step& step) {
    BatchShape shape{.kind = step.kind,
                     .sequences = static_cast<int64_t>(step.slices.size()),
                     .pages = memory.pages(),
                     .vocab = model.info().vocab,
                     .pass = pass};
    for (const Slice& slice : step.slices) {
        shape.tokens += slice.count;
        shape.logit_rows += slice.logit_rows;
        shape.images |= step.kind == StepKind::prompt && !slice.sequence->images.empty();
    }
    const bool answers = step.kind == StepKind::answer && backend.captures();
    if (answers && shape.tokens == shape.sequences) return decode_plan(shape.sequences);
    shape.verifies = std::any_of(step.slices.begin(), step.slices.end(), has_draft);
    if (answers && shape.verifies)
        return plans.get(verify_shape(shape, memory.steps.answer_rows), PlanUse::repeatedly);
    return plans.get(shape, PlanUse::sometimes);
}

/// Waits for them.
StepResults Engine::State::results_of(const LaunchedStep& done) {
    StepPlan& plan = *done.plan;
    if (done.room >= 0) return results.await(done.room, plan);
    auto* top = static_cast<int32_t*>(host_top.get());
    if (done.ahead) {
        plan.device->await_mark(kVerifiedMark);
        return {plan, top};
    }
    const auto logit_rows = static_cast<size_t>(plan.shape.logit_rows);
    if (logit_rows == 0) {
        backend.synchronize();
        return {plan, top};
    }
    download_top(plan, {plan.plan->input<float>(plan.batch.temperature), logit_rows}, top);
    return {plan, top};
}

/// A plan's first run says nothing of its cost, since it was made in it; nor do runs that somebody watches.
bool Engine::State::read(const LaunchedStep& done) {
    StepPlan& plan = *done.plan;
    const Step& step = done.step;
    const StepResults found = results_of(done);
    const bool timed = speculation && step.kind == StepKind::answer && plan.runs++ > 0 && !backend.after_node;
    // Callbacks' time is part of it where the next step waits for them.
    const auto measure = [&] {
        speculation->measured(step, seconds(done.begun, Sequence::Clock::now()), done.drafting);
    };
    const bool now = !may_run_ahead(step);
    if (timed && !now) measure();
    if (speculation) speculation->computed(step, plan);
    int64_t row = 0;  // of the logits
    std::list<AtCut> cuts;
    for (const Slice& slice : step.slices) {
        const int64_t first_row = std::exchange(row, row + slice.logit_rows);
        if (!slice.goes_on()) continue;
        Sequence& s = *slice.sequence;
        if (slice.wants_prompt_logits()) report_prompt(s, found, slice, first_row);
        if (!slice.draft.empty()) {
            verify(slice, found, first_row);
            if (done.ahead) speculation->settle_ahead(slice, greedy_choice(slice, found, first_row));
            continue;
        }
        if (step.kind == StepKind::prompt && s.request.on_prefill) s.request.on_prefill(slice.end());
        if (!s.cuts.empty() && s.cuts.front() == slice.end()) {
            s.cuts.pop_front();
            cuts.emplace_back(pool, s);
        }
        // Since the step was launched callbacks may have added tokens, which run before another is chosen.
        if (slice.end() == static_cast<int64_t>(s.tokens.size())) advance(s, found, row - 1, now);
    }
    if (timed && now) measure();
    if (speculation) speculation->committed(step);
    // Only now drafters have written what they add to the pages. Slots of sequences that have ended are as they were.
    for (const AtCut& cut : cuts) keep_state(cut.sequence, cut.state);
    return !now;
}

void Engine::State::report_prompt(Sequence& s, const StepResults& found, const Slice& slice,
                                  int64_t row) const {
    const auto width = static_cast<size_t>(logit_columns(found.plan));
    std::vector<float> logits(static_cast<size_t>(slice.count) * width);
    found.download_logits(row, slice.count, logits.data());
    s.request.on_prompt_logits({slice.begin, logits, width});
}

/// Chooses from the highest logits of the row if they are enough, else from all.
int32_t Engine::State::choose(const Sequence& s, const StepResults& found, int64_t row) const {
    const int32_t* top = found.top_of(row);
    const auto position = static_cast<int64_t>(s.tokens.size());
    std::optional<int32_t> first;  // what comes first, allowed or not
    if (top[kTopWords - 1] != 0 && !s.request.on_logits) {
        // The device has ranked no others; and what it has just written is far from this core.
        if (reads_highest_alone(s.request) && top[0] >= 0) return top[0];
        const auto count = static_cast<size_t>(std::find(top, top + kTopLogits, -1) - top);
        float values[kTopLogits + 1];
        std::memcpy(values, top + kTopLogits, sizeof values);
        const TopLogits highest{{top, count}, {values, count}, values[kTopLogits]};
        first = sample_top(highest, model.info().vocab, s.request.sampling, position);
        if (first && (!s.request.allow || s.request.allow(*first))) return *first;
        // A second, independent draw among the allowed tokens keeps their proportions.
        if (first)
            if (const auto other = sample_allowed_top(highest, model.info().vocab, s.request.sampling,
                                                      position + kSecondDraw, s.request.allow))
                return *other;
    }
    auto* own = static_cast<float*>(host_logits.get());
    found.download_logits(row, 1, own);
    const std::span<float> logits(own, static_cast<size_t>(logit_columns(found.plan)));
    const int64_t vocab = model.info().vocab;
    int32_t id = first ? *first : sample(logits, vocab, s.request.sampling, s.tokens, position);
    if (first || (s.request.allow && !s.request.allow(id)))
        id = sample_allowed(logits, vocab, s.request.sampling, s.tokens, position + kSecondDraw,
                            s.request.allow, s.request.narrow);
    if (s.request.on_logits) s.request.on_logits(id, logits);
    return id;
}

/// Adds a token to the answer. Callbacks learn of it `now` or with tell_all; now also of a last one. False if that ended it.
bool Engine::State::append(Sequence& s, int32_t id, bool now) {
    s.tokens.push_back(id);
    s.result.tokens.push_back(id);
    const auto answered = static_cast<int64_t>(s.result.tokens.size());
    const bool last = answered >= s.request.max_tokens || static_cast<int64_t>(s.tokens.size()) >= context;
    if (!now && !last) {
        untold.push_back({&s, id});
        return true;
    }
    if (s.request.on_token && !s.request.on_token(id))
        finish(s, FinishReason::cancelled);
    else if (last)
        finish(s, FinishReason::length);
    return !s.done();
}

/// Tells a request of a token of its answer, and adds those that must follow.
void Engine::State::tell(Sequence& s, int32_t id) {
    if (s.request.on_token && !s.request.on_token(id)) finish(s, FinishReason::cancelled);
    if (!s.done()) add_forced(s);
}

/// An error ends the request that it comes from.
void Engine::State::tell_all() {
    for (const auto& [s, id] : std::exchange(untold, {})) try {
            tell(*s, id);
        } catch (const std::exception& error) {
            rethrow_if_device(error);
            finish(*s, FinishReason::error, error.what());
        }
}

void Engine::State::add_forced(Sequence& s) {
    if (!s.request.force) return;
    for (const int32_t forced : s.request.force())
        if (!append(s, forced, true)) return;
}

/// Chooses the next token of a sequence and ends it if it should end. now: as in append.
void Engine::State::advance(Sequence& s, const StepResults& found, int64_t row, bool now) {
    const auto answered = static_cast<int64_t>(s.result.tokens.size());
    if (answered == 0) {
        s.first_token = found.at;
        s.result.timing.prefill_seconds = seconds(s.started, s.first_token);
    } else {
        s.result.timing.decode_seconds = seconds(s.first_token, found.at);
    }
    if (s.request.max_tokens <= answered) return finish(s, FinishReason::length);
    int32_t id;
    try {
        id = choose(s, found, row);
    } catch (const Error& error) {
        rethrow_if_device(error);
        return finish(s, FinishReason::error, error.what());
    }
    const auto& stops = s.request.stop_ids;
    if (std::find(stops.begin(), stops.end(), id) != stops.end()) return finish(s, FinishReason::stop);
    if (append(s, id, now) && now) add_forced(s);
}

/// Chooses tokens after the rows of a slice that ends with a draft, as long as its next row was computed with the token that
/// was chosen, and commits these rows. `row`: of the slice's first logits.
void Engine::State::verify(const Slice& slice, const StepResults& found, int64_t row) {
    Sequence& s = *slice.sequence;
    int64_t rows = matching_rows(slice);
    do {
        advance(s, found, row + rows - 1, true);
        rows = matching_rows(slice);
    } while (!s.done() && slice.begin + rows == static_cast<int64_t>(s.tokens.size()));
    speculation->accept(slice);
    if (s.done()) return;
    s.state.length = slice.begin + rows;
    s.state.journaled = rows;
}

}  // namespace quern
