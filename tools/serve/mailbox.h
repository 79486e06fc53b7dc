// What the engine's thread tells the thread of a request: events, and how they wake it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tools/engine/answer_reader.h"
#include "tools/engine/request.h"

namespace quern {

/// How far an answer is.
struct Progress {
    int64_t prompt_tokens = 0, cached_tokens = 0, answer_tokens = 0;
    int64_t prompt_done = 0;            // of prompt_tokens
    int64_t drafted = 0, accepted = 0;  // Result's; of an answer that has ended
    Timing timing;
};

/// How a job ended.
struct Outcome : Progress {
    enum class End { stop, length, cancelled, deadline, error };
    End end = End::error;
    std::string error;  // end == error
    int error_status = 500;
    std::string error_code = "internal_error";
    std::optional<std::string> stop_text;
    int64_t diverged_at = 0, reasoning_tokens = 0;
};

struct Event {
    int choice = 0;
    AnswerDelta delta;
    std::optional<Outcome> outcome = {};    // the last event of a choice
    std::optional<Progress> progress = {};  // if asked for; while the prompt is read it comes without a delta
    bool again = false;                     // what came so far is void: the choice begins anew
};

/// Events of the choices of one request, from the engine's thread to the request's. Bounded, so that the server does
/// not hold the answer of a client that does not read.
class Mailbox {
  public:
    /// False: the reader is far behind, and this was the last event that fits, except for outcomes. The reader goes on
    /// waiting until wake().
    bool put(Event event);
    void wake() { filled_.notify_one(); }
    bool push(Event event);
    std::optional<Event> pop(std::chrono::milliseconds patience);

    /// Whether the reader was ever too far behind.
    bool overflowed() const { return overflowed_; }

  private:
    std::mutex mutex_;
    std::atomic<bool> overflowed_ = false;
    std::condition_variable filled_;
    std::deque<Event> events_;
};

/// Wakes the readers of many mailboxes on a thread of its own: 64 wake-ups take several hundred microseconds, which the
/// engine's thread does not have between two steps.
class Notifier {
  public:
    Notifier() : thread_([this] { run(); }) {}
    ~Notifier();
    Notifier(const Notifier&) = delete;
    Notifier& operator=(const Notifier&) = delete;

    /// add and flush: one thread only. Readers are woken after flush, or at the end.
    void add(std::shared_ptr<Mailbox> mailbox) { added_.push_back(std::move(mailbox)); }
    void flush();

  private:
    void run();

    std::vector<std::shared_ptr<Mailbox>> added_;
    std::mutex mutex_;  // of what follows
    std::vector<std::shared_ptr<Mailbox>> ready_;
    bool ending_ = false;
    std::condition_variable changed_;
    std::thread thread_;
};

}  // namespace quern
