#include "tools/engine/speculation.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ggml-like/check.h"
#include "tools/engine/draft_rows.h"
#include "tools/engine/plan_cache.h"
#include "tools/engine/sampler.h"

namespace quern {

namespace {

int64_t rows_of(const Step& step) {
    int64_t rows = 0;
    for (const Slice& slice : step.slices) rows += slice.count;
    return rows;
}

bool always_full(const Slice* slice) { return slice->sequence->request.drafts.full; }

}  // namespace

const char* drafter_name(DrafterKind kind) {
    constexpr const char* kNames[] = {"none", "auto", "lookup", "mtp", "dflash"};
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

Speculation::Speculation(const SpeculationOptions& options, std::vector<std::shared_ptr<Drafter>> drafters,
                         const Limits& limits)
    : options_(options), limits_(limits), drafters_(std::move(drafters)) {}

/// Tokens that the answer may still get.
int64_t Speculation::left(const Sequence& s) const {
    return std::min(limits_.context - static_cast<int64_t>(s.tokens.size()),
                    s.request.max_tokens - static_cast<int64_t>(s.result.tokens.size()));
}

/// Tokens that a draft may add to a slice. The last token of an answer is never run, so a draft ends two tokens before the
/// end.
int64_t Speculation::most(const Slice& slice) const {
    const Sequence& s = *slice.sequence;
    const DraftOptions& wanted = s.request.drafts;
    if (!slice.last || wanted.kind == DrafterKind::none) return 0;
    return std::min({options_.draft_max, wanted.most, journal_entries(options_) - slice.count, left(s) - 1});
}

bool Speculation::Choice::any() const {
    return std::any_of(drafts.begin(), drafts.end(), [](const Draft& d) { return d.most > 0; });
}

/// Of these slices of the step. Those that are always full come first and share alike.
Speculation::Choice Speculation::choice(const Step& step, std::span<const Slice* const> slices) const {
    Choice c{.plain = {cost_size(step), rows_of(step)}, .answers = std::ssize(step.slices)};
    const AcceptanceRecord::Chances expected = all_.chances();
    int64_t spare = limits_.answer_rows - c.plain.rows,
            full = std::count_if(slices.begin(), slices.end(), always_full);
    for (const Slice* slice : slices) {
        Draft& draft = c.drafts.emplace_back(Draft{slice->sequence, 0});
        draft.rows = rows_for(*slice->sequence);
        if (always_full(slice)) {
            draft.most = std::min(most(*slice), spare / full--);
            spare -= draft.most;
            c.plain.rows += draft.most;
            if (draft.most > 0) c.plain.draft_rows = std::max(c.plain.draft_rows, draft.rows);
        } else {
            c.candidates.push_back(
                {records_.at(slice->sequence->id).chances(expected), most(*slice), draft.rows});
        }
    }
    c.lengths = draft_lengths(c.candidates, costs_, c.plain, c.answers, spare);
    auto next = c.lengths.begin();
    for (size_t i = 0; i < slices.size(); ++i)
        if (!always_full(slices[i])) c.drafts[i].most = *next++;
    return c;
}

bool Speculation::stays_plain(const Step& step) const {
    if (step.kind != StepKind::answer) return false;
    std::vector<const Slice*> slices;
    for (const Slice& slice : step.slices) {
        if (!slice.draft.empty()) return false;
        if (slice.goes_on() && most(slice) > 0) slices.push_back(&slice);
    }
    return !choice(step, slices).any();
}

/// For the report.
void Speculation::note(const Choice& c) {
    const StepSize chosen = with_drafts(c.plain, c.candidates, c.lengths);
    const double without = costs_.seconds(c.plain), with = costs_.seconds(chosen);
    ++report_.steps;
    report_.last_sequences = c.answers;
    report_.last_drafted = chosen.rows - c.plain.rows;
    report_.plain_rate = std::isfinite(without) ? static_cast<double>(c.answers) / without : 0;
    report_.last_rate = std::isfinite(with) ? expected_tokens(c.candidates, c.lengths, c.answers) / with : 0;
}

/// Rows of the head that drafts of the sequence should be chosen from.
DraftRows Speculation::rows_for(const Sequence& s) const { return draft_rows_for(s, limits_.draft_tokens); }

/// For the report: the rows that a pass reads which should read these (models/model.h).
DraftRows Speculation::rows_read(DraftRows chosen) const {
    const auto& known = limits_.draft_tokens;
    if (!known) return DraftRows::all;
    return known->whole_too ? chosen : std::min(chosen, DraftRows::copied);
}

/// For the report, and the most rows of the head that these drafts were chosen from; those by lookup from none.
DraftRows Speculation::note_rows(std::span<const Draft> drafts) {
    DraftRows most = DraftRows::frequent;
    for (const Draft& d : drafts) {
        if (!d.ahead && !d.read) continue;
        const DraftRows rows = rows_[d.sequence->id] = d.ahead ? ahead_rows_ : d.rows;
        most = std::max(most, rows);
        if (d.leads) ++report_.passes[static_cast<size_t>(rows_read(*d.read))];
    }
    return most;
}

SpeculationReport Speculation::report() const {
    SpeculationReport r = report_;
    r.costs = costs_.list();
    if (r.head_passes() > 0)
        for (const auto& [id, rows] : rows_) r.answers.push_back(rows_read(rows));
    double all = 1;
    const AcceptanceRecord::Chances chances = all_.chances();
    for (int64_t i = 0; i < options_.draft_max; ++i)
        r.acceptance.push_back(all *= chances[static_cast<size_t>(i)]);
    return r;
}

/// The number of sequences under which the cost of a step is known.
int64_t Speculation::cost_size(const Step& step) const {
    const auto sequences = static_cast<int64_t>(step.slices.size());
    return limits_.padded ? padded_sequences(sequences) : sequences;
}

void Speculation::measured(const Step& step, double seconds, double drafting) {
    if (in_vain_) return;
    const int64_t rows = rows_of(step);
    costs_.add({cost_size(step), rows, step.draft_rows}, seconds);
    if (rows == static_cast<int64_t>(step.slices.size())) return;
    ++report_.timed;
    report_.round_seconds += seconds;
    report_.drafting_seconds += drafting;
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

void Speculation::draft(Step& step, const Reserve& reserve, bool plain) {
    in_vain_ = std::exchange(ahead_, false);
    for (const auto& drafter : drafters_) drafter->prepare(step);
    if (step.kind != StepKind::answer) return;
    std::vector<Slice*> slices;
    for (Slice& slice : step.slices)
        if (most(slice) > 0) {
            slices.push_back(&slice);
            records_[slice.sequence->id].fade();
        }
    if (slices.empty()) return;
    all_.fade();
    if (plain) return note({.plain = {cost_size(step), rows_of(step)}, .answers = std::ssize(step.slices)});
    Choice chosen = choice(step, {slices.begin(), slices.end()});
    note(chosen);
    std::vector<Draft>& drafts = chosen.drafts;
    std::vector<Draft> wanted;
    std::vector<Slice*> drafting;
    for (size_t i = 0; i < drafts.size(); ++i)
        if (drafts[i].most > 0) {
            reserve(*slices[i]->sequence, slices[i]->begin + slices[i]->count + drafts[i].most);
            drafts[i].may_be_late = limits_.whole && step.slices.size() == 1 && !drafts[i].watched();
            wanted.push_back(std::move(drafts[i]));
            drafting.push_back(slices[i]);
        }
    if (wanted.empty()) return;
    drafted_ = nullptr;
    for (const auto& drafter : drafters_) {
        drafter->propose(wanted);
        const Draft& first = wanted.front();
        if (drafted_ == nullptr && (first.late > 0 || !first.tokens.empty())) drafted_ = drafter.get();
    }
    if (wanted.front().ahead) {
        in_vain_ = false;
        ++report_.ahead;
    }
    const DraftRows rows = note_rows(wanted);
    bool any = false;
    for (size_t i = 0; i < wanted.size(); ++i) {
        Slice& slice = *drafting[i];
        slice.late = wanted[i].late > 0;
        slice.draft = slice.late ? std::vector<int32_t>(static_cast<size_t>(wanted[i].late), -1)
                                 : possible(std::move(wanted[i]));
        slice.count += static_cast<int64_t>(slice.draft.size());
        any |= !slice.draft.empty();
    }
    if (!any) return;
    ++report_.rounds;
    step.draft_rows = rows;
    for (Slice& slice : step.slices) slice.logit_rows = slice.count;
}

void Speculation::accept(const Slice& slice) {
    Sequence& s = *slice.sequence;
    const auto drafted = static_cast<int64_t>(slice.draft.size());
    const int64_t accepted = std::max<int64_t>(0, matching_rows(slice) - (slice.count - drafted));
    s.result.drafted += drafted;
    s.result.accepted += accepted;
    report_.drafted += drafted;
    report_.accepted += accepted;
    if (drafted > 0 && s.request.on_round)
        s.request.on_round(slice.begin + slice.count - drafted, slice.draft, accepted);
    if (s.done()) return;
    all_.add(drafted, accepted);
    records_[s.id].add(drafted, accepted);
}

void Speculation::queued(Step& step) {
    Slice& slice = step.slices.front();
    if (step.slices.size() != 1 || slice.draft.empty() || drafted_ == nullptr) return;
    const auto tokens = drafted_->late_tokens();
    if (std::exchange(slice.late, false))
        slice.draft.assign(tokens.begin(), tokens.begin() + std::ssize(slice.draft));
}

Plan* Speculation::ready_ahead(const Step& step, int64_t most) {
    const Slice& slice = step.slices.front();
    ahead_rows_ = rows_for(*slice.sequence);
    return drafted_->ready_ahead(slice, most, ahead_rows_);
}

void Speculation::propose_ahead() {
    drafted_->propose_ahead();
    ahead_ = true;
    ++report_.passes[static_cast<size_t>(rows_read(ahead_rows_))];
}

int64_t Speculation::ahead(const Step& step) const {
    const bool alone = step.kind == StepKind::answer && step.slices.size() == 1;
    if (!alone || !limits_.whole || !limits_.asynchronous) return 0;
    const Slice& slice = step.slices.front();
    const auto drafted = static_cast<int64_t>(slice.draft.size());
    if (drafted == 0 || drafted + 1 != slice.count || drafted_ == nullptr || !drafted_->drafts_ahead())
        return 0;
    const Request& r = slice.sequence->request;
    if (!takes_highest(r.sampling) || r.allow || r.on_draft_logits || r.on_round) return 0;
    // If all of the draft is right, there is as much left.
    const int64_t most = std::min(
        {options_.draft_max, r.drafts.most, limits_.answer_rows - 1, left(*slice.sequence) - drafted - 2});
    if (most <= 0 || r.drafts.full) return std::max<int64_t>(most, 0);
    const DraftCandidate candidate{records_.at(slice.sequence->id).chances(all_.chances()), most,
                                   rows_for(*slice.sequence)};
    return draft_lengths({&candidate, 1}, costs_, {cost_size(step), 1}, 1, limits_.answer_rows - 1).front();
}

void Speculation::settle_ahead(const Slice& slice, std::pair<int64_t, int32_t> chosen) {
    const Sequence& s = *slice.sequence;
    const bool right = !s.done() && s.pending() == 1 && s.state.length == slice.begin + chosen.first &&
                       s.tokens.back() == chosen.second;
    drafted_->settle_ahead(right ? s.state.length : -1);
}

void Speculation::computed(const Step& step, const StepPlan& plan) {
    for (const auto& drafter : drafters_) drafter->computed(step, plan);
}

void Speculation::committed(const Step& step) {
    std::vector<Sequence*> live;
    for (const Slice& slice : step.slices)
        if (slice.goes_on()) live.push_back(slice.sequence);
    for (const auto& drafter : drafters_) drafter->accept(live);
}

void Speculation::release(const Sequence& s) {
    records_.erase(s.id);
    rows_.erase(s.id);
    for (const auto& drafter : drafters_) drafter->release(s);
}

}  // namespace quern
