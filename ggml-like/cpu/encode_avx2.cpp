// Encoders for AVX2. Compiled with those instructions.
#if defined(__AVX2__)

#include "ggml-like/cpu/encode_loops.h"

namespace quern::cpu {

const Encoders& avx2_encoders() {
    static constexpr Encoders kEncoders = encoders_named("avx2");
    return kEncoders;
}

}  // namespace quern::cpu

#endif
