// Job: one answer to compute, from the thread of a request to the replica that runs it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "tools/engine/answer_reader.h"
#include "tools/engine/request.h"
#include "tools/serve/mailbox.h"

namespace quern {

class Job {
  public:
    using Clock = std::chrono::steady_clock;

    Request request;
    std::unique_ptr<AnswerReader> reader;
    std::shared_ptr<Mailbox> mailbox;
    int choice = 0;
    Clock::time_point deadline = Clock::time_point::max();
    std::atomic<bool> cancelled = false;
    /// Makes request and reader anew, for another replica; null: it cannot run twice. Returns false if nobody waits any more.
    std::function<bool(Job&)> renew;

    /// The thread that runs it: as mailbox->push, but the reader is woken when the step has ended.
    bool deliver(Event event);
    /// The same, at once.
    void tell(Event event);
    /// Whether something of it was delivered.
    bool begun() const { return begun_; }
    /// Whether its client may have had something of it; else it can run again elsewhere unnoticed.
    bool sent() const { return begun_ && streamed; }
    bool streamed = true;

    /// From any thread.
    void end_thinking();
    /// In place of the reader of a run that failed.
    void set_reader(std::unique_ptr<AnswerReader> fresh);

    // The queue's (job_queue.h).
    std::vector<int64_t> kept;  // tokens of the prompt whose state is in each replica's memory
    int64_t kept_anywhere = 0;  // in memory that all replicas can read
    int64_t prompt_tokens = 0;
    int64_t unread = 0;  // of these, that its replica has to read
    Clock::time_point queued{};
    double waited = 0;             // seconds until a replica took it; of a single one, its engine counts them
    Notifier* notifier = nullptr;  // of the replica that runs it

  private:
    bool begun_ = false;
    std::mutex mutex_;  // of which reader there is, for end_thinking
    bool thinking_ended_ = false;
};

}  // namespace quern
