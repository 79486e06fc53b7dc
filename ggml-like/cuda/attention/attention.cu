// Attention: which kernels run, and two of them: `prepare`, before all kernels but those of answers, and `generic`, for
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
#include "ggml-like/cuda/attention/packed.cuh"
#include "ggml-like/cuda/attention/prepare.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/variants.h"

#include <cmath>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kAhead = 5;  // heads of a warp whose loads are under way

__global__ void __launch_bounds__(kThreads, 5)
    attention_prepare_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ __align__(16) float shared[kWarps][kMaxHeadDim];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t = blockIdx.x, sequence = c.row_sequence[t], position = c.positions[t], d = c.head_dim;
    const int64_t page = sequence < 0 ? 0 : c.pages[sequence * c.page_row + position / kKeysPerPage];
    const Elements elements(c, lane * 8, t, position);
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
    const int begin = t >= c.from[sequence] ? 0 : c.heads;
    for (int first = begin + warp; first < all; first += kAhead * kWarps) {
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
            float x[8];
            elements.norm_rope(c, raw[i], head < c.heads, lane, shared[warp], x);
            if (lane * 8 < d) *reinterpret_cast<uint4*>(to + lane * 8) = pack8(x);
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

/// Elements at .. at + 7 of a key or value.
template <bool kPacked>
__device__ __forceinline__ void load_cached(const AttentionCall& c, bool values, int64_t head, int place,
                                            int at, float (&x)[8]) {
    const bf16* cache = values ? c.v_cache : c.k_cache;
    if constexpr (kPacked) {
        const kv::Packing packing = values ? c.v_packing : c.k_packing;
        const packed::Block block(values ? c.v_layout : c.k_layout);
        const char* from = reinterpret_cast<const char*>(cache) + head * block.bytes;
        unpack8(packed::load_packed(packing, block, from, place, at), x);
    } else {
        load8(cache + (head * kKeysPerPage + place) * c.head_dim + at, x);
    }
}

template <bool kPacked>
__global__ void __launch_bounds__(kThreads)
    attention_generic_kernel(const __grid_constant__ AttentionCall c) {
    __shared__ float outputs[kThreads * 8];  // [lane group][lane][8]
    __shared__ float2 sums[kThreads];        // [lane group] maximum, sum
    allow_successor();
    const int t = blockIdx.x, head = blockIdx.y, d = c.head_dim;
    const int sequence = c.row_sequence[t], position = c.positions[t];
    wait_for_predecessor();
    if (sequence < 0 || t < c.from[sequence]) return;
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
            load_cached<kPacked>(c, false, page * c.kv_heads + kv_head, key % kKeysPerPage, at, k);
            load_cached<kPacked>(c, true, page * c.kv_heads + kv_head, key % kKeysPerPage, at, v);
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
    if (c.k_packing == kv::Packing::plain)
        launch(context, "gated_attention generic", attention_generic_kernel<false>, dim3(c.tokens, c.heads),
               dim3(kThreads), 0, c);
    else
        launch(context, "gated_attention generic packed", attention_generic_kernel<true>,
               dim3(c.tokens, c.heads), dim3(kThreads), 0, c);
}

void attend(const AttentionCall& c, Context& context) {
    const AttentionShape shape{c.heads, c.kv_heads, c.head_dim, c.rotary_dims, c.answers};
    const AttentionProduct product = choose(context, shape);
    const bool packed = c.k_packing != kv::Packing::plain;
    if (product == AttentionProduct::split) {
        if (packed) return attention_decode_packed(c, context);
        // Two rows of a sequence are as fast alone: if there are more, on average, they share what is read of their keys.
        const bool share = c.sequences > 0 && c.tokens > 2 * c.sequences;
        return share ? attention_decode_rows(c, context) : attention_decode(c, context);
    }
    if (packed)
        attention_prepare_packed(c, context);
    else
        attention_prepare(c, context);
    if (c.rows == 0) return;
    if (product == AttentionProduct::warpgroups) return attention_prefill_warpgroups(c, context);
    if (product == AttentionProduct::tiles) return attention_prefill(c, context);
    attention_generic(c, context);
}

}  // namespace quern::cuda::attention
