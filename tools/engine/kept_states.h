// KeptStates: the memory of states that the prefix caches of several replicas share (prefix_cache.h), or that one has alone.
//
// Whoever touches an entry holds the mutex. Copies to host memory run beside the plans: until they have ended, which only the
// replica that makes them can know, the state is that one's alone. Copies in a device's memory are each replica's own: another
// one that gives up the state leaves them as orphans, which their owner releases.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tools/engine/host_blocks.h"
#include "tools/engine/host_states.h"
#include "tools/engine/state_pool.h"

namespace quern {

class KeptStates {
  public:
    using Clock = std::chrono::steady_clock;
    static constexpr size_t kNobody = static_cast<size_t>(-1);

    struct Entry {
        std::vector<int32_t> tokens;
        HostStates::State state;
        std::vector<std::optional<Snapshot>> near = {};  // the same in the memory of each replica's device
        size_t saving = kNobody;                         // the replica that still copies it to host memory
        bool gone = false;                               // given up
        int64_t saved = 0;  // tokens that a hit saves beyond the next shorter entry
        int64_t uses = 0;
        uint64_t conversation = 0;
        bool side = false;  // its conversation has a state that it does not go on from
        double worth = 0;
        int64_t last_use = 0;
        Clock::time_point used{};

        int64_t length() const { return static_cast<int64_t>(tokens.size()); }
        bool is_near(size_t replica) const { return replica < near.size() && near[replica].has_value(); }
    };
    struct Dropped {
        int64_t tokens;
        const char* why;
        Clock::time_point at;
    };

    explicit KeptStates(std::shared_ptr<HostBlocks> host) : blocks(std::move(host)) {}

    /// How much of a prompt is kept, for routing; from any thread.
    struct Beginning {
        int64_t anywhere = 0;       // tokens of the longest state in host memory
        std::vector<int64_t> near;  // by replica: of the longest in its device's memory
    };
    Beginning beginning(std::span<const int32_t> prompt);
    /// The number of a replica that shares from now on. Before any of them runs.
    size_t join();
    /// Whether only one has joined.
    bool alone() const { return orphans.size() == 1; }

    std::mutex mutex;  // of what follows
    std::shared_ptr<HostBlocks> blocks;
    std::list<std::shared_ptr<Entry>> entries;
    std::vector<std::vector<Snapshot>> orphans;  // by replica
    double clock = 0;                            // rises to the worth of what was evicted last
    int64_t uses = 0;                            // counts touches
    int64_t stored = 0, evicted = 0, refused = 0, changes = 0;
    std::deque<Dropped> dropped;
};

/// Whether `tokens` begin with `prefix`.
bool begins(std::span<const int32_t> prefix, std::span<const int32_t> tokens);

}  // namespace quern
