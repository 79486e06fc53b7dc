#include "tools/serve/job_queue.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace quern {
namespace {

double seconds_since(Job::Clock::time_point then) {
    return std::chrono::duration<double>(Job::Clock::now() - then).count();
}

}  // namespace

bool JobQueue::reserve(int64_t count) {
    int64_t places = places_;
    do {
        if (places + count > slots_ + queue_) return false;
    } while (!places_.compare_exchange_weak(places, places + count));
    return true;
}

void JobQueue::open(const std::vector<int64_t>& slots, std::function<void(Job&)> find_kept) {
    const std::lock_guard lock(mutex_);
    find_kept_ = std::move(find_kept);
    for (const int64_t n : slots) {
        slots_ += n;
        auto place = std::make_unique<Place>();
        place->slots = slots.size() > 1 ? n : std::numeric_limits<int64_t>::max();
        replicas_.push_back(std::move(place));
    }
    assign();
}

void JobQueue::submit(std::shared_ptr<Job> job) {
    job->prompt_tokens = static_cast<int64_t>(job->request.prompt.size());
    std::function<void(Job&)> find_kept;
    {
        const std::lock_guard lock(mutex_);
        find_kept = find_kept_;
    }
    if (find_kept) find_kept(*job);  // not under the lock, since it takes another one
    add(std::move(job), false);
}

void JobQueue::submit_again(std::shared_ptr<Job> job) { add(std::move(job), true); }

void JobQueue::add(std::shared_ptr<Job> job, bool first) {
    const std::lock_guard lock(mutex_);
    if (lost_) return refuse(*job, *lost_);
    job->queued = Job::Clock::now();
    job->waited = 0;
    waiting_.insert(first ? waiting_.begin() : waiting_.end(), std::move(job));
    assign();
}

/// Gives waiting jobs to replicas as long as one has room.
void JobQueue::assign() {
    std::vector<ReplicaLoad> loads;
    while (!waiting_.empty()) {
        const std::shared_ptr<Job>& job = waiting_.front();
        loads.clear();
        for (size_t r = 0; r < replicas_.size(); ++r) {
            const Place& place = *replicas_[r];
            loads.push_back(place.load);
            loads.back().has_room = place.open && place.load.running < place.slots;
            loads.back().kept = r < job->kept.size() ? job->kept[r] : 0;
        }
        const auto to = choose_replica(loads, {job->prompt_tokens, job->kept_anywhere});
        if (!to) break;
        Place& place = *replicas_[*to];
        job->unread = job->prompt_tokens - std::max(loads[*to].kept, job->kept_anywhere);
        ++place.load.running;
        place.load.unread += job->unread;
        place.inbox.push_back(job);
        place.changed.notify_one();
        waiting_.pop_front();
    }
    metrics_.waiting = static_cast<int64_t>(waiting_.size());
}

/// Ends jobs that wait in vain: no engine knows of them.
void JobQueue::end_unwanted() {
    const auto now = Job::Clock::now();
    std::erase_if(waiting_, [&](const std::shared_ptr<Job>& job) {
        const bool late = now > job->deadline;
        if (!late && !job->cancelled && !stopping_) return false;
        Event event;
        Outcome& o = event.outcome.emplace();
        o.end = late ? Outcome::End::deadline : Outcome::End::cancelled;
        o.prompt_tokens = o.prompt_done = job->prompt_tokens;
        if (!late) ++metrics_.cancelled[static_cast<size_t>(Phase::queued)];
        end(*job, std::move(event));
        return true;
    });
}

std::vector<std::shared_ptr<Job>> JobQueue::take(size_t replica, const ReplicaLoad& load) {
    const std::lock_guard lock(mutex_);
    Place& place = *replicas_[replica];
    place.load = load;
    for (const auto& job : place.inbox) {
        ++place.load.running;
        place.load.unread += job->unread;
    }
    if (!waiting_.empty()) {
        end_unwanted();
        assign();
    }
    std::vector<std::shared_ptr<Job>> taken = std::exchange(place.inbox, {});
    if (replicas_.size() > 1)
        for (const auto& job : taken) job->waited = seconds_since(job->queued);
    return taken;
}

bool JobQueue::wait(size_t replica, std::optional<std::chrono::milliseconds> patience) {
    std::unique_lock lock(mutex_);
    Place& place = *replicas_[replica];
    const auto some = [&] { return stopping_ || !place.inbox.empty(); };
    if (patience) return place.changed.wait_for(lock, *patience, some);
    place.changed.wait(lock, some);
    return true;
}

bool JobQueue::idle() {
    const std::lock_guard lock(mutex_);
    const auto busy = [](const auto& place) { return place->load.running > 0 || !place->inbox.empty(); };
    return !stopping_ && waiting_.empty() && std::none_of(replicas_.begin(), replicas_.end(), busy);
}

void JobQueue::stop() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& place : replicas_) place->changed.notify_one();
}

void JobQueue::close() {
    slots_ = -queue_;
    const std::lock_guard lock(mutex_);
    find_kept_ = {};
}

bool JobQueue::any_open() const {
    return std::any_of(replicas_.begin(), replicas_.end(), [](const auto& place) { return place->open; });
}

bool JobQueue::lose(size_t replica, const std::string& error) {
    const std::lock_guard lock(mutex_);
    Place& place = *replicas_[replica];
    place.open = false;
    place.load = {};
    if (replicas_.size() > 1) slots_ -= place.slots;
    waiting_.insert(waiting_.begin(), place.inbox.begin(), place.inbox.end());
    place.inbox.clear();
    if (any_open()) {
        assign();
        return true;
    }
    lost_ = error;
    for (const auto& job : waiting_) refuse(*job, error);
    waiting_.clear();
    metrics_.waiting = 0;
    return false;
}

void JobQueue::end(Job& job, Event event) {
    event.choice = job.choice;
    --places_;  // before the event: who reads it may ask again at once
    job.mailbox->push(std::move(event));
}

void JobQueue::refuse(Job& job, const std::string& error) {
    Event event;
    Outcome& o = event.outcome.emplace();
    o.error = error;
    o.error_status = 503;
    o.error_code = "device_error";
    end(job, std::move(event));
}

}  // namespace quern
