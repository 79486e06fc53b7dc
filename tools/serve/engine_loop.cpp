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
constexpr int64_t kExpectedTokens = 32768;  // that the first requests leave states of

}  // namespace

/// A single replica has room for all, and nothing to compare.
ReplicaLoad EngineLoop::load_of(const std::vector<Live>& live) const {
    ReplicaLoad load;
    if (metrics_.replicas() == 1) return load;
    for (const Live& l : live) {
        if (engine_.finished(l.id)) continue;
        ++load.running;
        if (!l.job->begun()) load.unread += l.job->unread;
    }
    return load;
}

/// Jobs from the queue to the engine.
void EngineLoop::admit(std::vector<Live>& live) {
    for (auto& job : queue_.take(replica_, load_of(live))) {
        job->notifier = &notifier_;
        Event failed;
        failed.outcome.emplace();
        try {
            live.push_back({engine_.submit(std::move(job->request)), job});
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
        queue_.end(*job, std::move(failed));
    }
}

/// Cancels what nobody waits for any more.
void EngineLoop::cancel_unwanted(std::vector<Live>& live) const {
    const auto now = Job::Clock::now();
    for (Live& l : live) {
        if (now > l.job->deadline) l.late = true;
        if (l.job->cancelled || l.late || queue_.stopping()) engine_.cancel(l.id);
    }
}

/// What is finished.
void EngineLoop::hand_out(std::vector<Live>& live) {
    std::erase_if(live, [&](Live& l) {
        if (!engine_.finished(l.id)) return false;
        finish(l, engine_.take(l.id));
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
    o.timing.queue_seconds += l.job->waited;
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
    own_.cached_tokens += o.cached_tokens;
    own_.computed_tokens += o.prompt_tokens - o.cached_tokens;
    own_.answer_tokens += o.answer_tokens;
    own_.drafted_tokens += o.drafted;
    own_.accepted_tokens += o.accepted;
    queue_.end(*l.job, std::move(event));
}

void EngineLoop::publish(const std::vector<Live>& live) {
    const auto count = static_cast<int64_t>(live.size());
    own_.running = std::min(count, engine_.sequences());
    own_.queued = std::max<int64_t>(0, count - engine_.sequences());
    const PrefixCacheStats stats = engine_.cache_stats();
    own_.set_cache(stats);
    if (std::exchange(told_, stats.changes) != stats.changes) own_.set_kept(engine_.kept_report());
    const auto now = Job::Clock::now();
    if (now < next_report_) return;
    own_.set_speculation(engine_.speculation());
    next_report_ = now + kBetweenReports;
}

void EngineLoop::run(const std::function<void(const std::string& error)>& lost) {
    std::vector<Live> live;
    try {
        engine_.expect_states(kExpectedTokens);
        serve(live);
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::device) throw;
        lost(error.what());
        if (metrics_.replicas() > 1) engine_.abandon_states();
        const bool others = queue_.lose(replica_, error.what());
        pass_on(live, error.what(), others);
        publish({});
        throw;
    }
}

/// After an error of the device. What no client has had anything of runs again elsewhere: its bits depend on the request
/// alone. The newest goes to the front of the queue first, so that they stay in order.
void EngineLoop::pass_on(std::vector<Live>& live, const std::string& error, bool others) {
    std::vector<std::shared_ptr<Job>> again;
    for (Live& l : live) {
        Job& job = *l.job;
        if (others && !l.late && !job.sent() && job.renew && job.renew(job))
            again.push_back(l.job);
        else
            queue_.refuse(job, error);
    }
    for (auto job = again.rbegin(); job != again.rend(); ++job) queue_.submit_again(*job);
}

void EngineLoop::serve(std::vector<Live>& live) {
    const auto before_step = [&] {
        admit(live);
        cancel_unwanted(live);
    };
    while (true) {
        before_step();
        hand_out(live);
        publish(live);
        if (queue_.stopping() && live.empty()) break;
        if (live.empty()) {
            wait_for_work();
            continue;
        }
        const auto start = Job::Clock::now();
        engine_.step(before_step);
        notifier_.flush();
        own_.step.add(std::chrono::duration<double>(Job::Clock::now() - start).count());
        hand_out(live);
    }
    queue_.close();
    admit(live);
    for (Live& l : live) engine_.cancel(l.id);
    engine_.step();
    hand_out(live);
    engine_.settle_states();  // which another one may save
}

void EngineLoop::wait_for_work() {
    engine_.settle_states();
    if (!saves_) {
        queue_.wait(replica_, std::nullopt);
    } else if (!queue_.wait(replica_, kIdle) && saves_()) {
        save_when_idle();
    }
}

void EngineLoop::save_when_idle() {
    const auto begun = Job::Clock::now();
    if (begun < next_save_) return;
    save_states([&] { return queue_.idle(); });
    next_save_ =
        Job::Clock::now() + std::max<Job::Clock::duration>(kBetweenSaves, 50 * (Job::Clock::now() - begun));
}

/// A disk that is full is no reason to end.
void EngineLoop::save_states(const std::function<bool()>& go_on) {
    const int64_t stored = engine_.cache_stats().stored;
    if (!saves_ || stored == saved_) return;
    try {
        if (engine_.save_states(go_on)) saved_ = stored;
    } catch (const Error& error) {
        if (error.kind() == ErrorKind::device) throw;
        std::fprintf(stderr, "quern: the states are not saved: %s\n", printable(error.what(), 500).c_str());
    }
}

}  // namespace quern
