// Why drafts are as long as they are: what rounds cost, how far drafts were right, and what was expected of the last choice.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "tools/engine/speculation_options.h"

namespace quern {

struct SpeculationReport {
    /// Answer steps of that size, drafting included.
    struct Cost {
        int64_t sequences, rows;
        DraftRows draft_rows;  // of the head, that drafts were chosen from; frequent: also without drafts
        double seconds;
        bool sure;  // measured more than once, and lately
    };
    std::vector<Cost> costs;
    std::vector<double>
        acceptance;                 // by position: that a draft is right up to there, of all sequences lately
    int64_t steps = 0, rounds = 0;  // answer steps that might have had drafts; those that had
    int64_t ahead = 0;              // of these, whose draft was made ahead (drafter.h)
    int64_t drafted = 0, accepted = 0;  // tokens of these, also of answers that are not done
    /// Passes that chose drafts from a head, by the rows of it that they read (DraftRows). Of a model without a short head: all.
    std::array<int64_t, 3> passes{};
    /// If there are such passes: of each answer that has drafts, oldest first, the rows that its last one was chosen from.
    std::vector<DraftRows> answers;
    int64_t head_passes() const { return passes[0] + passes[1] + passes[2]; }
    /// Of rounds whose time is known: their number, and seconds from the first draft to the last result on the host, of these
    /// drafting.
    int64_t timed = 0;
    double round_seconds = 0, drafting_seconds = 0;
    /// The last step that might have had drafts: 0 drafted says that none would have paid.
    int64_t last_sequences = 0, last_drafted = 0;
    double last_rate = 0,
           plain_rate = 0;  // expected tokens a second: as chosen, and without drafts; 0: not known yet

    /// Expected speed-up of that choice; 0: not known yet.
    double gain() const { return plain_rate > 0 ? last_rate / plain_rate : 0; }
};

/// A few lines of text.
std::string describe(const SpeculationReport& report);

}  // namespace quern
