// Replicas: engines that answer together, each driven by a thread of its own, behind one queue.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tools/engine/engine.h"
#include "tools/serve/engine_loop.h"
#include "tools/serve/job_queue.h"
#include "tools/serve/metrics.h"

namespace quern {

class Replicas {
  public:
    /// `queue`: how many answers may wait.
    Replicas(Metrics& metrics, int64_t queue) : metrics_(metrics), queue_(metrics, queue) {}

    JobQueue& queue() { return queue_; }

    /// A replica: an engine, and what people call its device.
    struct One {
        Engine* engine;
        std::string device;
    };
    /// Runs jobs until stop(): a single engine on this thread, several on threads of their own. A replica whose device fails is
    /// taken out, and the others go on. If the last one fails, calls `lost`, ends all jobs with that error, later ones too,
    /// and throws Error(device).
    void run(const std::vector<One>& list, const std::function<void()>& lost);
    /// Cancels what still runs.
    void stop() { queue_.stop(); }
    /// Call before run, if the engines have a directory for states: they are saved in idle moments and at the end.
    void keep_states() { keep_states_ = true; }

    struct Described {
        std::string device;
        int64_t slots;
        std::string error;  // empty: it runs
    };
    std::vector<Described> list() const;
    /// What people should know of replicas that have failed; empty if none has.
    std::string warning() const;

  private:
    /// The number of replicas if none runs.
    size_t first_alive() const;
    bool is_lost(size_t replica) const;
    void note_loss(size_t replica, const std::string& error, const std::function<void()>& lost);

    Metrics& metrics_;
    JobQueue queue_;
    bool keep_states_ = false;
    std::vector<std::unique_ptr<EngineLoop>> loops_;
    mutable std::mutex mutex_;  // of what follows
    std::vector<One> list_;
    std::vector<std::string> errors_;  // of each replica; empty: it runs
};

}  // namespace quern
