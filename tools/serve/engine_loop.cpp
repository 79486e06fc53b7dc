#include "tools/serve/engine_loop.h"

#include <algorithm>

#include <cstdio>
#include <utility>

#include "ggml-like/check.h"
#include "tools/common/cli_values.h"

namespace quern {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kIdle = 5s, kBetweenSaves = 60s, kBetweenReports = 100ms;

}  // namespace

bool EngineLoop::reserve(int64_t count) {
    int64_t places = places_;
    do {
        if (places + count > slots_ + queue_) return false;
    } while (!places_.compare_exchange_weak(places, places + count));
    return true;
}

void EngineLoop::give_back(int64_t count) { places_ -= count; }

bool EngineLoop::deliver(const std::shared_ptr<Mailbox>& mailbox, Event event) {
    notifier_.add(mailbox);
    return mailbox->put(std::move(event));
}

void EngineLoop::submit(std::shared_ptr<Job> job) {
    {
        const std::lock_guard lock(mutex_);
        if (lost_) return refuse(*job, *lost_);
        inbox_.push_back(std::move(job));
    }
    changed_.notify_one();
}

void EngineLoop::refuse(Job& job, const std::string& error) {
    Event event;
    Outcome& o = event.outcome.emplace();
    o.error = error;
    o.error_status = 503;
    o.error_code = "device_error";
    end(job, std::move(event));
}

void EngineLoop::refuse_all(const std::string& error) {
    const std::lock_guard lock(mutex_);
    lost_ = error;
    for (const auto& job : inbox_) refuse(*job, error);
    inbox_.clear();
}

void EngineLoop::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    changed_.notify_one();
}

void EngineLoop::end(Job& job, Event event) {
    event.choice = job.choice;
    --places_;  // before the event: who reads it may ask again at once
    job.mailbox->push(std::move(event));
}

/// Jobs from the inbox to the engine.
void EngineLoop::admit(Engine& engine, std::vector<Live>& live) {
    std::vector<std::shared_ptr<Job>> fresh;
    {
        const std::lock_guard lock(mutex_);
        fresh.swap(inbox_);
    }
    for (auto& job : fresh) {
        Event failed;
        failed.outcome.emplace();
        try {
            live.push_back({engine.submit(std::move(job->request)), job});
            continue;
        } catch (const Error& error) {
            failed.outcome->error = error.what();
            failed.outcome->error_status =
                error.kind() == ErrorKind::usage || error.kind() == ErrorKind::too_long ? 400 : 500;
            failed.outcome->error_code =
                error.kind() == ErrorKind::too_long ? "context_length_exceeded" : "invalid_value";
        } catch (const std::exception& error) {
            failed.outcome->error = error.what();
        }
        end(*job, std::move(failed));
    }
}

/// Cancels what nobody waits for any more.
void EngineLoop::cancel_unwanted(Engine& engine, std::vector<Live>& live) const {
    const auto now = Job::Clock::now();
    for (Live& l : live) {
        if (now > l.job->deadline) l.late = true;
        if (l.job->cancelled || l.late || stopping_) engine.cancel(l.id);
    }
}

/// What is finished.
void EngineLoop::hand_out(Engine& engine, std::vector<Live>& live) {
    std::erase_if(live, [&](Live& l) {
        if (!engine.finished(l.id)) return false;
        finish(l, engine.take(l.id));
        return true;
    });
}

void EngineLoop::finish(Live& l, Result result) {
    Event event;
    AnswerReader& reader = *l.job->reader;
    event.delta = reader.finish(result.reason);
    Outcome& o = event.outcome.emplace();
    o.prompt_tokens = o.prompt_done = result.prompt_tokens;
    o.cached_tokens = result.cached_tokens;
    o.diverged_at = result.diverged_at;
    o.answer_tokens = reader.tokens();
    o.reasoning_tokens = reader.reasoning_tokens();
    o.drafted = result.drafted;
    o.accepted = result.accepted;
    o.timing = result.timing;
    o.stop_text = reader.stop_text();
    o.error = result.error;
    switch (result.reason) {
        case FinishReason::stop:
            o.end = Outcome::End::stop;
            break;
        case FinishReason::length:
            o.end = Outcome::End::length;
            break;
        case FinishReason::cancelled:
            o.end = reader.ended() ? Outcome::End::stop
                    : l.late       ? Outcome::End::deadline
                                   : Outcome::End::cancelled;
            break;
        default:
            break;
    }
    if (reader.ended() && o.end == Outcome::End::length) o.end = Outcome::End::stop;
    if (o.end == Outcome::End::cancelled && l.job->mailbox->overflowed()) {
        o.end = Outcome::End::error;
        o.error = "the client does not read its answer";
        o.error_status = 499;
        o.error_code = "slow_client";
        ++metrics_.slow;
    } else if (o.end == Outcome::End::cancelled) {
        const bool started = result.timing.queue_seconds > 0 || o.answer_tokens > 0;
        const Phase phase = o.answer_tokens > 0 ? Phase::decode : started ? Phase::prefill : Phase::queued;
        ++metrics_.cancelled[static_cast<size_t>(phase)];
    }
    metrics_.cached_tokens += o.cached_tokens;
    metrics_.computed_tokens += o.prompt_tokens - o.cached_tokens;
    metrics_.answer_tokens += o.answer_tokens;
    metrics_.drafted_tokens += o.drafted;
    metrics_.accepted_tokens += o.accepted;
    end(*l.job, std::move(event));
}

void EngineLoop::publish(const Engine& engine, const std::vector<Live>& live) {
    const auto count = static_cast<int64_t>(live.size());
    metrics_.running = std::min(count, engine.sequences());
    metrics_.queued = std::max<int64_t>(0, count - engine.sequences());
    const PrefixCacheStats stats = engine.cache_stats();
    metrics_.set_cache(stats);
    if (std::exchange(told_, stats.changes) != stats.changes) metrics_.set_kept(engine.kept_report());
    const auto now = Job::Clock::now();
    if (now < next_report_) return;
    metrics_.set_speculation(engine.speculation());
    next_report_ = now + kBetweenReports;
}

void EngineLoop::run(Engine& engine, const std::function<void()>& lost) {
    slots_ = engine.sequences();
    std::vector<Live> live;
    try {
        serve(engine, live);
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::device) throw;
        lost();
        for (Live& l : live) refuse(*l.job, error.what());
        refuse_all(error.what());
        publish(engine, {});
        throw;
    }
}

void EngineLoop::serve(Engine& engine, std::vector<Live>& live) {
    const auto before_step = [&] {
        admit(engine, live);
        cancel_unwanted(engine, live);
    };
    while (true) {
        before_step();
        hand_out(engine, live);
        publish(engine, live);
        if (stopping_ && live.empty()) break;
        if (live.empty()) {
            if (!wait_for_work()) save_when_idle(engine);
            continue;
        }
        const auto start = Job::Clock::now();
        engine.step(before_step);
        notifier_.flush();
        metrics_.step.add(std::chrono::duration<double>(Job::Clock::now() - start).count());
        hand_out(engine, live);
    }
    slots_ = -queue_;  // nothing is accepted any more
    admit(engine, live);
    for (Live& l : live) engine.cancel(l.id);
    engine.step();
    hand_out(engine, live);
    save_states(engine, [] { return true; });
}

/// False: nobody came for a while.
bool EngineLoop::wait_for_work() {
    std::unique_lock lock(mutex_);
    const auto some = [&] { return stopping_ || !inbox_.empty(); };
    if (keep_states_) return changed_.wait_for(lock, kIdle, some);
    changed_.wait(lock, some);
    return true;
}

void EngineLoop::save_when_idle(Engine& engine) {
    const auto begun = Job::Clock::now();
    if (begun < next_save_) return;
    save_states(engine, [&] {
        const std::lock_guard lock(mutex_);
        return !stopping_ && inbox_.empty();
    });
    next_save_ =
        Job::Clock::now() + std::max<Job::Clock::duration>(kBetweenSaves, 50 * (Job::Clock::now() - begun));
}

/// A disk that is full is no reason to end.
void EngineLoop::save_states(Engine& engine, const std::function<bool()>& go_on) {
    const int64_t stored = engine.cache_stats().stored;
    if (!keep_states_ || stored == saved_) return;
    try {
        if (engine.save_states(go_on)) saved_ = stored;
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::device) throw;
        std::fprintf(stderr, "quern: the states are not saved: %s\n", printable(error.what(), 500).c_str());
    }
}

}  // namespace quern
