// Rows of drafts: activations and gates of several values of a thread, without the branches of division and of logarithms, so that they
// run side by side. A step of one row is no faster by it.
#pragma once

#include "ggml-like/cuda/delta/decode_row.cuh"

namespace quern::cuda::delta {

/// a / b with the bits of the division operator, where no exponent is extreme; no branch, so that several run side by side.
__device__ __forceinline__ float divided(float a, float b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    r = fmaf(r, fmaf(-b, r, 1.0f), r);
    const float q = __fmul_rn(a, r);
    return fmaf(r, fmaf(-b, q, a), q);
}
/// SiLU of sums over windows, rounded to BF16 (Channel::next's), and the gates of a row: all side by side, where no value is extreme.
template <int kN>
__device__ __forceinline__ Gates activate(float (&x)[kN], uint16_t a, uint16_t b, const GateWeights& w) {
    const float at = as_float(a) + w.bias, beta_of = as_float(b);
    bool moderate = fabsf(at) < 60.0f && fabsf(beta_of) < 60.0f;
#pragma unroll
    for (const float v : x) moderate &= fabsf(v) < 60.0f && fabsf(v) > 1e-25f;
    Gates gates;
    if (moderate) {
#pragma unroll
        for (float& v : x) v = divided(v, 1.0f + __expf(-v));
        const float e = __expf(at);
        __builtin_assume(__float_as_uint(e) < 0x7f800000u);  // finite: leaves out a branch
        float softplus = log1pf(e);
        asm("" : "+f"(softplus));  // needed or not: so no branch
        gates.g = __fmul_rn(w.rate, at > 20.0f ? at : softplus);
        gates.decay = decay_of(gates.g);
        gates.beta = divided(1.0f, 1.0f + __expf(-beta_of));
    } else {
#pragma unroll 1
        for (int i = 0; i < kN; ++i)
#pragma unroll
            for (int j = 0; j < kN; ++j)  // constant indices keep x in registers
                if (i == j) x[j] = x[j] / (1.0f + __expf(-x[j]));
        gates = w.gates(a, b);
    }
#pragma unroll
    for (float& v : x) v = __bfloat162float(__float2bfloat16(v));
    return gates;
}

}  // namespace quern::cuda::delta
