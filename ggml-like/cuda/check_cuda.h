// CUDA_CHECK for host code: throws Error(device), or Error(memory) when memory ran out.
#pragma once

#include <cuda_runtime_api.h>

namespace quern::cuda {

/// `what`: the call or the op, for the message.
void check_launch(cudaError_t code, const char* what);

}  // namespace quern::cuda

#define CUDA_CHECK(call) ::quern::cuda::check_launch((call), #call)
