// Marks of a stage (Backend::set_mark) that the engine waits for.
#pragma once

namespace quern {

/// Its inputs were uploaded; states were loaded from host memory; the first of those of ResultRooms, one for each room.
inline constexpr int kInputsMark = 0, kLoadsMark = 1, kResultsMark = 2;

}  // namespace quern
