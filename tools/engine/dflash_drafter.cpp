#include "tools/engine/dflash_drafter.h"

#include <algorithm>

#include "ggml-like/backend.h"
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
        StepPlan& pass = plan(n, false);
        const InputRows rows{.state = &nobody,
                             .begin = 0,
                             .tokens = std::vector<int32_t>(static_cast<size_t>(memory.block_rows), mask),
                             .logit_rows = memory.block_rows - 1};
        pass.await_inputs();
        fill_inputs(pass, std::vector<InputRows>(static_cast<size_t>(n), rows));
        pass.run();
    }
    backend.synchronize();
}

StepPlan& DflashDrafter::plan(int64_t sequences, bool full_head) {
    const bool captured = backend_.captures();
    BatchShape shape = block_shape(
        memory_, captured ? std::min(decode_bucket(sequences), sequences_) : sequences, model_.info().vocab);
    shape.causal_windows = causal_windows_;
    shape.full_head = full_head;
    return plans_.get(shape, captured ? PlanUse::repeatedly : PlanUse::sometimes);
}

void DflashDrafter::propose(std::span<Draft> drafts) {
    std::vector<Draft*> wanted;
    for (Draft& d : drafts)  // the newest token of a sequence begins its block; all before it are committed
        if (d.open_to(DrafterKind::dflash) && d.sequence->pending() == 1) wanted.push_back(&d);
    const auto most = static_cast<size_t>(sequences_);
    for (size_t i = 0; i < wanted.size(); i += most)
        fill(std::span(wanted).subspan(i, std::min(most, wanted.size() - i)));
}

void DflashDrafter::fill(std::span<Draft*> drafts) {
    const int64_t guesses = memory_.block_rows - 1;
    const bool full_head = std::any_of(drafts.begin(), drafts.end(), [](const Draft* d) {
        const Request& r = d->sequence->request;
        return r.on_draft_logits || r.on_round;  // somebody compares
    });
    StepPlan& pass = plan(static_cast<int64_t>(drafts.size()), full_head);
    std::vector<InputRows> rows;
    for (const Draft* d : drafts) {
        std::vector<int32_t> tokens(static_cast<size_t>(memory_.block_rows), model_.info().dflash->mask);
        tokens.front() = d->sequence->tokens.back();
        const SequenceState& state = d->sequence->state;
        rows.push_back(
            {.state = &state, .begin = state.length, .tokens = std::move(tokens), .logit_rows = guesses});
    }
    pass.await_inputs();
    fill_inputs(pass, rows);
    pass.run();
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
