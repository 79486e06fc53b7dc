// Which replica a request goes to: a table, and what must hold over the whole range.
#include "tools/serve/routing.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <vector>

namespace quern {
namespace {

ReplicaLoad with_room(int64_t running, int64_t unread, int64_t kept = 0) {
    return {.has_room = true, .running = running, .unread = unread, .kept = kept};
}

ReplicaLoad full(int64_t running, int64_t kept = 0) {
    return {.has_room = false, .running = running, .unread = 0, .kept = kept};
}

TEST_SUITE("cpu") {
    TEST_CASE("routing: what is kept against what waits") {
        struct Row {
            const char* what;
            std::vector<ReplicaLoad> replicas;
            PromptToPlace prompt;
            std::optional<size_t> expected;
        };
        const Row rows[] = {
            {"one", {with_room(0, 0)}, {100}, 0},
            {"none has room", {full(4), full(4)}, {100}, std::nullopt},
            {"both are idle", {with_room(0, 0), with_room(0, 0)}, {100}, 0},
            {"fewer answers", {with_room(2, 0), with_room(1, 0)}, {100}, 1},
            {"fewer tokens to read", {with_room(1, 900), with_room(1, 300)}, {100}, 1},
            {"only the busier one has room", {full(1), with_room(9, 5000)}, {100}, 1},
            {"its state, nothing waits", {with_room(0, 0), with_room(0, 0, 960)}, {1000, 960}, 1},
            {"its state, and one answer beside it: moving costs less than the wait",
             {with_room(0, 0), with_room(1, 0, 960)},
             {1000, 960},
             0},
            {"a long state: moving it costs more than waiting for one answer",
             {with_room(0, 0), with_room(1, 0, 30000)},
             {30100, 30000},
             1},
            {"a long state behind a long prompt",
             {with_room(0, 0), with_room(1, 8000, 30000)},
             {30100, 30000},
             0},
            {"the state is full up: another copies it", {with_room(3, 0), full(4, 30000)}, {30100, 30000}, 0},
            {"only in the memory of one: reading it again costs more than the wait",
             {with_room(0, 0), with_room(8, 0, 1920)},
             {2000, 0},
             1},
            {"only in the memory of one: the wait costs more",
             {with_room(0, 0), with_room(31, 0, 1920)},
             {2000, 0},
             0},
            {"a longer one elsewhere", {with_room(0, 0, 640), with_room(0, 0, 960)}, {1000, 960}, 1},
            {"a short state is not worth moving", {with_room(0, 0), with_room(2, 0)}, {80, 64}, 0},
        };
        for (const Row& row : rows) {
            CAPTURE(row.what);
            CHECK(choose_replica(row.replicas, row.prompt) == row.expected);
        }
    }

    TEST_CASE("routing: over the whole range") {
        constexpr std::array<int64_t, 4> kRunning = {0, 1, 7, 64}, kUnread = {0, 63, 1500, 100000};
        constexpr std::array<int64_t, 4> kPrompt = {1, 64, 3000, 200000};
        for (const int64_t tokens : kPrompt)
            for (const int64_t anywhere : {int64_t{0}, tokens / 2, tokens})
                for (const int64_t kept : {int64_t{0}, tokens / 2, tokens})
                    for (const int64_t running : kRunning)
                        for (const int64_t unread : kUnread) {
                            const PromptToPlace prompt{tokens, anywhere};
                            const ReplicaLoad here = with_room(running, unread, kept);
                            const int64_t cost = cost_at(here, prompt);
                            CHECK(cost >= unread);
                            CHECK(cost <= unread + 64 * running + tokens);  // at worst the prompt is read
                            // more work, or less that is kept, never makes a replica better
                            CHECK(cost_at(with_room(running + 1, unread, kept), prompt) > cost);
                            CHECK(cost_at(with_room(running, unread + 1, kept), prompt) > cost);
                            CHECK(cost_at(with_room(running, unread, kept / 2), prompt) >= cost);
                            // the same replica twice: the first; with one more answer: the other
                            const ReplicaLoad busier = with_room(running + 1, unread, kept);
                            CHECK(choose_replica(std::array{here, here}, prompt) == 0);
                            CHECK(choose_replica(std::array{busier, here}, prompt) == 1);
                            // whoever has no room is never chosen
                            ReplicaLoad closed = with_room(0, 0, tokens);
                            closed.has_room = false;
                            CHECK(choose_replica(std::array{closed, here}, prompt) == 1);
                            CHECK(!choose_replica(std::array{closed, closed}, prompt));
                        }
    }
}

}  // namespace
}  // namespace quern
