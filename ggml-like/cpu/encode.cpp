// Choice of the encoders at run time, and the set for any CPU.
#include "ggml-like/cpu/encode.h"

#include "ggml-like/cpu/encode_loops.h"

namespace quern::cpu {

const Encoders& any_encoders() {
    static constexpr Encoders kEncoders = encoders_named("any");
    return kEncoders;
}

const Encoders& encoders() {
#if defined(__x86_64__)
    static const Encoders& best = __builtin_cpu_supports("avx2") ? avx2_encoders() : any_encoders();
    return best;
#else
    return any_encoders();
#endif
}

}  // namespace quern::cpu
