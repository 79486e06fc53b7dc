#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"

namespace quern {

std::string cuda_unavailable() { return "this build of quern has no GPU backend (built without a CUDA toolkit)"; }

std::unique_ptr<Backend> make_cuda_backend(int) { FAIL(device, "{}", cuda_unavailable()); }

}  // namespace quern
