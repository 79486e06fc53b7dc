// What one decoded token moves at least: with a memory bandwidth, the ceiling of the speed.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "models/model.h"
#include "tools/engine/memory_plan.h"

namespace quern {

/// Bytes that one decoded token reads and writes, by component: each matrix once a step, each sequence's KV
/// and state.
using TokenBytes = std::vector<std::pair<std::string, double>>;
/// In a step of `sequences`, each with `depth` tokens before it; experts as if chosen at random.
TokenBytes token_bytes(const Model& model, const MemoryPlan& plan, int64_t sequences, double depth);
/// The part of it that is matrices stored in 16 or 32 bits.
TokenBytes unquantized_token_bytes(const Model& model, int64_t sequences);
double total(const TokenBytes& bytes);

}  // namespace quern
