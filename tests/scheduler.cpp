// The scheduler alone, in simulated time: random arrivals, no device.
#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>

#include "tools/engine/page_tokens.h"
#include "tools/engine/scheduler.h"

namespace quern {
namespace {

constexpr StepLimits kLimits{.prompt_rows = 256, .gap_rows = 128, .prompt_logits = 64, .answer_rows = 6};

Sequence prompt_of(size_t tokens) {
    Sequence s;
    s.request.prompt = s.tokens = std::vector<int32_t>(tokens, 1);
    return s;
}

/// With `pending` tokens of its answer still to run.
Sequence answer_of(size_t prompt, size_t pending) {
    Sequence s = prompt_of(prompt);
    s.state.length = static_cast<int64_t>(prompt);
    s.tokens.resize(prompt + pending, 1);
    return s;
}

/// What running a step does to its sequences: those that ended their tokens get `more` new ones.
void apply(const Step& step, const std::function<int64_t()>& more) {
    for (const Slice& slice : step.slices) {
        Sequence& s = *slice.sequence;
        s.state.length += slice.count;
        while (!s.cuts.empty() && s.cuts.front() <= s.state.length) s.cuts.pop_front();
        if (slice.last) s.tokens.resize(s.tokens.size() + static_cast<size_t>(more()), 1);
    }
}

int64_t rows_of(const Step& step) {
    int64_t rows = 0;
    for (const Slice& slice : step.slices) rows += slice.count;
    return rows;
}

/// Arrivals at random, and what must hold of every step.
class Simulation {
  public:
    void arrive() {
        if (random_() % 2 != 0) return;
        const size_t tokens = random_() % 10 == 0 ? 1500 : 1 + random_() % 150;
        auto s = std::make_unique<Sequence>(prompt_of(tokens));
        const int64_t cut = round_down_to_page(static_cast<int64_t>(random_() % tokens));
        if (cut > 0) s->cuts = {cut};
        ends_[s.get()] = tokens + 1 + random_() % 30;
        waiting_.push_back(std::move(s));
    }
    void run_step() {
        while (!waiting_.empty() && running_.size() < 8) {
            running_.push_back(std::move(waiting_.front()));
            waiting_.pop_front();
        }
        std::vector<Sequence*> list;
        for (const auto& s : running_) list.push_back(s.get());
        const Step step = scheduler_.next(list);
        check(list, step);
        apply(step, [&] { return random_() % 20 == 0 ? 12 : 1; });
        done += static_cast<int64_t>(
            std::erase_if(running_, [&](const auto& s) { return s->tokens.size() >= ends_.at(s.get()); }));
    }
    int64_t done = 0;

  private:
    void check(const std::vector<Sequence*>& list, const Step& step) {
        const auto answering = [](const Sequence* s) { return !s->in_prompt(); };
        const bool answers = std::any_of(list.begin(), list.end(), answering);
        const bool prompts = !std::all_of(list.begin(), list.end(), answering);
        CHECK(step.slices.empty() == list.empty());
        CHECK(rows_of(step) <= (step.kind == StepKind::answer ? kLimits.answer_rows
                                : answers                     ? kLimits.gap_rows
                                                              : kLimits.prompt_rows));
        for (const Slice& slice : step.slices) check(slice, step);
        if (step.kind == StepKind::prompt) {
            REQUIRE(prompts);
            const auto oldest = std::find_if_not(list.begin(), list.end(), answering);
            CHECK(step.slices.front().sequence == *oldest);
            for (const Sequence* s : list)
                if (answering(s)) CHECK(++prompt_steps_waited_[s] == 1);
            answer_steps_ = 0;
        } else if (prompts) {
            CHECK(++answer_steps_ <= 2);  // 8 sequences at 6 rows a step
        }
        for (const Slice& slice : step.slices) prompt_steps_waited_[slice.sequence] = 0;
    }
    static void check(const Slice& slice, const Step& step) {
        const Sequence& s = *slice.sequence;
        const int64_t end = slice.begin + slice.count;
        CHECK(slice.begin == s.state.length);
        CHECK(slice.count > 0);
        CHECK(slice.logit_rows == (slice.last || step.kind == StepKind::answer ? 1 : 0));
        CHECK(slice.last == (slice.count == s.pending()));
        CHECK(s.in_prompt() == (step.kind == StepKind::prompt));
        if (step.kind == StepKind::prompt) {
            CHECK((at_page_end(end) || end == s.prompt_tokens()));
            for (const int64_t cut : s.cuts) CHECK((cut <= slice.begin || cut >= end));
        } else {
            CHECK(slice.count <= kMaxAnswerSlice);
        }
        CHECK(std::count_if(step.slices.begin(), step.slices.end(),
                            [&](const Slice& o) { return o.sequence == &s; }) == 1);
    }

    std::mt19937 random_{11};
    Scheduler scheduler_{kLimits};
    std::deque<std::unique_ptr<Sequence>> waiting_;
    std::vector<std::unique_ptr<Sequence>> running_;
    std::map<const Sequence*, size_t> ends_;
    std::map<const Sequence*, int> prompt_steps_waited_;
    int answer_steps_ = 0;
};

TEST_SUITE("cpu") {
    TEST_CASE("scheduler: thousands of random arrivals; answers wait for one prompt step, prompts move on") {
        Simulation simulation;
        for (int64_t step = 0; simulation.done < 3000; ++step) {
            REQUIRE(step < 200000);
            simulation.arrive();
            simulation.run_step();
        }
    }

    TEST_CASE("scheduler: prompts and answers take turns, answers first") {
        Sequence answering = answer_of(100, 1), prompt = prompt_of(1000);
        std::vector<Sequence*> running = {&prompt, &answering};
        Scheduler scheduler(kLimits);
        for (int64_t turn = 0; turn < 7; ++turn) {
            const Step answers = scheduler.next(running);
            CHECK(answers.kind == StepKind::answer);
            REQUIRE(answers.slices.size() == 1);
            CHECK(answers.slices[0].sequence == &answering);
            apply(answers, [] { return 1; });
            const Step prompts = scheduler.next(running);
            CHECK(prompts.kind == StepKind::prompt);
            REQUIRE(prompts.slices.size() == 1);
            CHECK(prompts.slices[0].begin == 128 * turn);
            CHECK(prompts.slices[0].count == 128);
            apply(prompts, [] { return 1; });
        }
    }

    TEST_CASE("scheduler: a short prompt does not wait for a long one") {
        Sequence first = prompt_of(10000), second = prompt_of(20), third = prompt_of(100);
        std::vector<Sequence*> running = {&first, &second, &third};
        const Step step = Scheduler({512, 512, 64, 8}).next(running);
        REQUIRE(step.slices.size() == 3);
        CHECK((step.slices[0].sequence == &first && step.slices[0].count == 384));  // 256, 128 left over
        CHECK((step.slices[1].sequence == &second && step.slices[1].last));
        CHECK((step.slices[2].sequence == &third && step.slices[2].last));
    }

    TEST_CASE("scheduler: prompts are cut at multiples of 64 of their own positions, or not begun") {
        Sequence first = prompt_of(300), second = prompt_of(200);
        first.state.length = 128;
        std::vector<Sequence*> running = {&first, &second};
        const auto run = [&](int64_t rows) {
            std::vector<int64_t> ends = {0, 0};
            for (const Slice& slice : Scheduler({rows, rows, 64, 8}).next(running).slices)
                ends[slice.sequence == &second] = slice.begin + slice.count;
            return ends;
        };
        CHECK(run(64) == std::vector<int64_t>{192, 0});
        CHECK(run(127) == std::vector<int64_t>{192, 0});
        CHECK(run(128) == std::vector<int64_t>{192, 64});
        CHECK(run(200) == std::vector<int64_t>{256, 64});
        CHECK(run(372) == std::vector<int64_t>{300, 200});
        second.cuts = {128};
        CHECK(run(1000) == std::vector<int64_t>{300, 128});
    }

    TEST_CASE("scheduler: beside answers, rows far into a prompt count as more than one") {
        // Attention over what comes before: the time of a row is 1 + before / depth.
        constexpr int64_t kDepth = 1024, kGap = 512;
        const auto seconds = [](const Slice& slice) {
            double sum = 0;
            for (int64_t i = 0; i < slice.count; ++i) sum += 1 + static_cast<double>(slice.begin) / kDepth;
            return sum;
        };
        Sequence answering = answer_of(100, 1), prompt = prompt_of(20000), late = prompt_of(300);
        const StepLimits limits{4096, kGap, 64, 8, kDepth};
        const auto at = [&](int64_t begin, std::vector<Sequence*> running) {
            prompt.state.length = begin;
            for (Sequence* s : running) s->last_step = 0;
            Scheduler scheduler(limits);
            if (!running.front()->in_prompt()) apply(scheduler.next(running), [] { return 1; });
            return scheduler.next(running);
        };
        for (int64_t begin = 0; begin < 19000; begin += 640) {
            CAPTURE(begin);
            const Step step = at(begin, {&answering, &prompt});
            REQUIRE(step.slices.size() == 1);
            CHECK(step.slices[0].count % kPageTokens == 0);
            if (begin < 7 * kDepth) {  // a page and no more than that fits
                CHECK(seconds(step.slices[0]) <= kGap);
                CHECK(seconds(step.slices[0]) * (step.slices[0].count + kPageTokens) / step.slices[0].count >
                      kGap);
            } else {
                CHECK(step.slices[0].count == kPageTokens);  // it still moves on
            }
            // With nobody who waits for the next token, it is as long as may be.
            CHECK(at(begin, {&prompt}).slices[0].count == std::min<int64_t>(4096, 20000 - begin));
        }
        // What the long one leaves goes to the short one, which comes at its full length.
        const Step step = at(2048, {&answering, &prompt, &late});
        REQUIRE(step.slices.size() == 2);
        CHECK((step.slices[0].sequence == &prompt && step.slices[0].count == 64));
        CHECK((step.slices[1].sequence == &late && step.slices[1].last));
    }

    TEST_CASE("scheduler: prompts that want all logits share the rows that have them") {
        Sequence first = prompt_of(40), second = prompt_of(100), third = prompt_of(20);
        for (Sequence* s : {&first, &second, &third})
            s->request.on_prompt_logits = [](const PromptLogits&) {};
        std::vector<Sequence*> running = {&first, &second, &third};
        const Step step = Scheduler({512, 512, 64, 8}).next(running);
        REQUIRE(step.slices.size() == 2);
        CHECK((step.slices[0].sequence == &first && step.slices[0].logit_rows == 40));
        CHECK((step.slices[1].sequence == &third && step.slices[1].logit_rows == 20));
    }

    TEST_CASE("scheduler: more answers than rows take turns, and all before the next prompt step") {
        std::vector<Sequence> answers;
        for (int i = 0; i < 15; ++i) answers.push_back(answer_of(10, 1));
        Sequence prompt = prompt_of(10000);
        std::vector<Sequence*> running = {&prompt};
        for (Sequence& s : answers) running.push_back(&s);
        Scheduler scheduler(kLimits);
        std::map<Sequence*, int> rows;
        for (int i = 0; i < 8; ++i) {  // 6, 6 and 3 rows, then the prompt
            const Step step = scheduler.next(running);
            CHECK((step.kind == StepKind::prompt) == (i % 4 == 3));
            for (const Slice& slice : step.slices) rows[slice.sequence] += step.kind == StepKind::answer;
            apply(step, [] { return 1; });
        }
        for (Sequence& s : answers) CHECK((rows[&s] >= 2 && rows[&s] <= 3));
    }

    TEST_CASE("scheduler: answers may have several rows, after everyone has one") {
        Sequence many = answer_of(10, 20), one = answer_of(10, 1), two = answer_of(10, 2);
        std::vector<Sequence*> running = {&many, &one, &two};
        const auto counts = [&](int64_t rows) {
            std::vector<int64_t> list;
            for (const Slice& slice : Scheduler({64, 64, 64, rows}).next(running).slices) {
                list.push_back(slice.count);
                CHECK(slice.last == (slice.sequence != &many && slice.count == slice.sequence->pending()));
            }
            return list;
        };
        CHECK(counts(64) == std::vector<int64_t>{8, 1, 2});
        CHECK(counts(5) == std::vector<int64_t>{3, 1, 1});
        CHECK(counts(3) == std::vector<int64_t>{1, 1, 1});
    }

    TEST_CASE(
        "scheduler: steps on their way at the same time share the answers, and answers there make a prompt's "
        "step short") {
        std::vector<Sequence> answers;
        for (int i = 0; i < 5; ++i) answers.push_back(answer_of(10, 1));
        std::vector<Sequence*> running;
        for (Sequence& s : answers) running.push_back(&s);
        Scheduler scheduler(kLimits);
        const Step first = scheduler.next(running, {.answers = 0, .steps = 2});
        CHECK(first.slices.size() == 3);
        const std::vector<Sequence*> left(running.begin() + 3, running.end());
        const Step second = scheduler.next(left, {.answers = 3, .steps = 2});
        REQUIRE(second.slices.size() == 2);
        CHECK(second.slices[0].sequence == left[0]);
        CHECK(scheduler.next(std::vector{left[1]}, {.answers = 4, .steps = 2}).slices.size() == 1);

        Sequence prompt = prompt_of(1000);
        const std::vector<Sequence*> alone = {&prompt};
        CHECK(rows_of(scheduler.next(alone, {.answers = 1, .steps = 2})) == kLimits.gap_rows);
        CHECK(rows_of(scheduler.next(alone, {.answers = 0, .steps = 2})) == kLimits.prompt_rows);
    }
}

}  // namespace
}  // namespace quern
