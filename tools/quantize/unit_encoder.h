// From a unit of a WritePlan to its bytes.
#pragma once

#include <cstddef>
#include <functional>

#include "tools/quantize/write_plan.h"

namespace quern {

/// Gets `bytes` bytes for offset `at` of an output tensor. Called from any thread.
using ByteSink = std::function<void(const OutTensor&, uint64_t at, const void* data, size_t bytes)>;

/// Computes the unit and gives every byte to `sink` once, a few megabytes at a time. Releases pages of the source as
/// soon as they are read, so that memory does not grow. Throws Error(model) for weights that are not finite, or so
/// large or small that no reader would accept them.
void encode_unit(const Checkpoint& checkpoint, const ModuleIndex& index, const WritePlan& plan,
                 const WriteUnit& unit, const ByteSink& sink);

}  // namespace quern
