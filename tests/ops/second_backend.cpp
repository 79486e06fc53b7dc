#include "ops/second_backend.h"

#include <cstdlib>

#include "ggml-like/cuda_backend.h"

namespace quern::test {

std::unique_ptr<Backend> make_test_cuda_backend(int shared_bytes) {
    const char* most = std::getenv("QUERN_TEST_SHARED_BYTES");
    return make_cuda_backend(0, most != nullptr ? std::atoi(most) : shared_bytes);
}

}  // namespace quern::test
