// Marks of a device (Backend::set_mark) that the engine waits for.
#pragma once

namespace quern {

/// Inputs of a step were uploaded (Workspace); states were loaded from host memory; the first of those of ResultRooms, one
/// for each room.
inline constexpr int kInputsMark = 0, kLoadsMark = 1, kResultsMark = 2;
/// Inputs of a pass that drafts for one sequence were uploaded; its drafts came to the host; so did the highest logits of the
/// step that verifies them.
inline constexpr int kDraftInputsMark = 13, kDraftsMark = 14, kVerifiedMark = 15;

}  // namespace quern
