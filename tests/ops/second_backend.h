// The GPU, for cases that run on both backends.
#pragma once

#include <memory>

#include "ggml-like/backend.h"

namespace quern::test {

/// With QUERN_TEST_SHARED_BYTES in the environment, one that takes no more shared memory a block (101376:
/// sm_86, 89, 120). Throws Error(device), so that the case fails, in builds without CUDA and on machines
/// without a device.
std::unique_ptr<Backend> make_test_cuda_backend();

}  // namespace quern::test
