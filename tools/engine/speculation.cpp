#include "tools/engine/speculation.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "tools/engine/lookup_drafter.h"

namespace quern {

const char* drafter_name(DrafterKind kind) {
    constexpr const char* kNames[] = {"none", "auto", "lookup"};
    return kNames[static_cast<size_t>(kind)];
}

int64_t matching_rows(const Slice& slice) {
    const std::vector<int32_t>& tokens = slice.sequence->tokens;
    const auto known = std::min(slice.count, static_cast<int64_t>(tokens.size()) - slice.begin);
    const int64_t own = slice.count - static_cast<int64_t>(slice.draft.size());
    int64_t rows = std::min(own, known);
    while (rows < known &&
           tokens[static_cast<size_t>(slice.begin + rows)] == slice.draft[static_cast<size_t>(rows - own)])
        ++rows;
    return rows;
}

void check_drafts(const DraftOptions& wanted, const SpeculationOptions& options) {
    if (wanted.most < 0) FAIL(usage, "drafts of {} tokens; choose at least 0", wanted.most);
    const bool made = wanted.kind == DrafterKind::none || wanted.kind == DrafterKind::automatic ||
                      options.kind == DrafterKind::automatic || options.kind == wanted.kind;
    if (!made)
        FAIL(usage, "drafts by {} were asked for; this engine was started with --spec {}",
             drafter_name(wanted.kind), drafter_name(options.kind));
}

Speculation::Speculation(const SpeculationOptions& options, std::shared_ptr<Drafter> drafter,
                         const Limits& limits)
    : options_(options), limits_(limits) {
    if (drafter == nullptr) drafter = std::make_shared<LookupDrafter>();
    drafters_.push_back(std::move(drafter));
}

/// Tokens that a draft may add to a slice, beside which `rows` rows are free. The last token of an answer is never run, so
/// a draft ends two tokens before the end.
int64_t Speculation::most(const Slice& slice, int64_t rows) const {
    const Sequence& s = *slice.sequence;
    const DraftOptions& wanted = s.request.drafts;
    if (!slice.last || wanted.kind == DrafterKind::none) return 0;
    const int64_t left = std::min(limits_.context - static_cast<int64_t>(s.tokens.size()),
                                  s.request.max_tokens - static_cast<int64_t>(s.result.tokens.size()));
    return std::min(
        {options_.draft_max, wanted.most, journal_entries(options_) - slice.count, left - 1, rows});
}

/// The draft as far as it may be long, up to its first id that the model has no logit for.
std::vector<int32_t> Speculation::possible(Draft draft) const {
    std::vector<int32_t>& tokens = draft.tokens;
    tokens.resize(std::min(tokens.size(), static_cast<size_t>(draft.most)));
    const auto bad =
        std::find_if(tokens.begin(), tokens.end(), [&](int32_t id) { return id < 0 || id >= limits_.vocab; });
    tokens.erase(bad, tokens.end());
    return tokens;
}

void Speculation::draft(Step& step) {
    if (step.kind != StepKind::answer) return;
    int64_t rows = limits_.answer_rows, waiting = static_cast<int64_t>(step.slices.size());
    for (const Slice& slice : step.slices) rows -= slice.count;
    std::vector<Draft> drafts;
    std::vector<Slice*> slices;
    for (Slice& slice : step.slices) {
        const int64_t share = std::max<int64_t>(0, most(slice, rows / waiting--));
        rows -= share;
        if (share == 0) continue;
        drafts.push_back({slice.sequence, share});
        slices.push_back(&slice);
    }
    if (drafts.empty()) return;
    for (const auto& drafter : drafters_) drafter->propose(drafts);
    bool any = false;
    for (size_t i = 0; i < drafts.size(); ++i) {
        Slice& slice = *slices[i];
        slice.draft = possible(std::move(drafts[i]));
        slice.count += static_cast<int64_t>(slice.draft.size());
        any |= !slice.draft.empty();
    }
    if (!any) return;
    for (Slice& slice : step.slices) slice.logit_rows = slice.count;
}

void Speculation::accept(const Slice& slice) {
    Sequence& s = *slice.sequence;
    if (slice.draft.empty()) return;
    const auto drafted = static_cast<int64_t>(slice.draft.size());
    s.result.drafted += drafted;
    s.result.accepted += std::max<int64_t>(0, matching_rows(slice) - (slice.count - drafted));
    for (const auto& drafter : drafters_) drafter->accept(s);
}

void Speculation::release(const Sequence& s) {
    for (const auto& drafter : drafters_) drafter->release(s);
}

}  // namespace quern
