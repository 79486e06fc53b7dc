// The least that one decoded token moves through memory, from which a bandwidth gives the ceiling of the speed.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "models/model.h"
#include "tools/engine/memory_plan.h"

namespace quern {

/// Bytes that one decoded token reads and writes, by component: its share of the matrices, which are read once a step,
/// and its sequence's KV and state.
using TokenBytes = std::vector<std::pair<std::string, double>>;
/// For a step of `sequences` tokens, each after `depth` others; experts as if chosen at random.
TokenBytes token_bytes(const Model& model, const MemoryPlan& plan, int64_t sequences, double depth);
/// Only matrices stored in 16 or 32 bits.
TokenBytes unquantized_token_bytes(const Model& model, int64_t sequences);
double total(const TokenBytes& bytes);

}  // namespace quern
