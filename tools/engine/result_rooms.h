// ResultRooms: where the results of steps lie until they are read, if another step may be queued before: a plan leaves its own in
// memory that all plans share.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "tools/engine/engine.h"
#include "tools/engine/plan_cache.h"

namespace quern {

/// What a step left.
struct StepResults {
    const StepPlan& plan;
    const int32_t* top;  // in host memory: kTopWords of each row of logits (ops/logits_top.h)
    const float* logits =
        nullptr;  // F32 [rows, columns of the plan's] in the last stage's memory; null: where the plan left them
    std::chrono::steady_clock::time_point at = std::chrono::steady_clock::now();  // when they came

    const int32_t* top_of(int64_t row) const;
    /// Downloads `count` rows of logits, from `row` on.
    void download_logits(int64_t row, int64_t count, float* to) const;
};

class ResultRooms {
  public:
    /// `rooms` steps with up to `rows` rows of logits of `columns` each, in memory of the last stage. Throws Error(memory).
    ResultRooms(Backend& backend, int rooms, int64_t rows, int64_t columns);

    /// Bytes of the last stage's memory that so many take.
    static int64_t bytes(int rooms, int64_t rows, int64_t columns);

    int rooms() const { return static_cast<int>(rooms_.size()); }
    /// Takes a free room for the first `rows` rows of the step that was queued last, and queues copies to it.
    int keep(const StepPlan& plan, int64_t rows);
    /// Waits for that step. Its results stay until the room is left.
    StepResults await(int room, const StepPlan& plan);
    void leave(int room) { rooms_[static_cast<size_t>(room)].taken = false; }

  private:
    struct Room {
        std::shared_ptr<void> top, logits;
        bool taken = false;
    };

    Backend& last_;
    int64_t rows_, columns_;
    std::vector<Room> rooms_;
};

/// Steps that are queued at the same time, at most: by layers one for each device, but with drafts one in all, as what comes after a
/// draft depends on what became of it. 0: one, which needs no room.
int steps_on_their_way(const Backend& backend, const EngineOptions& options);

}  // namespace quern
