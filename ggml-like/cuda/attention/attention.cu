// Attention: which kernels run, and two of them: `prepare`, before all kernels but that of answers, and `generic`, for
// shapes without a fast kernel.
//
//   prepare: block = one row; 4 warps, each five heads at a time: q -> rotated, k and v -> cache
//   generic: block = one query head of one row; a key on d / 8 lanes, rounded up to a power of two:
//
//              warp 0 | key 0 | key 1 | ...     Each group of lanes has a running softmax over keys g, g + groups, ...,
//              warp 1 | key n | ...             and they are merged at the end, in order.
//
// Shared memory: of prepare a head a warp (4 KB); of generic each lane's sums (4 KB).
// Limits: head_dim a multiple of 8 up to 256. Bound: prepare by bytes, generic by reading K and V again for every query
// head; it is meant for small models.
#include "ggml-like/cuda/attention/attention.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/variants.h"

#include <cmath>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kAhead = 5;  // heads of a warp whose loads are under way

__device__ __forceinline__ void unpack8(const uint4& raw, float (&x)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(words[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
    }
}
__device__ __forceinline__ void load8(const bf16* from, float (&x)[8]) {
    unpack8(*reinterpret_cast<const uint4*>(from), x);
}

/// What a lane of `prepare` knows of its elements 8l .. 8l + 7 of every head, l < d / 8: weights of the norms, and by which
/// cos and sin they rotate; the sin is negative for the first of a pair.
struct Elements {
    float q_norm[8], k_norm[8], cos[8], sin[8];
    int pair[8];  // the other one of the pair

    __device__ __forceinline__ Elements(const AttentionCall& c, int first, int position) {
        const int half = c.rotary_dims / 2;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int e = first + i;
            q_norm[i] = e < c.head_dim ? c.q_norm[e] : 0;
            k_norm[i] = e < c.head_dim ? c.k_norm[e] : 0;
            const float2 turned =
                e < 2 * half ? rotation(c.turns[e < half ? e : e - half], position) : float2{1, 0};
            cos[i] = turned.x, sin[i] = e < half ? -turned.y : turned.y;
            pair[i] = e < half ? e + half : e < 2 * half ? e - half : e;
        }
    }
    /// Norm and rotation of one head by one warp. `shared`: [R] and up to 7 more, of this warp.
    __device__ __forceinline__ void norm_rope(const AttentionCall& c, const uint4& raw, bool is_q, int lane,
                                              float* shared, bf16* to) const {
        float x[8], sum = 0;
        unpack8(raw, x);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
        const float r = rsqrtf(warp_sum(sum) / static_cast<float>(c.head_dim) + c.eps);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= r * (is_q ? q_norm[i] : k_norm[i]);
        const bool rotates = lane * 8 < c.rotary_dims;
        if (rotates) {
            auto* own = reinterpret_cast<float4*>(shared + lane * 8);
            own[0] = {x[0], x[1], x[2], x[3]}, own[1] = {x[4], x[5], x[6], x[7]};
        }
        __syncwarp();
        if (rotates)
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = x[i] * cos[i] + shared[pair[i]] * sin[i];
        if (lane * 8 < c.head_dim)
            *reinterpret_cast<uint4*>(to + lane * 8) = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]),
                                                        pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
        __syncwarp();  // before the next head overwrites `shared`
    }
};

__global__ void __launch_bounds__(kThreads, 5)
    attention_prepare_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ __align__(16) float shared[kWarps][kMaxHeadDim];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t = blockIdx.x, sequence = c.row_sequence[t], position = c.positions[t], d = c.head_dim;
    const int64_t page = sequence < 0 ? 0 : c.pages[sequence * c.page_row + position / kKeysPerPage];
    const Elements elements(c, lane * 8, position);
    wait_for_predecessor();
    if (sequence < 0) return;
    const auto place = [&](int head) {
        return ((page * c.kv_heads + head) * kKeysPerPage + position % kKeysPerPage) * d;
    };
    const auto load = [&](const bf16* from) {
        return lane * 8 < d ? *reinterpret_cast<const uint4*>(from + lane * 8) : uint4{};
    };
    uint4 v{};  // of the warp's first KV head
    if (warp < c.kv_heads) v = load(c.v.at(t, warp));
    const int all = c.heads + c.kv_heads;  // heads of q, then of k
    for (int first = warp; first < all; first += kAhead * kWarps) {
        uint4 raw[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int head = min(first + i * kWarps, all - 1);
            raw[i] = load(head < c.heads ? c.q.at(t, head) : c.k.at(t, head - c.heads));
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int head = first + i * kWarps;
            if (head >= all) break;
            bf16* to = head < c.heads ? c.rotated + (static_cast<int64_t>(t) * c.heads + head) * d
                                      : c.k_cache + place(head - c.heads);
            elements.norm_rope(c, raw[i], head < c.heads, lane, shared[warp], to);
        }
    }
    for (int head = warp; head < c.kv_heads; head += kWarps) {
        if (head > warp) v = load(c.v.at(t, head));
        if (lane * 8 < d) *reinterpret_cast<uint4*>(c.v_cache + place(head) + lane * 8) = v;
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

void attention_prepare(const AttentionCall& c, Context& context) {
    launch(context, "gated_attention prepare", attention_prepare_kernel, dim3(c.tokens), dim3(kThreads), 0,
           c);
}

void attention_generic(const AttentionCall& c, Context& context) {
    launch(context, "gated_attention generic", attention_generic_kernel, dim3(c.tokens, c.heads),
           dim3(kThreads), 0, c);
}

void attend(const AttentionCall& c, Context& context) {
    const AttentionShape shape{c.heads, c.kv_heads, c.head_dim, c.rotary_dims, c.answers};
    const AttentionProduct product = choose(context, shape);
    if (product == AttentionProduct::split) return attention_decode(c, context);
    attention_prepare(c, context);
    if (product == AttentionProduct::warpgroups) return attention_prefill_warpgroups(c, context);
    if (product == AttentionProduct::tiles) return attention_prefill(c, context);
    attention_generic(c, context);
}

}  // namespace quern::cuda::attention
