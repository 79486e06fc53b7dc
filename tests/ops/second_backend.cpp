#include "ops/second_backend.h"

#include <cstdlib>

#include "ggml-like/cuda_backend.h"

namespace quern::test {

std::unique_ptr<Backend> make_test_cuda_backend() {
    const char* most = std::getenv("QUERN_TEST_SHARED_BYTES");
    return make_cuda_backend(0, most != nullptr ? std::atoi(most) : 0);
}

std::unique_ptr<Backend> make_small_cuda_backend() { return make_cuda_backend(0, 99 * 1024); }

}  // namespace quern::test
