// From a unit of a WritePlan to its bytes.
#pragma once

#include <cstddef>
#include <functional>

#include "tools/quantize/write_plan.h"

namespace quern {

/// Takes `bytes` bytes that belong `at` bytes after the start of an output tensor. Called from any thread.
using ByteSink = std::function<void(const OutTensor&, uint64_t at, const void* data, size_t bytes)>;

/// Computes the unit and gives every byte to `sink` once, a few megabytes at a time. Pages of the source are
/// released behind the reading, so that memory does not grow with it. Throws Error(model) for weights that
/// are no finite numbers, or beyond what any reader takes for weights.
void encode_unit(const Checkpoint& checkpoint, const ModuleIndex& index, const WritePlan& plan,
                 const WriteUnit& unit, const ByteSink& sink);

}  // namespace quern
