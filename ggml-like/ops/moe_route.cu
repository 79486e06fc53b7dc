// moe_route on the GPU.
//   few rows: block (tile, g) normalises x for itself and makes logits g and g + 8 of its tile of 16 router rows, one
//     16-byte load of weights a thread; the block that ends last chooses experts and groups the pairs
//   many rows: norm, tiled product, a warp a row, a block an expert
// Limit of the few-row kernel: latency (two block sums, one ticket).
#include "ggml-like/ops/moe_route.h"

#include "ggml-like/cuda/few_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/route.cuh"

namespace quern::cuda {
namespace {

struct Route {
    const float *x, *norm;
    const uint8_t* router;  // bf16 tiles
    int rows, columns, chunks, experts, used;
    float eps;
    bf16* h;
    int* ids;
    float *weights, *shared;
    int* groups;
    float* logits;  // [rows, experts + 1], rows logits_ld apart
    int64_t logits_ld;
    unsigned* counter;
};

/// Sums of N values a thread over the block, the same order for every row.
template <int N>
__device__ __forceinline__ void block_sums(float (&v)[N], float (&partial)[N][kWarps]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        v[i] = warp_sum(v[i]);
        if (threadIdx.x % 32 == 0) partial[i][threadIdx.x / 32] = v[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        v[i] = 0;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) v[i] += partial[i][w];
    }
}

/// This thread's columns k, k+1, k+8, k+9 and the weights of two rows at them.
struct Unit {
    float4 norm;
    uint4 weights;
    int k;
    bool valid;

    __device__ __forceinline__ Unit(const Route& r, int tile, int g, int index) {
        const int block = index / 4, t = index % 4;  // of 16 columns
        k = block * 16 + 2 * t;
        valid = k < r.columns;
        norm = {};
        weights = {};
        if (!valid) return;
        norm = {r.norm[k], r.norm[k + 1], r.norm[k + 8], r.norm[k + 9]};
        weights = *reinterpret_cast<const uint4*>(r.router + (static_cast<int64_t>(tile) * r.chunks * 4 + block) * 512 +
                                                  (4 * g + t) * 16);
    }
    __device__ __forceinline__ float4 load(const float* row) const {
        if (!valid) return {};
        const float2 a = __ldcg(reinterpret_cast<const float2*>(row + k));
        const float2 b = __ldcg(reinterpret_cast<const float2*>(row + k + 8));
        return {a.x, a.y, b.x, b.y};
    }
    /// h at the columns as two BF16 pairs.
    __device__ __forceinline__ uint2 normalise(const float4& x, float r) const {
        return {pack_bf16(x.x * r * norm.x, x.y * r * norm.y), pack_bf16(x.z * r * norm.z, x.w * r * norm.w)};
    }
};

__device__ __forceinline__ float dot2(uint32_t a, uint32_t b) {
    const float2 x = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&a));
    const float2 y = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&b));
    return x.x * y.x + x.y * y.y;
}

/// Rows n0 .. n0 + N - 1: their norm, h, and two logits each.
template <int N>
__device__ __forceinline__ void route_rows(const Route& r, const Unit& first, int tile, int g, int n0,
                                           float (&sums)[N][kWarps], float (&dots)[2 * N][kWarps]) {
    const int units = r.chunks * 16;
    float4 x[N];
    float sum[N], dot[2 * N] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float* row = r.x + static_cast<int64_t>(min(n0 + i, r.rows - 1)) * r.columns;
        x[i] = first.load(row);
        sum[i] = x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
#pragma unroll 1
        for (int u = threadIdx.x + kThreads; u < units; u += kThreads) {
            const float4 v = Unit(r, tile, g, u).load(row);
            sum[i] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        }
    }
    block_sums<N>(sum, sums);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int n = n0 + i;
        if (n >= r.rows) break;
        const float scale = rsqrtf(sum[i] / static_cast<float>(r.columns) + r.eps);
        const auto one = [&](const Unit& u, const float4& v) {
            const uint2 h = u.normalise(v, scale);
            dot[i] += dot2(h.x, u.weights.x) + dot2(h.y, u.weights.z);
            dot[N + i] += dot2(h.x, u.weights.y) + dot2(h.y, u.weights.w);
            if (u.valid && n % gridDim.x == blockIdx.x) {
                bf16* to = r.h + static_cast<int64_t>(n) * r.columns + u.k;
                *reinterpret_cast<uint32_t*>(to) = h.x;
                *reinterpret_cast<uint32_t*>(to + 8) = h.y;
            }
        };
        one(first, x[i]);
#pragma unroll 1
        for (int u = threadIdx.x + kThreads; u < units; u += kThreads) {
            const Unit unit(r, tile, g, u);
            one(unit, unit.load(r.x + static_cast<int64_t>(n) * r.columns));
        }
    }
    block_sums<2 * N>(dot, dots);
    const int i = threadIdx.x % N, half = threadIdx.x / N, row = tile * kTileRows + g + 8 * half;
    if (threadIdx.x < 2 * N && n0 + i < r.rows && row <= r.experts) {
        float value = dot[0];
#pragma unroll
        for (int j = 1; j < 2 * N; ++j)
            if (threadIdx.x == j) value = dot[j];
        r.logits[(n0 + i) * r.logits_ld + row] = value;
    }
}

/// Groups of at most kFewRows * kMostUsed pairs: each place is a count of smaller ones.
__device__ __forceinline__ void group_few(const Route& r, const int* ids) {
    const int pairs = r.rows * r.used;
    for (int e = threadIdx.x; e <= r.experts; e += kThreads) {
        int before = 0;
        for (int i = 0; i < pairs; ++i) before += ids[i] < e;
        r.groups[e] = before;
    }
    for (int i = threadIdx.x; i < pairs; i += kThreads) {
        int before = 0;
        for (int j = 0; j < pairs; ++j) before += ids[j] < ids[i] || (ids[j] == ids[i] && j < i);
        r.groups[r.experts + 1 + before] = i;
    }
}

/// N: rows in flight.
template <int N>
__global__ void __launch_bounds__(kThreads, 2) route_few(Route r) {
    __shared__ float sums[N][kWarps], dots[2 * N][kWarps];
    __shared__ int ids[kFewRows * kMostUsed];
    __shared__ bool last;
    allow_successor();
    const int tile = blockIdx.x / 8, g = blockIdx.x % 8;
    const Unit first(r, tile, g, threadIdx.x);
    wait_for_predecessor();
    for (int n0 = 0; n0 < r.rows; n0 += N) route_rows<N>(r, first, tile, g, n0, sums, dots);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(r.counter, 1) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int n = warp; n < r.rows; n += kWarps) {
        const float* logits = r.logits + n * r.logits_ld;
        int* mine = ids + n * r.used;
        float* weights = r.weights + n * r.used;
        if (r.experts <= 256)
            choose_experts<8>(logits, r.experts, r.used, mine, weights);
        else
            choose_experts<kMostExperts / 32>(logits, r.experts, r.used, mine, weights);
        __syncwarp();
        if (lane < r.used) r.ids[n * r.used + lane] = mine[lane];
        if (lane == 0) r.shared[n] = 1.0f / (1.0f + __expf(-__ldcg(logits + r.experts)));
    }
    __syncthreads();
    group_few(r, ids);
    if (threadIdx.x == 0) *r.counter = 0;
}

constexpr int kManyThreads = 256;

/// A warp a row.
__global__ void __launch_bounds__(kManyThreads) choose_many(Route r) {
    allow_successor();
    wait_for_predecessor();
    const int n = blockIdx.x * (kManyThreads / 32) + threadIdx.x / 32;
    if (n >= r.rows) return;
    const float* logits = r.logits + static_cast<int64_t>(n) * r.logits_ld;
    int* ids = r.ids + static_cast<int64_t>(n) * r.used;
    float* weights = r.weights + static_cast<int64_t>(n) * r.used;
    if (r.experts <= 256)
        choose_experts<8>(logits, r.experts, r.used, ids, weights);
    else
        choose_experts<kMostExperts / 32>(logits, r.experts, r.used, ids, weights);
    if (threadIdx.x % 32 == 0) r.shared[n] = 1.0f / (1.0f + __expf(-__ldcg(logits + r.experts)));
}

/// A block an expert: counts the pairs before its own, then writes its own in order.
__global__ void __launch_bounds__(kManyThreads) group_many(Route r) {
    __shared__ int before[kManyThreads / 32], own[kManyThreads / 32], at;
    allow_successor();
    wait_for_predecessor();
    const int e = blockIdx.x, pairs = r.rows * r.used, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int smaller = 0;
    for (int i = threadIdx.x; i < pairs; i += kManyThreads) smaller += __ldcg(r.ids + i) < e;
    smaller = __reduce_add_sync(0xffffffffu, smaller);
    if (lane == 0) before[warp] = smaller;
    __syncthreads();
    if (threadIdx.x == 0) {
        int total = 0;
        for (int w = 0; w < kManyThreads / 32; ++w) total += before[w];
        r.groups[e] = at = total;
        if (e == 0) r.groups[r.experts] = pairs;
    }
    __syncthreads();
    for (int base = 0; base < pairs; base += kManyThreads) {
        const int i = base + threadIdx.x;
        const bool mine = i < pairs && __ldcg(r.ids + i) == e;
        const unsigned ballot = __ballot_sync(0xffffffffu, mine);
        if (lane == 0) own[warp] = __popc(ballot);
        if (!__syncthreads_or(mine)) continue;
        int place = at + __popc(ballot & ((1u << lane) - 1));
        int total = 0;
        for (int w = 0; w < kManyThreads / 32; ++w) {
            if (w < warp) place += own[w];
            total += own[w];
        }
        if (mine) r.groups[r.experts + 1 + place] = i;
        __syncthreads();
        if (threadIdx.x == 0) at += total;
        __syncthreads();
    }
}

}  // namespace

void moe_route(const Node& node, Context& c) {
    const Tensor &x = *node.inputs[0], &norm = *node.inputs[1];
    const auto& p = node.params<MoeRouteParams>();
    const Packed& w = *static_cast<const Packed*>(p.router->placed);
    const int rows = static_cast<int>(x.shape[0]);
    const Route r{.x = x.as<float>(),
                  .norm = norm.as<float>(),
                  .router = w.part[0].data,
                  .rows = rows,
                  .columns = w.cols,
                  .chunks = w.chunks,
                  .experts = w.rows - 1,
                  .used = p.used,
                  .eps = p.eps,
                  .h = node.outputs[0]->as<bf16>(),
                  .ids = node.outputs[1]->as<int>(),
                  .weights = node.outputs[2]->as<float>(),
                  .shared = node.outputs[3]->as<float>(),
                  .groups = node.outputs[4]->as<int>(),
                  .logits = node.outputs[5]->as<float>(),
                  .logits_ld = node.outputs[5]->stride[0],
                  .counter = c.counters};
    if (r.experts > kMostExperts || r.used > kMostUsed) unsupported("moe_route", "so many experts");
    if (rows <= kFewRows && w.parts == 1 && w.part[0].kind == Kind::bf16) {
        const int last_rows = w.rows - (w.part[0].tiles - 1) * kTileRows;
        const int grid = (w.part[0].tiles - 1) * 8 + min(8, last_rows);
        return launch(c, "moe_route", rows == 1 ? route_few<1> : route_few<4>, grid, kThreads, 0, r);
    }
    norm_rows(c, r.x, r.norm, rows, r.columns, r.eps, r.h);
    gemm(c, w, r.h, r.columns, rows, {r.logits, r.logits_ld, true, nullptr, 0});
    launch(c, "moe_route", choose_many, (rows + 7) / 8, kManyThreads, 0, r);
    launch(c, "moe_route", group_many, r.experts, kManyThreads, 0, r);
}

}  // namespace quern::cuda
