#include "tools/serve/job.h"

#include <utility>

namespace quern {

bool Job::deliver(Event event) {
    begun_ = true;
    if (notifier == nullptr) return mailbox->push(std::move(event));
    notifier->add(mailbox);
    return mailbox->put(std::move(event));
}

void Job::tell(Event event) {
    begun_ = true;
    mailbox->push(std::move(event));
}

void Job::end_thinking() {
    const std::lock_guard lock(mutex_);
    thinking_ended_ = true;
    reader->end_thinking();
}

void Job::set_reader(std::unique_ptr<AnswerReader> fresh) {
    const std::lock_guard lock(mutex_);
    reader = std::move(fresh);
    if (thinking_ended_) reader->end_thinking();
}

}  // namespace quern
