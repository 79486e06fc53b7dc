#include "tools/engine/mtp_drafter.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/ops/logits_top.h"
#include "ggml-like/parallel.h"
#include "tools/engine/scheduler.h"

namespace quern {
namespace {

/// Rows of a pass over a prompt at most: more would need more memory and be no faster.
constexpr int64_t kPromptRows = 1024;
/// Without drafts, answers catch up after so many tokens.
constexpr int64_t kMaxBehind = 32;
/// Rows that one thread norms.
constexpr size_t kRowsApiece = 64;

bool wants(const Sequence& s) { return allows(s.request.drafts.kind, DrafterKind::mtp); }

int64_t count_of(const std::vector<InputRows>& inputs) {
    int64_t rows = 0;
    for (const InputRows& i : inputs) rows += static_cast<int64_t>(i.tokens.size());
    return rows;
}

}  // namespace

MtpDrafter::MtpDrafter(const Model& model, Backend& backend, const StatePool& pool, PlanCache& plans,
                       const MemoryPlan& memory)
    : model_(model),
      backend_(backend),
      plans_(plans),
      limits_(memory.steps),
      sequences_(memory.sequences),
      pages_(memory.pages()),
      width_(model.info().width),
      kept_(pool.find(static_cast<int>(model.info().layers), StateRole::hidden)) {
    const int64_t rows = std::max(limits_.prompt_rows, limits_.answer_rows);
    step_hidden_ = {backend.alloc_host(rows * width_ * int64_t{sizeof(float)}, "hidden states of a step"),
                    [&backend](void* rows_memory) { backend.free_host(rows_memory); }};
    try_out();
}

/// The passes that answers need at once, and one over a prompt. Finds out how many sequences a pass drafts for.
void MtpDrafter::try_out() {
    const std::vector<float> zeros(static_cast<size_t>(width_), 0.0f);
    const int64_t most = backend_.captures() ? kPromptRows : kPageTokens;
    SequenceState nobody;
    nobody.slot = 0;
    nobody.pages.assign(static_cast<size_t>(pages_), 0);
    const auto rows_of = [&](int64_t sequences, int64_t tokens) {
        Rows rows;
        for (int64_t i = 0; i < sequences; ++i)
            rows.inputs.push_back({.state = &nobody,
                                   .begin = 0,
                                   .tokens = std::vector<int32_t>(static_cast<size_t>(tokens), 0)});
        rows.hidden.assign(static_cast<size_t>(sequences * tokens), zeros.data());
        return rows;
    };
    run(StepKind::prompt, rows_of(1, std::min({most, limits_.prompt_rows, pages_ * kPageTokens})),
        Pass::hidden, false);
    const int64_t sequences =
        backend_.captures() ? decode_bucket(std::min(sequences_, limits_.answer_rows)) : 1;
    for (int64_t n = 1; n <= sequences; n = next_bucket(n)) {
        try {
            run(StepKind::answer, rows_of(n, 1), Pass::hidden, true);
        } catch (const Error&) {
            if (n == 1) throw;
            break;
        }
        draft_rows_ = n;
    }
    if (!backend_.captures()) draft_rows_ = limits_.answer_rows;
    run(StepKind::answer, rows_of(1, std::min(kMaxAnswerSlice, limits_.answer_rows)), Pass::hidden, false);
    backend_.synchronize();
}

/// Pass::mtp of these rows, of which all have logits or none. `from`: the pass that left the hidden states.
StepPlan& MtpDrafter::run(StepKind kind, const Rows& rows, Pass from, bool logits) {
    const int64_t count = count_of(rows.inputs);
    BatchShape shape{.kind = kind,
                     .tokens = count,
                     .sequences = static_cast<int64_t>(rows.inputs.size()),
                     .pages = pages_,
                     .vocab = model_.info().vocab};
    const bool captured = kind == StepKind::answer && backend_.captures();
    if (captured && shape.tokens == shape.sequences)
        shape.tokens = shape.sequences = decode_bucket(shape.sequences);
    else if (captured)
        shape = verify_shape(shape, limits_.answer_rows);
    shape.logit_rows = logits ? shape.tokens : 0;
    shape.pass = Pass::mtp;
    StepPlan& plan = plans_.get(shape, captured ? PlanUse::repeatedly : PlanUse::sometimes);
    fill_inputs(plan, rows.inputs);
    fill_hidden(plan, rows.hidden, from);
    plan.plan->run();
    return plan;
}

void MtpDrafter::fill_hidden(StepPlan& plan, const std::vector<const float*>& rows, Pass from) const {
    Tensor to = *plan.normed_hidden;
    auto* bytes = plan.plan->input<std::byte>(plan.normed_hidden);
    to.data = bytes;
    std::fill(bytes + dtype_bytes(to.dtype, static_cast<int64_t>(rows.size()) * width_), bytes + to.bytes(),
              std::byte{0});
    const size_t parts = (rows.size() + kRowsApiece - 1) / kRowsApiece;
    for_each_parallel(backend_.threads(), parts, [&](size_t part) {
        std::vector<float> normed(static_cast<size_t>(width_));
        for (size_t i = part * kRowsApiece; i < std::min(rows.size(), (part + 1) * kRowsApiece); ++i) {
            model_.normed_hidden(from, rows[i], normed.data());
            store_floats(to, static_cast<int64_t>(i) * width_, width_, normed.data());
        }
    });
}

/// Where a slot keeps the hidden state of its sequence's last token.
std::byte* MtpDrafter::kept_hidden(const Sequence& s) const {
    return static_cast<std::byte*>(kept_.data) + s.state.slot * width_ * int64_t{sizeof(float)};
}

/// `begin`: the committed tokens; of a sequence that is new here, those of a kept state.
MtpDrafter::Known& MtpDrafter::known(const Sequence& s, int64_t begin) {
    const auto [at, fresh] = known_.try_emplace(s.id);
    Known& k = at->second;
    if (fresh && begin > 0) {
        k.entries = begin - 1;
        k.hidden.resize(static_cast<size_t>(width_));
        backend_.download(k.hidden.data(), kept_hidden(s), width_ * int64_t{sizeof(float)});
    }
    return k;
}

void MtpDrafter::computed(const Step& step, const StepPlan& plan) {
    prompts_.clear();
    int64_t rows = 0;
    bool wanted = step.kind == StepKind::prompt;  // whose states others may go on from
    for (const Slice& slice : step.slices) {
        rows += slice.count;
        wanted |= wants(*slice.sequence);
    }
    if (!wanted) return;
    backend_.download(step_hidden_.get(), plan.hidden->data, rows * width_ * int64_t{sizeof(float)});
    int64_t row = 0;
    for (const Slice& slice : step.slices) {
        Known& k = known(*slice.sequence, slice.begin);
        k.step_row = row;
        if (step.kind == StepKind::prompt) prompt_computed(slice, k);
        row += slice.count;
    }
}

/// All of a prompt's rows are committed. Its catch-up comes when the step's logits have been read, and also if its request has
/// ended then, since its state may be kept.
void MtpDrafter::prompt_computed(const Slice& slice, Known& k) {
    const Sequence& s = *slice.sequence;
    const int64_t end = slice.begin + slice.count;
    const float* last = step_hidden(k.step_row + slice.count - 1);
    CatchUp c = catch_up_of(s, k, slice.begin - k.entries);
    c.memory = std::move(k.hidden);  // where the first row points
    for (int64_t p = slice.begin; p + 1 < end; ++p) {
        c.tokens.push_back(s.tokens[static_cast<size_t>(p + 1)]);
        c.hidden.push_back(step_hidden(k.step_row + p - slice.begin));
    }
    prompts_.push_back(std::move(c));
    k.entries = end - 1;
    k.hidden.assign(last, last + width_);
    backend_.upload(kept_hidden(s), last, width_ * int64_t{sizeof(float)});
}

/// The first `count` positions whose hidden states are known.
MtpDrafter::CatchUp MtpDrafter::catch_up_of(const Sequence& s, const Known& k, int64_t count) const {
    CatchUp c{.state = s.state, .begin = k.entries, .tokens = {}, .hidden = {}};
    for (int64_t i = 0; i < count; ++i) {
        c.tokens.push_back(s.tokens[static_cast<size_t>(k.entries + i + 1)]);
        c.hidden.push_back(k.hidden.data() + i * width_);
    }
    return c;
}

void MtpDrafter::catch_up(StepKind kind, const std::vector<CatchUp>& list) {
    const int64_t most =
        kind == StepKind::prompt ? std::min(kPromptRows, limits_.prompt_rows) : limits_.answer_rows;
    Rows rows;
    const auto flush = [&] {
        if (!rows.hidden.empty()) run(kind, rows, Pass::hidden, false);
        rows = {};
    };
    for (const CatchUp& c : list) {
        const auto count = static_cast<int64_t>(c.tokens.size());
        for (int64_t at = 0; at < count;) {
            const int64_t more = std::min(count - at, most - static_cast<int64_t>(rows.hidden.size()));
            rows.inputs.push_back({.state = &c.state,
                                   .begin = c.begin + at,
                                   .tokens = {c.tokens.begin() + at, c.tokens.begin() + at + more}});
            rows.hidden.insert(rows.hidden.end(), c.hidden.begin() + at, c.hidden.begin() + at + more);
            at += more;
            if (static_cast<int64_t>(rows.hidden.size()) == most) flush();
        }
    }
    flush();
}

void MtpDrafter::accept(std::span<Sequence* const> sequences) {
    catch_up(StepKind::prompt, prompts_);
    std::vector<CatchUp> behind;
    for (const Sequence* s : sequences) {
        if (!wants(*s)) continue;
        Known& k = known_.at(s->id);
        const auto before = static_cast<int64_t>(k.hidden.size()) / width_;
        const int64_t rows = s->state.length - k.entries - before;  // none of a prompt
        k.hidden.insert(k.hidden.end(), step_hidden(k.step_row), step_hidden(k.step_row + rows));
        if (before + rows > kMaxBehind) behind.push_back(catch_up_of(*s, k, before + rows - 1));
    }
    catch_up(StepKind::answer, behind);
    for (const Sequence* s : sequences) {
        if (!wants(*s)) continue;
        Known& k = known_.at(s->id);
        if (static_cast<int64_t>(k.hidden.size()) <= kMaxBehind * width_) continue;
        k.hidden.erase(k.hidden.begin(), k.hidden.end() - width_);
        k.entries = s->state.length - 1;
    }
    prompts_.clear();
}

void MtpDrafter::propose(std::span<Draft> drafts) {
    std::vector<Guess> guesses;
    std::vector<CatchUp> behind;
    for (Draft& d : drafts) {
        const Sequence& s = *d.sequence;
        const auto known = known_.find(s.id);
        // The model's hidden states reach to the last committed token: it must be the last but one.
        if (!d.open_to(DrafterKind::mtp) || known == known_.end() || s.pending() != 1) continue;
        const Known& k = known->second;
        behind.push_back(catch_up_of(s, k, s.state.length - 1 - k.entries));
        guesses.push_back({&d, {k.hidden.end() - width_, k.hidden.end()}, s.tokens.back()});
    }
    catch_up(StepKind::answer, behind);
    for (const Guess& g : guesses) {  // the first guess completes the last committed position
        Known& k = known_.at(g.draft->sequence->id);
        k.entries = g.draft->sequence->state.length;
        k.hidden.clear();
    }
    for (int64_t step = 0; !guesses.empty(); ++step) {
        const auto most = static_cast<size_t>(draft_rows_);
        for (size_t i = 0; i < guesses.size(); i += most)
            guess(std::span(guesses).subspan(i, std::min(most, guesses.size() - i)), step);
        std::erase_if(guesses, [](const Guess& g) {
            return g.token < 0 || static_cast<int64_t>(g.draft->tokens.size()) == g.draft->most;
        });
    }
}

/// One more token of each draft; none (-1) if no logit is a number.
void MtpDrafter::guess(std::span<Guess> guesses, int64_t step) {
    Rows rows;
    for (const Guess& g : guesses) {
        const SequenceState& state = g.draft->sequence->state;
        rows.inputs.push_back(
            {.state = &state, .begin = state.length - 1 + step, .tokens = {g.token}, .logit_rows = 1});
        rows.hidden.push_back(g.hidden.data());
    }
    const StepPlan& plan = run(StepKind::answer, rows, step == 0 ? Pass::hidden : Pass::mtp, true);
    std::vector<int32_t> top(guesses.size() * kTopWords);
    std::vector<float> hidden(guesses.size() * static_cast<size_t>(width_));
    backend_.download(top.data(), plan.top->data, static_cast<int64_t>(top.size() * sizeof(int32_t)));
    backend_.download(hidden.data(), plan.hidden->data, static_cast<int64_t>(hidden.size() * sizeof(float)));
    for (size_t i = 0; i < guesses.size(); ++i) {
        Guess& g = guesses[i];
        g.token = top[i * kTopWords];
        const float* row = hidden.data() + i * static_cast<size_t>(width_);
        g.hidden.assign(row, row + width_);
        if (g.token < 0) continue;
        g.draft->tokens.push_back(g.token);
        const auto& watch = g.draft->sequence->request.on_draft_logits;
        if (!watch) continue;
        std::vector<float> logits(static_cast<size_t>(plan.logits->shape[1]));
        backend_.download(logits.data(), plan.logits->row<float>(static_cast<int64_t>(i)),
                          static_cast<int64_t>(logits.size() * sizeof(float)));
        watch(logits);
    }
}

}  // namespace quern
