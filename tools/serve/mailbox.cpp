#include "tools/serve/mailbox.h"

#include <utility>

namespace quern {
namespace {

constexpr size_t kMaxEvents = 4096;  // about as many tokens, beside what the socket's buffers hold

}  // namespace

bool Mailbox::put(Event event) {
    const std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    if (events_.size() < kMaxEvents) return true;
    overflowed_ = true;
    return false;
}

bool Mailbox::push(Event event) {
    const bool room = put(std::move(event));
    wake();
    return room;
}

std::optional<Event> Mailbox::pop(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    if (!filled_.wait_for(lock, patience, [&] { return !events_.empty(); })) return {};
    Event event = std::move(events_.front());
    events_.pop_front();
    return event;
}

Notifier::~Notifier() {
    flush();
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_one();
    thread_.join();
}

void Notifier::flush() {
    if (added_.size() > 1) {
        {
            const std::lock_guard lock(mutex_);
            ready_.insert(ready_.end(), added_.begin(), added_.end());
        }
        changed_.notify_one();
    } else if (!added_.empty()) {
        added_.front()->wake();  // as cheap as waking the thread
    }
    added_.clear();
}

void Notifier::run() {
    std::vector<std::shared_ptr<Mailbox>> now;
    std::unique_lock lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return ending_ || !ready_.empty(); });
        if (ready_.empty()) return;
        now.swap(ready_);
        lock.unlock();
        for (const auto& mailbox : now) mailbox->wake();
        now.clear();
        lock.lock();
    }
}

}  // namespace quern
