// Answer rows: what all kernels do for one row of a value head. A block has 256 threads, one a channel of q and k.
//
//   half warp  kTogether rows of S at a time; lane l has columns 4l .. 4l + 3, and 64 further on
#pragma once

#include "ggml-like/cuda/delta/decode_state.cuh"

namespace quern::cuda::delta {

constexpr int kTogether = 2, kLanes = 8 / kTogether;  // rows of a half warp whose sums are made at once

struct Gates {
    float g, decay, beta;
};
/// a, b: BF16.
__device__ __forceinline__ Gates gates_of(uint16_t a, uint16_t b, float rate, float bias) {
    const float at = as_float(a) + bias, softplus = at > 20.0f ? at : log1pf(__expf(at));
    const float g = __fmul_rn(rate, softplus);
    return {g, decay_of(g), 1.0f / (1.0f + __expf(-as_float(b)))};
}

/// Which channels and output a thread has: threads 0..127 a channel of q, the others one of k; all one of v, of the `outputs` that their
/// block makes. The first threads of each output store it.
struct Channels {
    int element, qk;  // of q or k
    int output, v;
    bool is_q, has_output;

    __device__ __forceinline__ Channels(const DeltaStep& d, int key_head, int head, int outputs, int share)
        : element(static_cast<int>(threadIdx.x) % kDim),
          output(share * outputs + static_cast<int>(threadIdx.x) % outputs),
          is_q(threadIdx.x < kDim),
          has_output(static_cast<int>(threadIdx.x) < outputs) {
        const int keys = d.key_heads * kDim;
        qk = key_head * kDim + (is_q ? 0 : keys) + element;
        v = 2 * keys + head * kDim + output;
    }
};

/// Where a thread's inputs of a row are.
struct RowAt {
    const uint16_t *qk, *v, *a, *b, *z;  // BF16

    __device__ __forceinline__ RowAt(const DeltaStep& d, int64_t row, int head, const Channels& c)
        : qk(static_cast<const uint16_t*>(d.u) + row * d.u_ld + c.qk),
          v(static_cast<const uint16_t*>(d.u) + row * d.u_ld + c.v),
          a(static_cast<const uint16_t*>(d.a) + row * d.ab_ld + head),
          b(static_cast<const uint16_t*>(d.b) + row * d.ab_ld + head),
          z(static_cast<const uint16_t*>(d.z) + row * d.z_ld + head * kDim + c.output) {}
    __device__ __forceinline__ void pin_all() { pin(qk), pin(v), pin(a), pin(b), pin(z); }
};

/// A thread's inputs of a row, as loaded.
struct RowInputs {
    uint16_t qk, v, a, b, z;  // BF16

    RowInputs() = default;
    __device__ __forceinline__ explicit RowInputs(const RowAt& at)
        : qk(__ldcg(at.qk)), v(__ldcg(at.v)), a(__ldcg(at.a)), b(__ldcg(at.b)), z(__ldcg(at.z)) {}
    __device__ __forceinline__ RowInputs(const DeltaStep& d, int64_t row, int head, const Channels& c)
        : RowInputs(RowAt(d, row, head, c)) {}
};

/// What a head's gates need besides a row. Asked for before the wait, as it comes from memory.
struct GateWeights {
    float rate, bias;

    __device__ __forceinline__ GateWeights(const DeltaStep& d, int head)
        : rate(d.decay_rate[head]), bias(d.dt_bias[head]) {}
    __device__ __forceinline__ Gates gates(uint16_t a, uint16_t b) const {
        return gates_of(a, b, rate, bias);
    }
};

/// Whole warp: writes its sum of squares.
__device__ __forceinline__ void write_square(float x, float* squares) {
    const float square = warp_sum(__fmul_rn(x, x));
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
}

/// A half warp's q and k of a row, normed. qk: [2, 128]; squares: one for each 32 of them.
struct Keys {
    float4 q0, q1, k0, k1;
    float product;  // q.k
    float rk;       // the factor of k

    __device__ __forceinline__ Keys(const float* qk, const float* squares, int l) {
        const auto four = [](const float* p) { return (p[0] + p[1]) + (p[2] + p[3]); };
        const float rq = rsqrtf(four(squares) + 1e-6f) * rsqrtf(static_cast<float>(kDim));
        rk = rsqrtf(four(squares + 4) + 1e-6f);
        q0 = scaled4(qk, 4 * l, rq), q1 = scaled4(qk, 64 + 4 * l, rq);
        k0 = scaled4(qk, kDim + 4 * l, rk), k1 = scaled4(qk, kDim + 64 + 4 * l, rk);
        product = half_warp_sum(dot(q0, k0) + dot(q1, k1));
    }
    /// Of q and k that are normed, and their product.
    __device__ __forceinline__ Keys(const float* normed, float q_k, int l)
        : q0(load4(normed, 4 * l)),
          q1(load4(normed, 64 + 4 * l)),
          k0(load4(normed, kDim + 4 * l)),
          k1(load4(normed, kDim + 64 + 4 * l)),
          product(q_k),
          rk(1) {}
};

/// What a half warp knows of kTogether rows of S, two apart from row `first` on. kLanes lanes have the same sum:
/// lanes below 8 s.k of a row, of which they make its delta, the others s.q, of which they make its output.
struct RowSums {
    int own;             // the row
    float delta_of_own;  // lanes below 8
    float output;

    /// first: the half warp's first row of these.
    __device__ __forceinline__ RowSums(const float4 (&s)[kTogether][2], const Keys& keys, const Gates& gates,
                                       const float* v, int first, int lane)
        : own(own_row(first, lane)) {
        float sums[2 * kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            sums[j] = dot(s[j][0], keys.k0) + dot(s[j][1], keys.k1);
            sums[kTogether + j] = dot(s[j][0], keys.q0) + dot(s[j][1], keys.q1);
        }
        const float sum = lane_sums<16>(sums);
        delta_of_own = __fmul_rn(gates.beta, fmaf(-gates.decay, sum, v[own]));
        const float delta = __shfl_sync(0xffffffffu, delta_of_own, lane & ~8);
        output = __bfloat162float(__float2bfloat16(fmaf(gates.decay, sum, __fmul_rn(keys.product, delta))));
    }
    __device__ __forceinline__ static int own_row(int first, int lane) {
        return first + 2 * (lane % 16 / kLanes % kTogether);
    }
    __device__ __forceinline__ static bool has_output(int lane) {
        return lane % 16 >= 8 && lane % kLanes == 0;
    }
    __device__ __forceinline__ static bool has_delta(int lane) { return lane % 16 < 8 && lane % kLanes == 0; }
    /// Of the j-th row.
    __device__ __forceinline__ float delta_of(int j, int lane) const {
        return __shfl_sync(0xffffffffu, delta_of_own, (lane & 16) + j * kLanes);
    }
};

/// A lane's parts of these rows of S after the row, where they leave the L2 cache first.
__device__ __forceinline__ void store_advanced(float* to, const float4 (&s)[kTogether][2],
                                               const RowSums& sums, const Keys& keys, const Gates& gates,
                                               int lane) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
        const float delta = sums.delta_of(j, lane);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            __stcs(reinterpret_cast<float4*>(to + state_place(j, h)),
                   advance4(s[j][h], gates.decay, delta, h == 0 ? keys.k0 : keys.k1));
    }
}

/// The factor of an output's gate.
__device__ __forceinline__ float output_gate(uint16_t z) {
    const float x = as_float(z);
    return x / (1.0f + __expf(-x));
}
/// Whole warps: the norm of the head's outputs and the output gate. y: of the thread's output.
__device__ __forceinline__ void store_gated(const DeltaStep& d, const float* outputs, int element, float norm,
                                            float gate, bf16* y) {
    const float4 mine = load4(outputs, 4 * (element % 32));
    const float r = rsqrtf(warp_sum(dot(mine, mine)) / static_cast<float>(kDim) + d.eps);
    *y = __float2bfloat16(outputs[element] * r * norm * gate);
}
__device__ __forceinline__ bf16* gated_output(const DeltaStep& d, int64_t row, int head, int element) {
    return static_cast<bf16*>(d.y) + (row * d.value_heads + head) * kDim + element;
}

}  // namespace quern::cuda::delta
