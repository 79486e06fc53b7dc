// Attention: which kernels run, and two of them: `prepare`, before all kernels but that of answers, and `generic`, for
// shapes without a fast kernel.
//
//   prepare: block = one row; 4 warps, each a head at a time: q -> rotated, k and v -> cache
//   generic: block = one query head of one row; a key on d / 8 lanes, rounded up to a power of two:
//
//              warp 0 | key 0 | key 1 | ...     Each group of lanes has a running softmax over keys g, g + groups, ...,
//              warp 1 | key n | ...             and they are merged at the end, in order.
//
// Shared memory: of prepare a head a warp (4 KB) and the row's rotations; of generic each lane's sums (4 KB).
// Limits: head_dim a multiple of 8 up to 256. Bound: prepare by bytes, generic by reading K and V again for every query
// head; it is meant for small models.
#include "ggml-like/cuda/attention/attention.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <cmath>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;

__device__ __forceinline__ void load8(const bf16* from, float (&x)[8]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(words[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
    }
}

/// Norm and rotation of one head by one warp; lane l < d / 8 holds elements 8l .. 8l+7. `angles`: [R/2] cos and sin;
/// `shared`: [d], of this warp.
__device__ __forceinline__ void norm_rope(const AttentionCall& c, const bf16* from, const float* weight,
                                          const float2* angles, int lane, float* shared, bf16* to) {
    const bool active = lane * 8 < c.head_dim;
    const int half = c.rotary_dims / 2;
    float x[8] = {}, sum = 0;
    if (active) load8(from + lane * 8, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
    const float r = rsqrtf(warp_sum(sum) / static_cast<float>(c.head_dim) + c.eps);
    if (active) {
#pragma unroll
        for (int i = 0; i < 8; ++i) shared[lane * 8 + i] = x[i] *= r * weight[lane * 8 + i];
    }
    __syncwarp();
    if (active) {
        if (lane * 8 < 2 * half) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int e = lane * 8 + i;
                if (e < half)
                    x[i] = x[i] * angles[e].x - shared[e + half] * angles[e].y;
                else if (e < 2 * half)
                    x[i] = x[i] * angles[e - half].x + shared[e - half] * angles[e - half].y;
            }
        }
        *reinterpret_cast<uint4*>(to + lane * 8) = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                                    pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
    }
    __syncwarp();  // before the next head overwrites `shared`
}

__global__ void __launch_bounds__(kThreads)
    attention_prepare_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ float shared[kWarps][kMaxHeadDim];
    __shared__ float2 angles[kMaxHeadDim / 2];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t = blockIdx.x, sequence = c.row_sequence[t], position = c.positions[t], d = c.head_dim;
    for (int i = threadIdx.x; i < c.rotary_dims / 2; i += kThreads)
        angles[i] = rotation(c.turns[i], position);
    __syncthreads();
    wait_for_predecessor();
    if (sequence < 0) return;
    const int64_t page = c.pages[sequence * c.page_row + position / kKeysPerPage];
    for (int head = warp; head < c.heads; head += kWarps)
        norm_rope(c, c.q.at(t, head), c.q_norm, angles, lane, shared[warp],
                  c.rotated + (static_cast<int64_t>(t) * c.heads + head) * d);
    for (int head = warp; head < c.kv_heads; head += kWarps) {
        const int64_t place = ((page * c.kv_heads + head) * kKeysPerPage + position % kKeysPerPage) * d;
        norm_rope(c, c.k.at(t, head), c.k_norm, angles, lane, shared[warp], c.k_cache + place);
        if (lane * 8 < d)
            *reinterpret_cast<uint4*>(c.v_cache + place + lane * 8) =
                *reinterpret_cast<const uint4*>(c.v.at(t, head) + lane * 8);
    }
}

/// Lanes that share a key: d / 8 rounded up to a power of two.
__device__ __forceinline__ int lanes_per_key(int head_dim) {
    int lanes = 1;
    while (lanes * 8 < head_dim) lanes *= 2;
    return lanes;
}

__global__ void __launch_bounds__(kThreads)
    attention_generic_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ float outputs[kThreads * 8];  // [lane group][lane][8]
    __shared__ float2 sums[kThreads];        // [lane group] maximum, sum
    allow_successor();
    const int t = blockIdx.x, head = blockIdx.y, d = c.head_dim;
    const int sequence = c.row_sequence[t], position = c.positions[t];
    wait_for_predecessor();
    if (sequence < 0) return;
    const int lanes = lanes_per_key(d), groups = kThreads / lanes;
    const int group = threadIdx.x / lanes, at = threadIdx.x % lanes * 8;
    const bool active = at < d;
    const int kv_head = head / (c.heads / c.kv_heads);
    const int* pages = c.pages + sequence * c.page_row;
    float q[8] = {}, o[8] = {}, maximum = -INFINITY, sum = 0;
    if (active) load8(c.rotated + (static_cast<int64_t>(t) * c.heads + head) * d + at, q);
    const float scale = score_scale(d);
    for (int base = 0; base <= position; base += groups) {  // all lanes to the end: they shuffle
        const int key = base + group;
        const bool use = active && key <= position;
        float k[8] = {}, v[8] = {}, s = 0;
        if (use) {
            const int64_t page = pages[key / kKeysPerPage];
            const int64_t place =
                ((page * c.kv_heads + kv_head) * kKeysPerPage + key % kKeysPerPage) * d + at;
            load8(c.k_cache + place, k);
            load8(c.v_cache + place, v);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) s = fmaf(q[i], k[i], s);
        for (int l = 1; l < lanes; l *= 2) s += __shfl_xor_sync(0xffffffffu, s, l);
        if (key > position) continue;
        const float highest = fmaxf(maximum, s * scale), f = fast_exp2(maximum - highest),
                    p = fast_exp2(s * scale - highest);
        maximum = highest;
        sum = fmaf(sum, f, p);
#pragma unroll
        for (int i = 0; i < 8; ++i) o[i] = fmaf(o[i], f, p * v[i]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) outputs[threadIdx.x * 8 + i] = o[i];
    if (threadIdx.x % lanes == 0) sums[group] = {maximum, sum};
    __syncthreads();
    for (int e = threadIdx.x; e < d; e += kThreads) {
        float highest = -INFINITY, total = 0, out = 0;
        for (int g = 0; g < groups; ++g) highest = fmaxf(highest, sums[g].x);
        for (int g = 0; g < groups; ++g) {
            const float f = part_weight(sums[g].x, highest);
            total = fmaf(sums[g].y, f, total);
            out = fmaf(outputs[g * lanes * 8 + e], f, out);
        }
        const float gate = __bfloat162float(c.gate.at(t, head)[e]);
        c.y[(static_cast<int64_t>(t) * c.heads + head) * d + e] =
            __float2bfloat16(out / total * sigmoid(gate));
    }
}

}  // namespace

void set_turns(AttentionCall& call, double theta) {
    constexpr double kTwoPi = 6.283185307179586476925;
    for (int i = 0; i < call.rotary_dims / 2; ++i)
        call.turns[i] =
            static_cast<uint64_t>(std::ldexp(std::pow(theta, -2.0 * i / call.rotary_dims) / kTwoPi, 64));
}

bool has_fast_shape(const AttentionCall& c) {
    return c.head_dim == 256 && c.rotary_dims == 64 && c.heads / c.kv_heads <= 8;
}

void attention_prepare(const AttentionCall& c, Context& context) {
    launch(context, "gated_attention prepare", attention_prepare_kernel, dim3(c.tokens), dim3(kThreads), 0,
           c);
}

void attention_generic(const AttentionCall& c, Context& context) {
    launch(context, "gated_attention generic", attention_generic_kernel, dim3(c.tokens, c.heads),
           dim3(kThreads), 0, c);
}

void attend(const AttentionCall& c, Context& context) {
    if (has_fast_shape(c) && c.answers) return attention_decode(c, context);
    attention_prepare(c, context);
    if (has_fast_shape(c))
        attention_prefill(c, context);
    else
        attention_generic(c, context);
}

}  // namespace quern::cuda::attention
