// Errors of the stand-in: the runtime's codes, with a sentence of what was wrong.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace quern::cuda_stand_in {

/// Remembers the error, as the runtime does until cudaGetLastError; cudaGetErrorString has `message` for this code until
/// the next error. Returns `code`.
cudaError_t fail(cudaError_t code, const std::string& message);

}  // namespace quern::cuda_stand_in
