// EngineLoop: one replica. A thread owns its engine, and runs on it what the queue gives.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tools/engine/engine.h"
#include "tools/serve/job_queue.h"
#include "tools/serve/mailbox.h"
#include "tools/serve/metrics.h"

namespace quern {

class EngineLoop {
  public:
    /// Replica number `replica` of the queue's.
    EngineLoop(JobQueue& queue, Metrics& metrics, size_t replica, Engine& engine)
        : queue_(queue),
          metrics_(metrics),
          own_(metrics.replica(replica)),
          replica_(replica),
          engine_(engine) {}

    /// Runs jobs until the queue stops, which cancels what still runs. If the device fails, calls `lost` and throws
    /// Error(device); what it ran then goes to other replicas, or ends with that error.
    void run(const std::function<void(const std::string& error)>& lost);
    /// Saves states in idle moments while this is true of it; before run.
    void save_while(std::function<bool()> mine) { saves_ = std::move(mine); }
    /// After run: the engine's states, if there are any that were not saved.
    void save_states(const std::function<bool()>& go_on);

  private:
    struct Live {
        RequestId id;
        std::shared_ptr<Job> job;
        bool late = false;
    };

    void serve(std::vector<Live>& live);
    ReplicaLoad load_of(const std::vector<Live>& live) const;
    void admit(std::vector<Live>& live);
    void cancel_unwanted(std::vector<Live>& live) const;
    void hand_out(std::vector<Live>& live);
    void finish(Live& l, Result result);
    void pass_on(std::vector<Live>& live, const std::string& error, bool others);
    void wait_for_work();
    void save_when_idle();
    void publish(const std::vector<Live>& live);

    JobQueue& queue_;
    Metrics& metrics_;
    ReplicaMetrics& own_;
    size_t replica_;
    Engine& engine_;
    Notifier notifier_;
    std::function<bool()> saves_;
    int64_t told_ = 0;   // PrefixCacheStats::changes that the metrics know of
    int64_t saved_ = 0;  // states stored when they were saved last
    Job::Clock::time_point next_save_{}, next_report_{};
};

}  // namespace quern
