// The delta rule's step on one element of S, with every rounding written out: an entry of the journal that is applied
// later must leave the bits that its row would have left, whichever kernel applies it.
#pragma once

namespace quern::cuda::delta {

__device__ __forceinline__ float decay_of(float g) { return __expf(g); }
/// decay S + u k.
__device__ __forceinline__ float advance(float s, float decay, float u, float k) {
    return fmaf(decay, s, __fmul_rn(u, k));
}

}  // namespace quern::cuda::delta
