// The GPU, for cases that run on both backends.
#pragma once

#include <memory>

#include "ggml-like/backend.h"

namespace quern::test {

/// Null in builds without CUDA and on machines without a device.
std::unique_ptr<Backend> make_test_cuda_backend();

}  // namespace quern::test
