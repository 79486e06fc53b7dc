// PaidDrafter: one drafter's tokens at the price of another's. Shows what a drafter costs whose weights are random: it drafts,
// and what it drafts is replaced by tokens of known quality.
#pragma once

#include <memory>
#include <vector>

#include "tools/engine/drafter.h"

namespace quern {

class PaidDrafter final : public Drafter {
  public:
    PaidDrafter(std::shared_ptr<Drafter> shown, std::shared_ptr<Drafter> paid)
        : shown_(std::move(shown)), paid_(std::move(paid)) {}

    const char* name() const override { return shown_->name(); }
    void prepare(const Step& step) override {
        shown_->prepare(step);
        paid_->prepare(step);
    }
    /// As many tokens as both have, late ones included.
    void propose(std::span<Draft> drafts) override {
        std::vector<Draft> paid(drafts.begin(), drafts.end());
        paid_->propose(paid);
        shown_->propose(drafts);
        for (size_t i = 0; i < paid.size(); ++i) {
            const auto most = std::max(paid[i].tokens.size(), static_cast<size_t>(paid[i].late));
            drafts[i].tokens.resize(std::min(drafts[i].tokens.size(), most));
            drafts[i].ahead = paid[i].ahead;
            drafts[i].read = paid[i].read, drafts[i].leads = paid[i].leads;
        }
    }
    /// It has none, but waits for those that are paid for.
    std::span<const int32_t> late_tokens() override {
        paid_->late_tokens();
        return {};
    }
    bool drafts_ahead() const override { return paid_->drafts_ahead(); }
    Plan* ready_ahead(const Slice& slice, int64_t most, DraftRows rows) override {
        return paid_->ready_ahead(slice, most, rows);
    }
    void propose_ahead() override { paid_->propose_ahead(); }
    void settle_ahead(int64_t length) override { paid_->settle_ahead(length); }
    void computed(const Step& step, const StepPlan& plan) override {
        shown_->computed(step, plan);
        paid_->computed(step, plan);
    }
    void accept(std::span<Sequence* const> sequences) override {
        shown_->accept(sequences);
        paid_->accept(sequences);
    }
    void release(const Sequence& s) override {
        shown_->release(s);
        paid_->release(s);
    }

  private:
    std::shared_ptr<Drafter> shown_, paid_;
};

}  // namespace quern
