#include "tools/engine/dflash_drafter.h"

#include <algorithm>
#include <utility>

#include "ggml-like/backend.h"
#include "tools/engine/stage_marks.h"
#include "tools/engine/step_inputs.h"

namespace quern {

DflashDrafter::DflashDrafter(const Model& model, Backend& backend, PlanCache& plans, const MemoryPlan& memory)
    : model_(model),
      backend_(backend),
      plans_(plans),
      memory_(memory),
      sequences_(block_sequences(memory)),
      ids_(backend.alloc_host(sequences_ * memory.block_rows * int64_t{sizeof(int32_t)}, "drafts"),
           [&backend](void* m) { backend.free_host(m); }) {
    const int32_t mask = model.info().dflash->mask;
    SequenceState nobody;
    nobody.slot = 0;
    nobody.pages.assign(static_cast<size_t>(memory.pages()), 0);
    for (const int64_t n : {int64_t{1}, sequences_}) {
        StepPlan& pass = plan(n, DraftRows::frequent);
        const InputRows rows{.state = &nobody,
                             .begin = 0,
                             .tokens = std::vector<int32_t>(static_cast<size_t>(memory.block_rows), mask),
                             .logit_rows = memory.block_rows - 1};
        pass.await_inputs();
        fill_inputs(pass, std::vector<InputRows>(static_cast<size_t>(n), rows));
        pass.run_pass();
    }
    backend.synchronize();
}

StepPlan& DflashDrafter::plan(int64_t sequences, DraftRows rows, bool full_head) {
    const bool captured = backend_.captures();
    BatchShape shape =
        block_shape(memory_, captured ? std::min(padded_sequences(sequences), sequences_) : sequences,
                    model_.info().vocab);
    shape.causal_windows = causal_windows_;
    shape.draft_rows = full_head ? DraftRows::all : rows;
    shape.full_head = full_head;
    return plans_.get(shape, captured ? PlanUse::repeatedly : PlanUse::sometimes);
}

/// The newest token, which begins there, and masks.
InputRows DflashDrafter::block_of(const SequenceState& state, int64_t begin, int32_t first) const {
    std::vector<int32_t> tokens(static_cast<size_t>(memory_.block_rows), model_.info().dflash->mask);
    tokens.front() = first;
    return {
        .state = &state, .begin = begin, .tokens = std::move(tokens), .logit_rows = memory_.block_rows - 1};
}

void DflashDrafter::propose(std::span<Draft> drafts) {
    const RequestId ahead = std::exchange(ahead_, 0);
    Draft& first = drafts.front();
    late_ = first.sequence->id == ahead && first.sequence->state.length == ahead_length_ &&
            first.sequence->pending() == 1 && first.may_be_late && first.open_to(DrafterKind::dflash);
    if (late_) {
        first.late = std::min(memory_.block_rows - 1, first.most);
        first.ahead = true;
        return;
    }
    std::vector<Draft*> wanted;
    for (Draft& d : drafts)  // the newest token of a sequence begins its block; all before it are committed
        if (d.open_to(DrafterKind::dflash) && d.sequence->pending() == 1) wanted.push_back(&d);
    const auto most = static_cast<size_t>(sequences_);
    for (size_t i = 0; i < wanted.size(); i += most)
        fill(std::span(wanted).subspan(i, std::min(most, wanted.size() - i)));
}

void DflashDrafter::fill(std::span<Draft*> drafts) {
    const int64_t guesses = memory_.block_rows - 1;
    const bool full_head =
        std::any_of(drafts.begin(), drafts.end(), [](const Draft* d) { return d->watched(); });
    DraftRows wanted = DraftRows::frequent;
    for (const Draft* d : drafts) wanted = std::max(wanted, d->rows);
    StepPlan& pass = plan(static_cast<int64_t>(drafts.size()), wanted, full_head);
    std::vector<InputRows> rows;
    for (const Draft* d : drafts) {
        const SequenceState& state = d->sequence->state;
        rows.push_back(block_of(state, state.length, d->sequence->tokens.back()));
    }
    pass.await_inputs();
    fill_inputs(pass, rows);
    pass.run_pass();
    for (Draft* d : drafts) d->read = pass.shape.draft_rows;
    drafts.front()->leads = true;
    if (!drafts.front()->may_be_late) return read(pass, drafts);
    drafts.front()->late = std::min(guesses, drafts.front()->most);
    late_ = true;
    send(pass);
}

/// Sends its ids to the host.
void DflashDrafter::send(const StepPlan& pass) {
    pass.device->send_beside(ids_.get(), pass.top->data, (memory_.block_rows - 1) * int64_t{sizeof(int32_t)},
                             kDraftsMark);
}

Plan* DflashDrafter::ready_ahead(const Slice& slice, int64_t, DraftRows rows) {
    StepPlan& pass = plan(1, rows);
    InputRows block = block_of(slice.sequence->state, slice.begin, model_.info().dflash->mask);
    block.follows = true;
    pass.await_inputs();
    fill_inputs(pass, std::vector<InputRows>{std::move(block)});
    ahead_pass_ = &pass;
    ahead_ = slice.sequence->id;
    ahead_length_ = -1;
    return pass.plan.get();
}

void DflashDrafter::propose_ahead() {
    ahead_pass_->plan->run_uploaded();
    send(*ahead_pass_);
}

std::span<const int32_t> DflashDrafter::late_tokens() {
    if (!late_) return {};
    backend_.await_mark(kDraftsMark);
    return {static_cast<const int32_t*>(ids_.get()), static_cast<size_t>(memory_.block_rows - 1)};
}

/// Waits for the pass.
void DflashDrafter::read(const StepPlan& pass, std::span<Draft*> drafts) {
    const int64_t guesses = memory_.block_rows - 1;
    const auto* ids = static_cast<const int32_t*>(ids_.get());
    backend_.download(ids_.get(), pass.top->data,
                      static_cast<int64_t>(drafts.size()) * guesses * int64_t{sizeof(int32_t)});
    for (size_t i = 0; i < drafts.size(); ++i) {
        Draft& d = *drafts[i];
        for (int64_t j = 0; j < std::min(guesses, d.most); ++j) {
            const int64_t row = static_cast<int64_t>(i) * guesses + j;
            d.tokens.push_back(ids[row]);
            const auto& watch = d.sequence->request.on_draft_logits;
            if (!watch) continue;
            std::vector<float> logits(static_cast<size_t>(pass.logits->shape[1]));
            backend_.download(logits.data(), pass.logits->row<float>(row),
                              static_cast<int64_t>(logits.size() * sizeof(float)));
            watch(logits);
        }
    }
}

}  // namespace quern
