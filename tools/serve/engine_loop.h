// EngineLoop: one thread owns the engine; others give it jobs and read the results.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tools/engine/answer_reader.h"
#include "tools/engine/engine.h"
#include "tools/serve/mailbox.h"
#include "tools/serve/metrics.h"

namespace quern {

/// One answer to compute.
struct Job {
    using Clock = std::chrono::steady_clock;

    Request request;
    std::unique_ptr<AnswerReader> reader;
    std::shared_ptr<Mailbox> mailbox;
    int choice = 0;
    Clock::time_point deadline = Clock::time_point::max();
    std::atomic<bool> cancelled = false;
};

class EngineLoop {
  public:
    /// `queue`: how many answers may wait.
    EngineLoop(Metrics& metrics, int64_t queue) : metrics_(metrics), queue_(queue) {}

    /// Takes places for `count` answers; false if fewer are free.
    bool reserve(int64_t count);
    /// Submits an answer that has a place; the place is free again when the answer has ended.
    void submit(std::shared_ptr<Job> job);
    /// Frees places that were not used.
    void give_back(int64_t count);
    /// The engine's thread only: as mailbox->push, but the reader is woken when the step has ended.
    bool deliver(const std::shared_ptr<Mailbox>& mailbox, Event event);

    /// Runs jobs on `engine` until stop(), which cancels what still runs. If the device fails, calls `lost`, ends all
    /// jobs with that error, later ones too, and throws Error(device).
    void run(Engine& engine, const std::function<void()>& lost);
    void stop();
    /// Call before run, if the engine has a directory for states: they are saved in idle moments and at the end.
    void keep_states() { keep_states_ = true; }
    int64_t busy() const { return places_; }

  private:
    struct Live {
        RequestId id;
        std::shared_ptr<Job> job;
        bool late = false;
    };

    void serve(Engine& engine, std::vector<Live>& live);
    void admit(Engine& engine, std::vector<Live>& live);
    bool wait_for_work();
    void save_states(Engine& engine, const std::function<bool()>& go_on);
    void save_when_idle(Engine& engine);
    void refuse_all(const std::string& error);
    void refuse(Job& job, const std::string& error);
    void cancel_unwanted(Engine& engine, std::vector<Live>& live) const;
    void hand_out(Engine& engine, std::vector<Live>& live);
    void finish(Live& l, Result result);
    void end(Job& job, Event event);
    void publish(const Engine& engine, const std::vector<Live>& live);

    Metrics& metrics_;
    Notifier notifier_;
    int64_t queue_;
    std::atomic<int64_t> places_ = 0, slots_ = 0;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::shared_ptr<Job>> inbox_;
    std::optional<std::string> lost_;  // the device's error
    std::atomic<bool> stopping_ = false;
    bool keep_states_ = false;
    int64_t told_ = 0;   // PrefixCacheStats::changes that the metrics know of
    int64_t saved_ = 0;  // states stored when they were saved last
    Job::Clock::time_point next_save_{}, next_report_{};
};

}  // namespace quern
