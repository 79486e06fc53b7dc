#include "tools/engine/mtp_drafter.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

#include "ggml-like/check.h"
#include "tools/engine/scheduler.h"
#include "tools/engine/stage_marks.h"

namespace quern {
namespace {

/// Rows of a pass that only catches up, at most: more would need more memory and be no faster.
constexpr int64_t kCatchUpRows = 1024;
/// Positions that may be without keys and values after a step: the ring also holds what the next step leaves.
constexpr int64_t kMaxBehind = kHiddenRing - (kMaxDraft + 1);
static_assert(kMaxBehind >= 8 && kMaxDraft + 1 >= kMaxAnswerSlice);

bool wants(const Sequence& s) { return allows(s.request.drafts.kind, DrafterKind::mtp); }

template <typename Range>
int64_t count_of(const Range& list) {
    int64_t rows = 0;
    for (const auto& r : list) rows += static_cast<int64_t>(r.next.size());
    return rows;
}

}  // namespace

MtpDrafter::MtpDrafter(const Model& model, Backend& backend, PlanCache& plans, const MemoryPlan& memory,
                       int64_t draft_max)
    : model_(model),
      backend_(backend),
      plans_(plans),
      limits_(memory.steps),
      sequences_(memory.sequences),
      pages_(memory.pages()),
      draft_max_(draft_max),
      ids_(backend.alloc_host(padded_sequences(limits_.answer_rows) * draft_max * int64_t{sizeof(int32_t)},
                              "drafts"),
           [&backend](void* m) { backend.free_host(m); }) {
    try_out();
}

/// The passes that answers need at once. Finds out how many sequences a pass drafts for.
void MtpDrafter::try_out() {
    SequenceState nobody;
    nobody.slot = 0;
    nobody.pages.assign(static_cast<size_t>(pages_), 0);
    const auto rows_of = [&](int64_t sequences, int64_t tokens) {
        const Rows rows{
            .state = nobody, .begin = 0, .next = std::vector<int32_t>(static_cast<size_t>(tokens), 0)};
        return std::vector<Rows>(static_cast<size_t>(sequences), rows);
    };
    run(StepKind::prompt,
        rows_of(1, std::min<int64_t>({kPageTokens, limits_.prompt_rows, pages_ * kPageTokens})), 0);
    const int64_t sequences =
        backend_.captures() ? padded_sequences(std::min(sequences_, limits_.answer_rows)) : 1;
    for (int64_t n = 1; n <= sequences; n = next_padded(n)) {
        try {
            run(StepKind::answer, rows_of(n, 1), 1);
        } catch (const Error&) {
            if (n == 1) throw;
            break;
        }
        draft_rows_ = n;
    }
    if (!backend_.captures()) {
        draft_rows_ = limits_.answer_rows;
    } else {
        const auto longest = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(draft_max_ + 1)));
        for (int64_t rows = 1; rows <= std::min(longest, limits_.answer_rows); rows *= 2)
            for (int64_t n = 1; n <= draft_max_; ++n) run(StepKind::answer, rows_of(1, rows), n);
    }
    run(StepKind::answer, rows_of(1, std::min(kMaxAnswerSlice, limits_.answer_rows)), 0);
    backend_.synchronize();
}

/// Pass::mtp of these rows, with drafts after each of them or none, ready to run.
StepPlan& MtpDrafter::filled(StepKind kind, std::span<const Rows> list, int64_t drafts, DraftRows rows,
                             bool full_head) {
    const BatchShape wanted{.kind = kind,
                            .tokens = count_of(list),
                            .sequences = static_cast<int64_t>(list.size()),
                            .pages = pages_,
                            .vocab = model_.info().vocab,
                            .pass = Pass::mtp,
                            .drafts = drafts,
                            .draft_rows = full_head ? DraftRows::all : rows,
                            .full_head = full_head};
    const bool captured = kind == StepKind::answer && backend_.captures();
    StepPlan& plan = plans_.get(captured ? draft_shape(wanted, limits_.answer_rows) : wanted,
                                captured ? PlanUse::repeatedly : PlanUse::sometimes);
    plan.await_inputs();
    fill(plan, list);
    return plan;
}

StepPlan& MtpDrafter::run(StepKind kind, std::span<const Rows> list, int64_t drafts, DraftRows rows,
                          bool full_head) {
    StepPlan& pass = filled(kind, list, drafts, rows, full_head);
    pass.run_pass();
    return pass;
}

void MtpDrafter::fill(StepPlan& plan, std::span<const Rows> list) const {
    std::vector<InputRows> inputs;
    for (const Rows& r : list)
        inputs.push_back({.state = &r.state,
                          .begin = r.begin,
                          .tokens = r.next,
                          .late = r.late,
                          .follows = r.follows,
                          .images = r.images});
    fill_inputs(plan, inputs);
    const auto input = [&](const Tensor* t) {
        auto* values = t != nullptr ? plan.plan->input<int32_t>(t) : nullptr;
        if (values != nullptr) std::fill_n(values, t->elements(), 0);
        return values;
    };
    int32_t *ring = input(plan.mtp.ring_rows), *last = input(plan.mtp.last_rows),
            *positions = input(plan.mtp.later_positions), *sequence = input(plan.mtp.later_sequence),
            *rope = input(plan.mtp.later_rope), *start = input(plan.mtp.later_start);
    int32_t row = 0;
    for (size_t i = 0; i < list.size(); ++i) {
        const Rows& r = list[i];
        const auto count = static_cast<int64_t>(r.next.size());
        for (int64_t p = r.begin; p < r.begin + count; ++p)
            ring[row++] = static_cast<int32_t>(r.state.slot * kHiddenRing + p % kHiddenRing);
        if (last != nullptr) last[i] = row - 1;
        for (int64_t k = 0; k + 1 < plan.shape.drafts; ++k) {
            const int64_t at = k * plan.shape.sequences + static_cast<int64_t>(i),
                          token = r.begin + (r.follows ? 0 : count) + k;
            positions[at] = static_cast<int32_t>(token);
            if (rope != nullptr) rope[at] = r.images != nullptr ? r.images->place(token).time : positions[at];
        }
    }
    if (start == nullptr) return;
    std::iota(start, start + plan.shape.sequences + 1, 0);
    std::iota(sequence, sequence + plan.shape.sequences, 0);
    std::fill(sequence + list.size(), sequence + plan.shape.sequences, -1);
}

/// The positions before `end` that have no keys and values yet.
MtpDrafter::Rows MtpDrafter::rows_of(const Sequence& s, int64_t end) const {
    const int64_t begin = entries_.at(s.id);
    return {.state = s.state,
            .begin = begin,
            .next = {s.tokens.begin() + begin + 1, s.tokens.begin() + end + 1},
            .images = &s.images};
}

/// A sequence that is new here and goes on from a kept state: the last position's keys and values were made with the token
/// that followed it in another sequence.
void MtpDrafter::prepare(const Step& step) {
    std::vector<Rows> behind;
    for (const Slice& slice : step.slices) {
        const auto [at, fresh] = entries_.try_emplace(slice.sequence->id, 0);
        if (!fresh || slice.begin == 0) continue;
        at->second = slice.begin - 1;
        behind.push_back(rows_of(*slice.sequence, slice.begin));
        at->second = slice.begin;
    }
    catch_up(behind);
}

/// All of a prompt's rows are committed, and their keys and values are there, but for one whose next token is not known.
void MtpDrafter::computed(const Step& step, const StepPlan&) {
    if (step.kind != StepKind::prompt) return;
    for (const Slice& slice : step.slices)
        if (slice.goes_on())
            entries_[slice.sequence->id] =
                std::min(slice.begin + slice.count, static_cast<int64_t>(slice.sequence->tokens.size()) - 1);
}

void MtpDrafter::catch_up(const std::vector<Rows>& list) {
    const bool few = count_of(list) <= limits_.answer_rows;
    const int64_t most = few ? limits_.answer_rows : std::min(kCatchUpRows, limits_.prompt_rows);
    std::vector<Rows> together;
    const auto flush = [&] {
        if (!together.empty()) run(few ? StepKind::answer : StepKind::prompt, together, 0);
        together.clear();
    };
    for (const Rows& r : list) {
        if (count_of(together) + static_cast<int64_t>(r.next.size()) > most) flush();
        together.push_back(r);
    }
    flush();
}

void MtpDrafter::accept(std::span<Sequence* const> sequences) {
    std::vector<Rows> behind;
    for (const Sequence* s : sequences) {
        if (!wants(*s) || s->in_prompt() || s->state.length - entries_.at(s->id) <= kMaxBehind) continue;
        behind.push_back(rows_of(*s, s->state.length - 1));  // drafts begin with the last one
        entries_[s->id] = s->state.length - 1;
    }
    catch_up(behind);
}

/// Drafts begin with the rows that the last round committed. Where these are more, or of many sequences, all but the last row
/// of each get their keys and values before.
void MtpDrafter::shorten(std::vector<Rows>& list) {
    const bool crowded = list.size() > 1 && count_of(list) > limits_.answer_rows / 2;
    std::vector<Rows> before;
    for (Rows& r : list) {
        const auto rows = static_cast<int64_t>(r.next.size());
        if (rows == 1 || (!crowded && rows <= draft_max_ + 1)) continue;
        before.push_back({.state = r.state,
                          .begin = r.begin,
                          .next = {r.next.begin(), r.next.end() - 1},
                          .images = r.images});
        r.begin += rows - 1;
        r.next = {r.next.back()};
    }
    catch_up(before);
}

/// All rows of the step that is queued, of which those count that it finds right.
Plan* MtpDrafter::ready_ahead(const Slice& slice, int64_t most, DraftRows draft_rows) {
    const Sequence& s = *slice.sequence;
    Rows rows{.state = s.state, .begin = slice.begin, .next = slice.draft, .images = &s.images};
    rows.next.push_back(0);  // what the step chooses
    rows.late = slice.late ? std::ssize(slice.draft) : 0;
    rows.follows = true;
    ahead_pass_ = &filled(StepKind::answer, {&rows, 1}, most, draft_rows, false);
    ahead_ = s.id;
    ahead_tokens_ = most;
    ahead_length_ = -1;
    return ahead_pass_->plan.get();
}

void MtpDrafter::propose_ahead() {
    ahead_pass_->plan->run_uploaded();
    send(*ahead_pass_);
}

/// Whether what was drafted ahead is a draft of these.
bool MtpDrafter::take_ahead(std::span<Draft> drafts) {
    const RequestId ahead = std::exchange(ahead_, 0);
    Draft& d = drafts.front();
    if (d.sequence->id != ahead || d.sequence->state.length != ahead_length_ || d.sequence->pending() != 1 ||
        !d.may_be_late || !d.open_to(DrafterKind::mtp))
        return false;
    late_ = ahead_tokens_;
    d.late = std::min(late_, d.most);
    d.ahead = true;
    entries_[ahead] = d.sequence->state.length;
    return true;
}

void MtpDrafter::propose(std::span<Draft> drafts) {
    if (take_ahead(drafts)) return;
    late_ = 0;
    std::vector<Rows> list;
    for (Draft& d : drafts) {
        const Sequence& s = *d.sequence;
        // The model's hidden states reach to the last committed token: it must be the last but one.
        if (!d.open_to(DrafterKind::mtp) || !entries_.contains(s.id) || s.pending() != 1) continue;
        list.push_back(rows_of(s, s.state.length));
        list.back().draft = &d;
        entries_[s.id] = s.state.length;
    }
    shorten(list);
    // As many in a pass as it has rows for; of those that somebody watches one, since it leaves all logits.
    for (size_t begin = 0, end = 0; begin < list.size(); begin = end) {
        const bool watch = list[begin].draft->watched();
        for (int64_t rows = 0;
             end < list.size() && end - begin < static_cast<size_t>(watch ? 1 : draft_rows_); ++end) {
            rows += static_cast<int64_t>(list[end].next.size());
            if (end > begin && (rows > limits_.answer_rows || list[end].draft->watched())) break;
        }
        draft(std::span(list).subspan(begin, end - begin), watch);
    }
}

void MtpDrafter::draft(std::span<const Rows> list, bool watch) {
    int64_t most = 0;
    DraftRows rows = DraftRows::frequent;
    for (const Rows& r : list) {
        most = std::max(most, r.draft->most);
        rows = std::max(rows, r.draft->rows);
    }
    const StepPlan& pass = run(StepKind::answer, list, most, rows, watch);
    for (const Rows& r : list) r.draft->read = pass.shape.draft_rows;
    list.front().draft->leads = true;
    if (!list.front().draft->may_be_late) return read_drafts(list, pass, watch);
    list.front().draft->late = late_ = most;
    send(pass);
}

/// Sends its ids to the host.
void MtpDrafter::send(const StepPlan& pass) {
    pass.device->send_beside(ids_.get(), pass.mtp.drafts->data, pass.mtp.drafts->bytes(), kDraftsMark);
}

std::span<const int32_t> MtpDrafter::late_tokens() {
    if (late_ == 0) return {};
    backend_.await_mark(kDraftsMark);
    return {static_cast<const int32_t*>(ids_.get()), static_cast<size_t>(late_)};
}

void MtpDrafter::read_drafts(std::span<const Rows> list, const StepPlan& plan, bool watch) {
    const int64_t sequences = plan.shape.sequences, count = plan.shape.drafts;
    const auto* ids = static_cast<const int32_t*>(ids_.get());
    backend_.download(ids_.get(), plan.mtp.drafts->data, plan.mtp.drafts->bytes());
    for (size_t i = 0; i < list.size(); ++i) {
        Draft& d = *list[i].draft;
        for (int64_t k = 0; k < std::min(d.most, count); ++k) {
            d.tokens.push_back(ids[k * sequences + static_cast<int64_t>(i)]);
            const auto& on_logits = d.sequence->request.on_draft_logits;
            if (!watch || !on_logits) continue;
            const Tensor& rows = *plan.mtp.logits[static_cast<size_t>(k)];
            std::vector<float> logits(static_cast<size_t>(rows.shape[1]));
            backend_.download(logits.data(), rows.row<float>(static_cast<int64_t>(i)),
                              static_cast<int64_t>(logits.size() * sizeof(float)));
            on_logits(logits);
        }
    }
}

}  // namespace quern
