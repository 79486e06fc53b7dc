#include "tools/serve/replicas.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "ggml-like/backend.h"
#include "tools/common/cli_values.h"
#include "tools/engine/kept_states.h"

namespace quern {
namespace {

/// For routing.
void find_kept(const std::weak_ptr<KeptStates>& states, Job& job) {
    const std::shared_ptr<KeptStates> kept = states.lock();
    if (kept == nullptr || !job.request.use_cache) return;
    KeptStates::Beginning beginning = kept->beginning(job.request.prompt);
    job.kept = std::move(beginning.near);
    job.kept_anywhere = beginning.anywhere;
}

}  // namespace

void Replicas::run(const std::vector<One>& list, const std::function<void()>& lost) {
    {
        const std::lock_guard lock(mutex_);
        list_ = list;
        errors_.resize(list.size());
    }
    std::vector<int64_t> slots;
    for (size_t r = 0; r < list.size(); ++r) {
        slots.push_back(list[r].engine->sequences());
        loops_.push_back(std::make_unique<EngineLoop>(queue_, metrics_, r, *list[r].engine));
        if (keep_states_) loops_[r]->save_while([this, r] { return first_alive() == r; });
    }
    if (list.size() == 1) {
        queue_.open(slots);
    } else {
        // Jobs may come after the engines are gone, and find nothing then.
        const std::weak_ptr<KeptStates> kept = list[0].engine->kept_states();
        queue_.open(slots, [kept](Job& job) { find_kept(kept, job); });
    }
    std::vector<std::exception_ptr> failed(list.size());
    const auto drive = [&](size_t r) {
        try {
            if (list.size() > 1) list[r].engine->backend().use_on_this_thread();
            loops_[r]->run([&](const std::string& error) { note_loss(r, error, lost); });
        } catch (...) {
            failed[r] = std::current_exception();
            if (!is_lost(r)) queue_.stop();  // not the device's: nobody goes on
        }
    };
    if (list.size() == 1) {
        drive(0);
    } else {
        std::vector<std::thread> threads;
        for (size_t r = 0; r < list.size(); ++r) threads.emplace_back(drive, r);
        for (std::thread& thread : threads) thread.join();
    }
    const size_t alive = first_alive();
    for (size_t r = 0; r < list.size(); ++r)
        if (failed[r] != nullptr && (alive == list.size() || !is_lost(r))) std::rethrow_exception(failed[r]);
    if (list.size() > 1) list[alive].engine->backend().use_on_this_thread();
    loops_[alive]->save_states([] { return true; });
}

bool Replicas::is_lost(size_t replica) const {
    const std::lock_guard lock(mutex_);
    return !errors_[replica].empty();
}

void Replicas::note_loss(size_t replica, const std::string& error, const std::function<void()>& lost) {
    {
        // Together: who reads the warning finds the replica down.
        const std::lock_guard lock(mutex_);
        metrics_.replica(replica).up = false;
        errors_[replica] = error.empty() ? "an error" : error;
    }
    if (first_alive() == metrics_.replicas()) return lost();
    std::fprintf(stderr, "quern: %s\n", printable(warning(), 1000).c_str());
}

size_t Replicas::first_alive() const {
    const std::lock_guard lock(mutex_);
    const auto runs = [](const std::string& error) { return error.empty(); };
    return static_cast<size_t>(std::find_if(errors_.begin(), errors_.end(), runs) - errors_.begin());
}

std::vector<Replicas::Described> Replicas::list() const {
    const std::lock_guard lock(mutex_);
    std::vector<Described> out;
    for (size_t r = 0; r < list_.size(); ++r)
        out.push_back({list_[r].device, list_[r].engine->sequences(), errors_[r]});
    return out;
}

std::string Replicas::warning() const {
    const std::lock_guard lock(mutex_);
    std::string failed;
    for (size_t r = 0; r < errors_.size(); ++r)
        if (!errors_[r].empty())
            failed += fmt::format("{}{}: {}", failed.empty() ? "" : "; ", list_[r].device, errors_[r]);
    return failed.empty() ? "" : "replicas have failed, the others go on: " + failed;
}

}  // namespace quern
