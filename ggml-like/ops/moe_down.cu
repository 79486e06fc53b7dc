// moe_down on the GPU.
//   few rows: block = one tile of 16 output rows, all terms of it; 8 warps split the columns of every expert
//   in turn.
//     Experts come in rising order of id, so a row's sum does not depend on its neighbours. No atomics, no
//     second kernel.
//   NVFP4 up to 64 rows: cuda/down_fp4.cu
//   many rows: grouped tiled product writes the terms in BF16, then one kernel weighs and adds them.
// Traffic of few rows: the weights of each needed expert once; all of a block's loads are under way before it
// waits for gate and up, if ids and weights were complete when the predecessor started its work
// (moe_gate_up.cu).
#include "ggml-like/ops/moe_down.h"

#include "ggml-like/cuda/expert_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"

namespace quern::cuda {
namespace {

constexpr int kDownWarps = 8, kDownThreads = kDownWarps * 32;

static_assert(kDownThreads == 16 * kFewRows, "a thread an output");

/// Row n's weight and pair for each listed expert.
struct Uses {
    float weight[kMostPairs][kFewRows];
    float factor[kMostPairs][kTileRows];  // of the block's tile
    short pair[kMostPairs][kFewRows];     // -1: the row does not use it
};

__device__ __forceinline__ const uint8_t* shared_chunk(const Down& a, int chunk, Kind kind) {
    return a.shared.data + (static_cast<int64_t>(blockIdx.x) * a.shared_chunks + chunk) * chunk_bytes(kind);
}

/// The block's tile of expert after expert; then, if it is stored the same way, of the shared expert.
template <Kind K, Kind S>
struct TileSource {
    const Down& a;
    const ExpertList& list;
    int warp, expert = 0, chunk;

    __device__ TileSource(const Down& arguments, const ExpertList& experts, int w)
        : a(arguments), list(experts), warp(w), chunk(w) {}
    __device__ __forceinline__ const uint8_t* next() {
        const uint8_t* from = nullptr;
        if (expert < list.count) {
            if (chunk < a.experts.chunks)
                from = a.experts.data + list.expert[expert] * a.experts.expert_bytes +
                       (static_cast<int64_t>(blockIdx.x) * a.experts.chunks + chunk) * chunk_bytes(K);
            chunk += kDownWarps;
            if (chunk - warp >= a.experts.chunks) chunk = warp, ++expert;
        } else if constexpr (K == S) {
            if (chunk < a.shared_chunks) from = shared_chunk(a, chunk, K);
            chunk += kDownWarps;
        }
        return from;
    }
};

template <Kind K>
struct SharedSource {
    const Down& a;
    int chunk;

    __device__ SharedSource(const Down& arguments, int warp) : a(arguments), chunk(warp) {}
    __device__ __forceinline__ const uint8_t* next() {
        const uint8_t* from = chunk < a.shared_chunks ? shared_chunk(a, chunk, K) : nullptr;
        chunk += kDownWarps;
        return from;
    }
};

template <int NT>
__device__ __forceinline__ void add_weighted(float (&sum)[NT][4], const float (&term)[NT][4],
                                             const float* factor, const float* weight, int lane) {
    const int g = lane >> 2, t = lane & 3;
    const float low = factor[g], high = factor[g + 8];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float w = weight[8 * nt + 2 * t + (i & 1)];
            if (w != 0.0f) sum[nt][i] += w * (i < 2 ? low : high) * term[nt][i];
        }
}

__device__ __forceinline__ void fill_uses(Uses& uses, const ExpertList& list, const Down& a) {
    for (int i = threadIdx.x; i < list.count * kFewRows; i += kDownThreads) {
        uses.weight[i / kFewRows][i % kFewRows] = 0;
        uses.pair[i / kFewRows][i % kFewRows] = -1;
        const int64_t tile = static_cast<int64_t>(list.expert[i / kFewRows]) * a.experts.tiles + blockIdx.x;
        uses.factor[i / kFewRows][i % kFewRows] = a.experts.factor[tile * kTileRows + i % kFewRows];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < list.count; e += kDownThreads)
        for (int i = list.first[e]; i < list.first[e + 1]; ++i) {
            const int pair = list.pair[i];
            uses.weight[e][pair / a.used] = __ldcg(a.weights + pair);
            uses.pair[e][pair / a.used] = static_cast<short>(pair);
        }
}

/// Ring, then the rows of routed, then those of shared, then Uses.
template <Kind K, Kind S, int NT>
__host__ __device__ constexpr int down_ring_bytes() {
    const int a = kRingDepth<K, NT> * chunk_bytes(K), b = kRingDepth<S, NT> * chunk_bytes(S);
    return (a > b ? a : b) * kDownWarps;
}

template <Kind S, int NT, typename Source>
__device__ __forceinline__ void multiply_shared(Ring<S, NT>& ring, Source& source, const Down& a,
                                                const bf16* const (&x)[NT], int warp, int lane,
                                                float (&term)[NT][4]) {
    for (int c = warp; c - warp < a.shared_chunks; c += kDownWarps) {
        const uint8_t* chunk = ring.wait();
        if (c < a.shared_chunks) multiply_chunk<S, false>(chunk, x, c * kChunkCols, lane, term);
        ring.release(source, lane);
    }
}

template <Kind K, Kind S, int NT>
__global__ void __launch_bounds__(kDownThreads, 2)
    down_few(Down a, PlainRows<K> routed_rows, PlainRows<S> shared_rows) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ ExpertList list;
    __shared__ float gates[kFewRows], shared_factor[kTileRows];
    const int stride = activation_stride<K>(a.experts.chunks),
              shared_stride = activation_stride<S>(a.shared_chunks);
    bf16* routed = reinterpret_cast<bf16*>(shared + down_ring_bytes<K, S, NT>());
    bf16* shared_in = routed + a.rows * a.used * stride;
    Uses& uses = *reinterpret_cast<Uses*>(shared_in + a.rows * shared_stride);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane >> 2;

    if (!a.settled) wait_for_predecessor();
    list_experts(list, a.groups, a.experts.count, a.rows * a.used);
    TileSource<K, S> source(a, list, warp);
    Ring<K, NT> ring(shared, warp);
    ring.fill(source, lane);
    fill_uses(uses, list, a);
    if (threadIdx.x < kFewRows)
        gates[threadIdx.x] = threadIdx.x < a.rows ? __ldcg(a.shared_gate + threadIdx.x) : 0.0f;
    if (threadIdx.x < kTileRows)
        shared_factor[threadIdx.x] = a.shared.factor[blockIdx.x * kTileRows + threadIdx.x];
    wait_for_predecessor();
    allow_successor();
    const int out_row = blockIdx.x * kTileRows + threadIdx.x % 16, out_column = threadIdx.x / 16;
    const bool writes = out_column < a.rows && out_row < a.experts.rows;
    const float residual = writes ? __ldcg(a.residual + out_column * a.ld + out_row) : 0.0f;
    routed_rows(routed, stride);
    shared_rows(shared_in, shared_stride);
    __syncthreads();

    float sum[NT][4] = {};
    for (int e = 0; e < list.count; ++e) {
        const bf16* x[NT];
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
            x[nt] = routed + max(0, static_cast<int>(uses.pair[e][8 * nt + column])) * stride;
        float term[NT][4] = {};
        for (int c = warp; c - warp < a.experts.chunks; c += kDownWarps) {
            const uint8_t* chunk = ring.wait();
            if (c < a.experts.chunks) multiply_chunk<K, false>(chunk, x, c * kChunkCols, lane, term);
            ring.release(source, lane);
        }
        add_weighted<NT>(sum, term, uses.factor[e], uses.weight[e], lane);
    }
    const bf16* x[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) x[nt] = shared_in + min(8 * nt + column, a.rows - 1) * shared_stride;
    float term[NT][4] = {};
    if constexpr (K == S) {
        multiply_shared<S, NT>(ring, source, a, x, warp, lane, term);
    } else {
        wait_copies<0>();
        __syncwarp();
        SharedSource<S> shared_source(a, warp);
        Ring<S, NT> shared_ring(shared + warp * (down_ring_bytes<K, S, NT>() / kDownWarps), 0);
        shared_ring.fill(shared_source, lane);
        multiply_shared<S, NT>(shared_ring, shared_source, a, x, warp, lane, term);
    }
    add_weighted<NT>(sum, term, shared_factor, gates, lane);

    __syncthreads();  // activations are done with: their memory takes the sums
    float* sums = reinterpret_cast<float*>(routed);
    store_sums<NT>(sums + warp * 128 * NT, sum, lane);
    __syncthreads();
    if (!writes) return;
    const float* from = sums + out_column * 16 + threadIdx.x % 16;
    a.y[out_column * a.ld + out_row] = residual + add_parts(kDownWarps, from, 128 * NT);
}

/// False: the card has too little shared memory, for 1 to 8 rows or for more.
template <Kind K, Kind S>
bool few(Context& c, const Down& a) {
    const PlainRows<K> routed{a.routed, a.width, a.width, a.rows * a.used};
    const PlainRows<S> shared{a.shared_in, a.shared_width, a.shared_width, a.rows};
    const int sums = kDownWarps * 256 * static_cast<int>(sizeof(float));
    const int ring = a.rows <= 8 ? down_ring_bytes<K, S, 1>() : down_ring_bytes<K, S, 2>();
    const auto bytes = [&](int rows) {
        const int activations =
            rows * (a.used * activation_stride<K>(a.experts.chunks) + activation_stride<S>(a.shared_chunks)) *
            2;
        return ring + max(activations + static_cast<int>(sizeof(Uses)), sums);
    };
    if (bytes(max(a.rows, 8)) + static_cast<int>(sizeof(ExpertList)) + 256 > c.shared_bytes) return false;
    const auto kernel = a.rows <= 8 ? down_few<K, S, 1> : down_few<K, S, 2>;
    launch(c, "moe_down", kernel, a.experts.tiles, kDownThreads, bytes(a.rows), a, routed, shared);
    return true;
}

template <Kind K>
bool few_of_shared(Context& c, const Down& a) {
    if (a.shared.kind == Kind::bf16) return few<K, Kind::bf16>(c, a);
    if (a.shared.kind == Kind::fp8) return few<K, Kind::fp8>(c, a);
    return few<K, Kind::nvfp4>(c, a);
}

bool few_of_kind(Context& c, const Down& a) {
    if (a.experts.kind == Kind::bf16) return few_of_shared<Kind::bf16>(c, a);
    if (a.experts.kind == Kind::fp8) return few_of_shared<Kind::fp8>(c, a);
    return few_of_shared<Kind::nvfp4>(c, a);
}

constexpr int kAddThreads = 256;

/// Weighs and adds the terms of one row; a thread 4 columns at a time.
__global__ void __launch_bounds__(kAddThreads) add_terms(Down a, const bf16* terms, int columns) {
    allow_successor();
    wait_for_predecessor();
    const int64_t n = blockIdx.x;
    const bf16* row = terms + n * (a.used + 1) * columns;
    for (int k = threadIdx.x * 4; k < columns; k += kAddThreads * 4) {
        float4 sum = __ldcg(reinterpret_cast<const float4*>(a.residual + n * a.ld + k));
        for (int j = 0; j <= a.used; ++j) {
            const float w = __ldcg(j < a.used ? a.weights + n * a.used + j : a.shared_gate + n);
            const uint2 v =
                __ldcg(reinterpret_cast<const uint2*>(row + static_cast<int64_t>(j) * columns + k));
            const float2 p = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v.x));
            const float2 q = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&v.y));
            sum.x += w * p.x, sum.y += w * p.y, sum.z += w * q.x, sum.w += w * q.y;
        }
        *reinterpret_cast<float4*>(a.y + n * a.ld + k) = sum;
    }
}

void many(Context& c, const Down& a, const Packed& shared, void* terms) {
    const int columns = a.experts.rows;
    gemm_down(c, a.experts, a.routed, a.groups, a.rows, a.used, terms);
    gemm(c, shared, a.shared_in, a.shared_width, a.rows,
         {static_cast<bf16*>(terms) + static_cast<int64_t>(a.used) * columns, (a.used + 1) * int64_t{columns},
          false, nullptr, 0});
    launch(c, "moe_down", add_terms, a.rows, kAddThreads, 0, a, static_cast<const bf16*>(terms), columns);
}

}  // namespace

void moe_down(const Node& node, Context& c) {
    const auto& p = node.params<MoeDownParams>();
    const auto& experts = *static_cast<const PackedExperts*>(p.experts->placed);
    const auto& shared = *static_cast<const Packed*>(p.shared->placed);
    const Tensor &routed = *node.inputs[0], &shared_in = *node.inputs[1];
    const Tensor& y = *node.outputs[0];
    Down a{.experts = experts,
           .shared = shared.part[0],
           .shared_chunks = shared.chunks,
           .routed = routed.as<bf16>(),
           .shared_in = shared_in.as<bf16>(),
           .width = static_cast<int>(routed.shape[2]),
           .shared_width = static_cast<int>(shared_in.shape[1]),
           .ids = node.inputs[2]->as<int>(),
           .groups = node.inputs[5]->as<int>(),
           .weights = node.inputs[3]->as<float>(),
           .shared_gate = node.inputs[4]->as<float>(),
           .residual = node.inputs[6]->as<float>(),
           .rows = static_cast<int>(routed.shape[0]),
           .used = static_cast<int>(routed.shape[1]),
           .y = y.as<float>(),
           .ld = y.stride[0],
           .terms = static_cast<float*>(node.outputs[1]->data),
           .settled = c.settled_groups == node.inputs[5]->as<int>(),
           .chosen = c.chosen_ids == node.inputs[2]->as<int>() ? c.chosen : nullptr,
           .next = {},
           .read = c.chosen_ids != nullptr ? c.sums : nullptr};
    c.chosen_ids = nullptr;
    const bool fp4 = experts.kind == Kind::nvfp4 && a.shared.kind == Kind::nvfp4;
    if (fp4 && a.rows <= kDownFewRows && down_fp4_fits(c, a)) leave_norm(c, y, a.next);
    if (fp4 && down_fp4(c, a)) return;
    clear_sums(c, a);
    if (a.rows <= kFewRows && a.rows * a.used <= kMostPairs && few_of_kind(c, a)) return;
    many(c, a, shared, node.outputs[1]->data);
}

}  // namespace quern::cuda
