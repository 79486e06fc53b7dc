// A GPU that is not there: to plan for a card before anyone has it.
#pragma once

#include <memory>
#include <string>

#include "ggml-like/backend.h"

namespace quern {

/// Answers questions about sizes, types and steps like a CUDA device with `free_bytes` of free memory; whatever needs
/// the device itself throws Error(device).
std::unique_ptr<Backend> make_planned_gpu(const std::string& description, int64_t total_bytes,
                                          int64_t free_bytes);

}  // namespace quern
