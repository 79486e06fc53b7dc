#include "ggml-like/check.h"
#include "ggml-like/cuda_backend.h"

namespace quern {

bool cuda_built() { return false; }

std::string cuda_unavailable(int) {
    return "this build of quern has no GPU backend (built without a CUDA toolkit)";
}

std::unique_ptr<Backend> make_cuda_backend(int device, int) { FAIL(device, "{}", cuda_unavailable(device)); }

std::unique_ptr<Backend> make_cuda_backends(const std::vector<int>&, const RankOptions&) {
    FAIL(device, "{}", cuda_unavailable(0));
}

std::unique_ptr<Backend> make_cuda_stages(const std::vector<int>&, bool) {
    FAIL(device, "{}", cuda_unavailable(0));
}

int cuda_devices() { return 0; }

}  // namespace quern
