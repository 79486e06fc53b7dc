// JobQueue: the one queue of all replicas. Threads of requests put jobs in; each replica's thread takes those that it runs.
//
// A job is given to a replica when that one has a free slot, not before (routing.h says to which), so nobody waits behind a
// full replica while another has room. A single replica takes all at once: its engine has a queue of its own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tools/serve/job.h"
#include "tools/serve/metrics.h"
#include "tools/serve/routing.h"

namespace quern {

class JobQueue {
  public:
    /// `queue`: how many answers may wait.
    JobQueue(Metrics& metrics, int64_t queue) : metrics_(metrics), queue_(queue) {}

    /// Takes places for `count` answers; false if fewer are free.
    bool reserve(int64_t count);
    /// Frees places that were not used.
    void give_back(int64_t count) { places_ -= count; }
    /// Submits an answer that has a place; the place is free again when the answer has ended.
    void submit(std::shared_ptr<Job> job);
    int64_t busy() const { return places_; }
    void stop();
    bool stopping() const { return stopping_; }

    /// Call before replicas take: there are as many of them as numbers of slots. `find_kept` says what is kept of a job's prompt,
    /// for routing; it may be missing.
    void open(const std::vector<int64_t>& slots, std::function<void(Job&)> find_kept = {});
    /// The jobs that `replica` runs from now on. `load`: what it runs already.
    std::vector<std::shared_ptr<Job>> take(size_t replica, const ReplicaLoad& load);
    /// Waits until there is something to take, or to end. False: not within `patience`.
    bool wait(size_t replica, std::optional<std::chrono::milliseconds> patience);
    /// Whether no replica has anything to do.
    bool idle();
    /// Takes the replica out; what it had not begun goes to the others. False: there are none, all jobs end with the error,
    /// later ones too.
    bool lose(size_t replica, const std::string& error);
    /// A job whose replica was lost: before all others.
    void submit_again(std::shared_ptr<Job> job);
    /// Nothing is accepted any more.
    void close();

    /// The last event of a job; its place is free.
    void end(Job& job, Event event);
    /// Ends it with an error of the device.
    void refuse(Job& job, const std::string& error);

  private:
    struct Place {
        int64_t slots = 0;
        bool open = true;
        ReplicaLoad load;
        std::vector<std::shared_ptr<Job>> inbox;
        std::condition_variable changed;
    };

    void add(std::shared_ptr<Job> job, bool first);
    void assign();
    void end_unwanted();
    bool any_open() const;

    Metrics& metrics_;
    const int64_t queue_;
    std::atomic<int64_t> places_ = 0, slots_ = 0;
    std::atomic<bool> stopping_ = false;
    std::mutex mutex_;  // of what follows
    std::function<void(Job&)> find_kept_;
    std::deque<std::shared_ptr<Job>> waiting_;
    std::vector<std::unique_ptr<Place>> replicas_;
    std::optional<std::string> lost_;  // the last device's error
};

}  // namespace quern
