// The scheduler alone, in simulated time: random arrivals, no device.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <random>

#include "tools/engine/scheduler.h"

namespace quern {
namespace {

struct Simulated {
    std::unique_ptr<Sequence> s = std::make_unique<Sequence>();
    int64_t answer = 0, arrived = 0, started = 0;
};

TEST_SUITE("cpu") {
    TEST_CASE("scheduler: thousands of random arrivals; answers never wait, prompts always move on") {
        std::mt19937 random(11);
        const int64_t budget = 64, slots = 8;
        std::deque<Simulated> waiting;
        std::vector<Simulated> running;
        int64_t done = 0, longest_wait = 0, oldest_still = 0;
        for (int64_t step = 0; done < 3000; ++step) {
            REQUIRE(step < 200000);
            if (random() % 2 == 0) {
                Simulated job;
                const size_t prompt = random() % 10 == 0 ? 1500 : 1 + random() % 60;
                job.s->request.prompt = job.s->tokens = std::vector<int32_t>(prompt, 1);
                if (prompt > 10)
                    job.s->cuts = {{static_cast<int64_t>(random() % prompt), true},
                                   {static_cast<int64_t>(prompt), true}};
                job.answer = 1 + static_cast<int64_t>(random() % 30);
                job.arrived = step;
                waiting.push_back(std::move(job));
            }
            while (!waiting.empty() && static_cast<int64_t>(running.size()) < slots) {
                running.push_back(std::move(waiting.front()));
                running.back().started = step;
                waiting.pop_front();
            }
            std::vector<Sequence*> list;
            for (Simulated& r : running) list.push_back(r.s.get());
            const auto slices = next_batch(list, budget, 64);
            int64_t rows = 0;
            for (const Slice& slice : slices) {
                rows += slice.count;
                CHECK(slice.begin == slice.sequence->state.length);
                CHECK(slice.count > 0);
                CHECK(slice.last == (slice.count == slice.sequence->pending()));
                for (const PromptCut& cut : slice.sequence->cuts)  // never runs past a cut
                    CHECK((cut.at <= slice.begin || cut.at >= slice.begin + slice.count));
                CHECK(std::count_if(slices.begin(), slices.end(),
                                    [&](const Slice& o) { return o.sequence == slice.sequence; }) == 1);
            }
            CHECK(rows <= budget);
            CHECK((rows > 0 || running.empty()));
            for (const Sequence* s : list)  // who answers has a row in every step
                if (!s->in_prompt())
                    CHECK(std::any_of(slices.begin(), slices.end(),
                                      [&](const Slice& x) { return x.sequence == s; }));
            const auto oldest =
                std::find_if(list.begin(), list.end(), [](const Sequence* s) { return s->in_prompt(); });
            if (oldest != list.end()) {
                const bool moved = std::any_of(slices.begin(), slices.end(),
                                               [&](const Slice& x) { return x.sequence == *oldest; });
                oldest_still = moved ? 0 : oldest_still + 1;
                longest_wait = std::max(longest_wait, oldest_still);
            }
            for (const Slice& slice : slices) {
                Sequence& s = *slice.sequence;
                s.state.length += slice.count;
                while (!s.cuts.empty() && s.cuts.front().at <= s.state.length) s.cuts.pop_front();
                if (slice.last) s.tokens.push_back(1);
            }
            std::erase_if(running, [&](const Simulated& r) {
                const bool over = static_cast<int64_t>(r.s->tokens.size()) >= r.s->prompt_tokens() + r.answer;
                done += over;
                return over;
            });
        }
        CHECK(longest_wait == 0);
    }

    TEST_CASE("scheduler: a short prompt does not wait for a long one") {
        Sequence first, second;
        first.request.prompt = first.tokens = std::vector<int32_t>(10000, 1);
        second.request.prompt = second.tokens = std::vector<int32_t>(20, 1);
        std::vector<Sequence*> running = {&first, &second};
        const auto slices = next_batch(running, 512, 64);
        REQUIRE(slices.size() == 2);
        CHECK(slices[1].sequence == &second);
        CHECK(slices[1].last);
        CHECK(slices[0].count == 492);  // what the short one left
    }
}

}  // namespace
}  // namespace quern
