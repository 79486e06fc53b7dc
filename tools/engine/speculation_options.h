// Which drafters run, and how far they draft: of an engine, and of one request.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>

namespace quern {

enum class DraftRows : uint8_t;  // models/model.h

/// automatic: every drafter that the model has something for.
enum class DrafterKind : uint8_t { none, automatic, lookup, mtp, dflash };

/// As in --spec.
const char* drafter_name(DrafterKind kind);

/// Whether a choice of drafters takes in this one.
constexpr bool allows(DrafterKind chosen, DrafterKind kind) {
    return chosen == DrafterKind::automatic || chosen == kind;
}

/// Drafts of all rounds fit in this many tokens: a round is an answer step of one row more.
inline constexpr int64_t kMaxDraft = 15;

struct SpeculationOptions {
    DrafterKind kind = DrafterKind::none;
    bool kind_given = false;  // by the user: naming a drafter's checkpoint does not change it
    /// Of a large head drafters read only as many rows as a text needs (draft_rows.h), and on a GPU of a drafter's layers copies in FP8.
    /// False: both as stored.
    bool short_head = true;
    int64_t draft_max = 7;  // tokens of a draft, 1 to kMaxDraft
    /// The checkpoint of a DFlash drafter (OpenOptions::draft_model); empty: none.
    std::string draft_model = {};

    bool on() const { return kind != DrafterKind::none; }
};

/// What one request allows of that.
struct DraftOptions {
    DrafterKind kind = DrafterKind::automatic;           // automatic: as the engine
    int64_t most = std::numeric_limits<int64_t>::max();  // tokens of a draft
    /// Drafts are as long as pays, measured as it goes (draft_length.h). True: as long as may be, to compare drafters.
    bool full = false;
    /// Tokens that drafts may be, whatever the text needs. For measuring.
    std::optional<DraftRows> rows = {};
};

}  // namespace quern
