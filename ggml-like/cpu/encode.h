// The loops of quantize.h, one set per instruction set. All sets write the same bytes: every product, quotient and sum is
// rounded as written, in one order.
#pragma once

#include <cstdint>

namespace quern::cpu {

/// Nvfp4Global of quantize.h.
struct GlobalScale {
    float stored;
    bool divisor;
};

struct Encoders {
    const char* name;  // "any", "avx2"
    /// Of n values, as a float's bits without the sign, which have the order of magnitudes; those of NaN are above all.
    int32_t (*largest_magnitude)(const float* values, int64_t n);
    /// `blocks` of 16 finite values. search: the block scale with the least squared error, else the one that makes the
    /// largest value code 6.
    void (*nvfp4)(const float* values, int64_t blocks, GlobalScale global, bool search, uint8_t* codes,
                  uint8_t* scales);
    /// out[i] = e4m3(values[i] / scale).
    void (*fp8)(const float* values, int64_t n, float scale, uint8_t* out);
};

/// The best set for this CPU, chosen once.
const Encoders& encoders();

// One definition each where the build has the instruction set.
const Encoders& any_encoders();
const Encoders& avx2_encoders();

}  // namespace quern::cpu
