// Keys of floats that order as these do.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quern::cuda::ptx {

/// NaN comes last, but above 0, which is left for none: no such expert, a column that may not win.
__device__ __forceinline__ uint32_t ordered_bits(float x) {
    const uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 1;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_bits(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

}  // namespace quern::cuda::ptx
