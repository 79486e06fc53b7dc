// The GPU, for cases that run on both backends.
#pragma once

#include <memory>

#include "ggml-like/backend.h"

namespace quern::test {

/// QUERN_TEST_SHARED_BYTES in the environment limits the shared memory of a block and leaves out products of warpgroups
/// (101376: as sm_86, 89 and 120; 232448: only the latter, on sm_90).
/// Throws Error(device), so that the case fails, in builds without CUDA and on machines without a device.
std::unique_ptr<Backend> make_test_cuda_backend();
/// The same, limited as with 101376.
std::unique_ptr<Backend> make_small_cuda_backend();

}  // namespace quern::test
