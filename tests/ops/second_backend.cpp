#include "ops/second_backend.h"

#include "ggml-like/cuda_backend.h"

namespace quern::test {

std::unique_ptr<Backend> make_test_cuda_backend() {
    return cuda_unavailable(0).empty() ? make_cuda_backend(0) : nullptr;
}

}  // namespace quern::test
