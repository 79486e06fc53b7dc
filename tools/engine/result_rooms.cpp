#include "tools/engine/result_rooms.h"

#include <algorithm>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "ggml-like/ops/logits_top.h"
#include "tools/engine/head_ranks.h"
#include "tools/engine/stage_marks.h"

namespace quern {
namespace {

constexpr int kMostOnTheirWay = 8;  // fewer than PlanCache keeps plans of steps that run sometimes
constexpr int64_t kTopBytes = kTopWords * int64_t{sizeof(int32_t)};

/// Backend::set_mark of a room.
constexpr int mark_of(size_t room) { return kResultsMark + static_cast<int>(room); }

}  // namespace

const int32_t* StepResults::top_of(int64_t row) const { return top + row * kTopWords; }

void StepResults::download_logits(int64_t row, int64_t count, float* to) const {
    if (logits == nullptr) return quern::download_logits(plan, row, count, to);
    const int64_t columns = logit_columns(plan);
    plan.backend->download(to, logits + row * columns, count * columns * int64_t{sizeof(float)});
}

ResultRooms::ResultRooms(Backend& backend, int rooms, int64_t rows, int64_t columns)
    : last_(backend.of_stage(backend.stages() - 1)), rows_(rows), columns_(columns) {
    CHECK(mark_of(static_cast<size_t>(rooms)) <= kDraftInputsMark, "[results] {} rooms", rooms);
    for (int i = 0; i < rooms; ++i)
        rooms_.push_back({.top = {last_.alloc_host(rows * kTopBytes, "the highest logits of a step"),
                                  [this](void* memory) { last_.free_host(memory); }},
                          .logits = {last_.alloc(bytes(1, rows, columns), "the logits of a step"),
                                     [this](void* memory) { last_.free(memory); }}});
}

int64_t ResultRooms::bytes(int rooms, int64_t rows, int64_t columns) {
    return rooms * rows * columns * int64_t{sizeof(float)};
}

int ResultRooms::keep(const StepPlan& plan, int64_t rows) {
    const auto room = std::find_if(rooms_.begin(), rooms_.end(), [](const Room& r) { return !r.taken; });
    CHECK(room != rooms_.end() && rows <= rows_, "[results] no room for {} rows", rows);
    const auto number = static_cast<size_t>(room - rooms_.begin());
    if (rows > 0) last_.send(room->top.get(), plan.top->data, rows * kTopBytes);
    last_.set_mark(mark_of(number));
    if (rows > 0) last_.copy(room->logits.get(), plan.logits->data, bytes(1, rows, columns_));  // seldom read
    room->taken = true;
    return static_cast<int>(number);
}

StepResults ResultRooms::await(int room, const StepPlan& plan) {
    const Room& own = rooms_[static_cast<size_t>(room)];
    last_.await_mark(mark_of(static_cast<size_t>(room)));
    return {plan, static_cast<const int32_t*>(own.top.get()), static_cast<const float*>(own.logits.get())};
}

int steps_on_their_way(const Backend& backend, const EngineOptions& options) {
    if (options.speculation.on() || backend.stages() == 1) return 0;
    return std::min(backend.stages(), kMostOnTheirWay);
}

}  // namespace quern
