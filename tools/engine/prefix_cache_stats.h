// What the prefix cache holds and has done, for people and for metrics.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quern {

struct PrefixCacheStats {
    int64_t snapshots = 0, bytes = 0, budget = 0;  // in host memory
    int64_t near = 0;                              // of these, also in the device's memory
    int64_t hits = 0, misses = 0;
    int64_t loaded = 0;  // hits whose state came back from host memory
    int64_t stored = 0, evicted = 0, refused = 0;
    int64_t changes = 0;  // rises whenever KeptReport would say something else
};

/// What is kept and where, and what was dropped and why.
struct KeptReport {
    struct Kept {
        int64_t tokens, bytes;
        const char* where;    // "device and host memory", "host memory"
        int64_t uses;         // requests that went on from it, or from what it goes on from
        double idle_seconds;  // since it was kept or used last
    };
    struct Dropped {
        int64_t tokens;
        const char* why;
        double seconds_ago;
    };
    std::vector<Kept> kept;        // the most valuable first
    std::vector<Dropped> dropped;  // the newest first
};

}  // namespace quern
