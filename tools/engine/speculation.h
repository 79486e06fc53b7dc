// Speculation: adds drafts to answer steps and keeps count of what comes of them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "ggml-like/ops/conv_gated_delta_net.h"
#include "tools/engine/draft_length.h"
#include "tools/engine/drafter.h"
#include "tools/engine/scheduler.h"

namespace quern {

/// Rows of an answer step of a sequence with a draft of `draft_max` tokens at most; the entries of its journal. 0: without
/// speculation.
static_assert(1 + kMaxDraft <= kMaxJournalEntries);
inline int64_t journal_entries(const SpeculationOptions& o) { return o.on() ? 1 + o.draft_max : 0; }

class Speculation {
  public:
    struct Limits {
        int64_t context;      // tokens a sequence may hold
        int64_t answer_rows;  // of a step
        int64_t vocab;        // ids that may be sampled
        bool padded;          // costs are those of padded numbers of sequences (plan_cache.h)
        bool whole;           // one device has all of the model, and drafts may stay on it
        bool asynchronous;    // the device works while the host does: it may draft ahead
        std::optional<DraftTokens> draft_tokens;  // ModelInfo::draft_tokens
    };
    /// Makes room in a sequence's state for so many tokens in all.
    using Reserve = std::function<void(Sequence&, int64_t tokens)>;

    /// `drafters`: asked one after another, each for what the ones before it left open.
    Speculation(const SpeculationOptions& options, std::vector<std::shared_ptr<Drafter>> drafters,
                const Limits& limits);

    /// Adds drafts to the slices of an answer step that end with their sequence's newest token, as far as its rows go; none where
    /// the step is to stay `plain`. With a draft in it, every row of the step gets its logits.
    void draft(Step& step, const Reserve& reserve, bool plain);
    /// Whether this answer step had no drafts, and the next one of its sequences would have none either.
    bool stays_plain(const Step& step) const;
    /// The step is queued: waits for the tokens of a late draft.
    void queued(Step& step);
    /// How long a draft should be made ahead, after this step; 0: none. Else ready_ahead readies the pass before the step is queued and
    /// returns its plan, as Drafter has it, and propose_ahead queues it behind.
    int64_t ahead(const Step& step) const;
    Plan* ready_ahead(const Step& step, int64_t most);
    void propose_ahead();
    /// `chosen`: what the device took for the step's choice (ops/accept_drafts.h). After accept().
    void settle_ahead(const Slice& slice, std::pair<int64_t, int32_t> chosen);
    /// A step has run, and its results can be read.
    void computed(const Step& step, const StepPlan& plan);
    /// An answer step took so long, drafting included, which took `drafting` of it.
    void measured(const Step& step, double seconds, double drafting);
    /// The rows of `slice` that were computed with the sequence's tokens are committed; also if it has ended.
    void accept(const Slice& slice);
    /// All that a step computed is committed, or was wrong.
    void committed(const Step& step);
    void release(const Sequence& s);
    SpeculationReport report() const;

  private:
    int64_t left(const Sequence& s) const;
    int64_t most(const Slice& slice) const;

    /// How long the drafts of some slices of a step may be.
    struct Choice {
        std::vector<Draft> drafts;               // one a slice
        std::vector<DraftCandidate> candidates;  // those that are not always full
        std::vector<int64_t> lengths;            // of these
        StepSize plain;                          // the step without the candidates' drafts
        int64_t answers = 0;                     // sequences of the step

        bool any() const;
    };
    Choice choice(const Step& step, std::span<const Slice* const> slices) const;
    void note(const Choice& choice);
    DraftRows note_rows(std::span<const Draft> drafts);
    DraftRows rows_for(const Sequence& s) const;
    DraftRows rows_read(DraftRows chosen) const;
    int64_t cost_size(const Step& step) const;
    std::vector<int32_t> possible(Draft draft) const;

    SpeculationOptions options_;
    Limits limits_;
    std::vector<std::shared_ptr<Drafter>> drafters_;
    Drafter* drafted_ = nullptr;                  // whose draft a step of one sequence verifies
    bool ahead_ = false;                          // a pass that drafts ahead is queued
    DraftRows ahead_rows_ = DraftRows::frequent;  // that it reads
    bool in_vain_ = false;                        // the step waits for one that nobody uses
    StepCosts costs_;
    AcceptanceRecord all_;  // of all sequences: what is expected of one of which little is known
    std::map<RequestId, AcceptanceRecord> records_;
    std::map<RequestId, DraftRows> rows_;  // that the last draft of each was chosen from
    SpeculationReport report_;             // its counts, and the last step's choice
};

/// Throws Error(usage) if a request wants drafts that this engine does not make.
void check_drafts(const DraftOptions& wanted, const SpeculationOptions& options);

/// Rows of a slice, from its first on, whose tokens are the sequence's.
int64_t matching_rows(const Slice& slice);

}  // namespace quern
