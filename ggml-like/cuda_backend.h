// The CUDA backend's door. In builds without CUDA the same functions say so.
#pragma once

#include <memory>
#include <string>

#include "ggml-like/backend.h"

namespace quern {

/// Why no GPU can be used: no driver, no device, a card older than sm_80, a build without CUDA. Empty: one can.
std::string cuda_unavailable();
/// Throws Error(device) that says why it cannot be had.
std::unique_ptr<Backend> make_cuda_backend(int device);

}  // namespace quern
