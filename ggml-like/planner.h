// Planner: gives scratch tensors offsets in one arena, sharing memory between tensors whose lifetimes are
// apart.
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

/// A scratch tensor lives from the node that writes it first to the last node that reads it; an output to the
/// end. Nodes on the side stream may overlap main-stream nodes: what they touch is kept to the end of the
/// graph. Throws Error if a scratch tensor is read before it is written.
ArenaPlan plan_memory(const Graph& graph);

}  // namespace quern
