// Counters of the prefix cache, for people and for metrics.
#pragma once

#include <cstdint>

namespace quern {

struct PrefixCacheStats {
    int64_t snapshots = 0, bytes = 0, budget = 0;
    int64_t hits = 0, misses = 0;
    int64_t stored = 0, evicted = 0;
};

}  // namespace quern
