// Planner: gives scratch tensors offsets in one arena. Tensors whose lifetimes do not overlap share memory.
#pragma once

#include <cstdint>
#include <vector>

#include "ggml-like/graph.h"

namespace quern {

inline constexpr int64_t kPlanAlignment = 256;  // bytes

struct ArenaPlan {
    std::vector<int64_t> offset;        // by tensor index; -1: not in the arena
    int64_t arena_bytes = 0;            // scratch and outputs
    int64_t zero_bytes = 0;             // the arena's first bytes: tensors that are zeros when a run begins
    std::vector<int64_t> input_offset;  // by tensor index; -1: not an input
    int64_t input_bytes = 0;            // one packed block
};

/// A scratch tensor lives from the first node that writes it to the last node that reads it; an output lives to the
/// end. Throws Error if a scratch tensor is read before it is written.
ArenaPlan plan_memory(const Graph& graph);

}  // namespace quern
