// moe_down on the GPU.
//   answers, NVFP4: cuda/moe/down_fp4.cu
//   answers, other formats, up to 16 rows at a time: block = one tile of 16 output rows, all terms of it; 8 warps split the
//     columns of every expert in turn. Experts come in rising order of id, so a row's sum does not depend on its
//     neighbours. No atomics, no second kernel.
//   prompts: grouped tiled product (cuda/linear/gemm.h; of up to 64 rows NVFP4 through cuda/moe/down_fp4.cu, which adds in the same
//     order) writes the terms in BF16, then one kernel weighs and adds them and does the next norm's part.
// Traffic of few rows: the weights of each needed expert once.
#include "ggml-like/ops/moe_down.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/moe/expert_rows.cuh"
#include "ggml-like/cuda/moe/gemm_experts.h"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;
using namespace moe;

namespace {

constexpr int kDownWarps = 8, kDownThreads = kDownWarps * 32;

static_assert(kDownThreads == 16 * kFewRows, "a thread an output");

/// Row n's weight and pair for each listed expert.
struct Uses {
    float weight[kMaxPairs][kFewRows];
    float factor[kMaxPairs][kTileRows];  // of the block's tile
    short pair[kMaxPairs][kFewRows];     // -1: the row does not use it
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

/// ChunkRing, then the rows of routed, then those of shared, then Uses.
template <Kind K, Kind S, int NT>
__host__ __device__ constexpr int down_ring_bytes() {
    const int a = kRingDepth<K, NT> * chunk_bytes(K), b = kRingDepth<S, NT> * chunk_bytes(S);
    return (a > b ? a : b) * kDownWarps;
}

template <Kind S, int NT, typename Source>
__device__ __forceinline__ void multiply_shared(ChunkRing<S, NT>& ring, Source& source, const Down& a,
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
    const int stride = activation_stride(K, a.experts.chunks),
              shared_stride = activation_stride(S, a.shared_chunks);
    bf16* routed = reinterpret_cast<bf16*>(shared + down_ring_bytes<K, S, NT>());
    bf16* shared_in = routed + a.rows * a.used * stride;
    Uses& uses = *reinterpret_cast<Uses*>(shared_in + a.rows * shared_stride);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = lane >> 2;

    if (a.ready == nullptr) wait_for_predecessor();
    if (a.ready != nullptr) {
        if (threadIdx.x == 0) published(a.ready), __threadfence();
        __syncthreads();
    }
    list_experts(list, a.groups, a.experts.count, a.first_pair, a.rows * a.used);
    TileSource<K, S> source(a, list, warp);
    ChunkRing<K, NT> ring(shared, warp);
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
    const float norm = writes ? a.next.norm[out_row] : 0.0f;
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
        ChunkRing<S, NT> shared_ring(shared + warp * (down_ring_bytes<K, S, NT>() / kDownWarps), 0);
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
    const float y = residual + add_splits(kDownWarps, from, 128 * NT);
    a.y[out_column * a.ld + out_row] = y;
    defer_column(a.next, out_column, out_row, y, norm);
}

template <Kind K, Kind S, int NT>
int few_bytes(const Down& a) {
    const int sums = kDownWarps * 256 * static_cast<int>(sizeof(float));
    const int activations =
        a.rows * (a.used * activation_stride(K, a.experts.chunks) + activation_stride(S, a.shared_chunks)) *
        2;
    return down_ring_bytes<K, S, NT>() + max(activations + static_cast<int>(sizeof(Uses)), sums);
}

template <Kind K, Kind S>
void few(Context& c, const Down& a) {
    const PlainRows<K> routed{a.routed, a.width, a.width, a.rows * a.used};
    const PlainRows<S> shared{a.shared_in, a.shared_width, a.shared_width, a.rows};
    if (a.rows <= 8)
        launch(c, "moe_down few 8", down_few<K, S, 1>, a.experts.tiles, kDownThreads, few_bytes<K, S, 1>(a),
               a, routed, shared);
    else
        launch(c, "moe_down few 16", down_few<K, S, 2>, a.experts.tiles, kDownThreads, few_bytes<K, S, 2>(a),
               a, routed, shared);
}

template <Kind K>
void few_of_shared(Context& c, const Down& a) {
    if (a.shared.kind == Kind::bf16) return few<K, Kind::bf16>(c, a);
    if (a.shared.kind == Kind::fp8) return few<K, Kind::fp8>(c, a);
    few<K, Kind::nvfp4>(c, a);
}

void few(Context& c, const Down& a) {
    if (a.experts.kind == Kind::bf16) return few_of_shared<Kind::bf16>(c, a);
    if (a.experts.kind == Kind::fp8) return few_of_shared<Kind::fp8>(c, a);
    few_of_shared<Kind::nvfp4>(c, a);
}

constexpr int kAddThreads = 256;

/// Weighs and adds the terms of one row of a prompt, a thread 4 columns at a time; then h and squares of it.
__global__ void __launch_bounds__(kAddThreads) add_prompt_terms(Down a) {
    allow_successor();
    wait_for_predecessor();
    const int64_t n = blockIdx.x;
    const int columns = a.experts.rows;
    const bf16* row = static_cast<const bf16*>(a.terms) + n * (a.used + 1) * columns;
    float squares = 0;
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
        const float4 norm = *reinterpret_cast<const float4*>(a.next.norm + k);
        *reinterpret_cast<uint2*>(a.next.h + n * columns + k) =
            make_uint2(pack_bf16(sum.x * norm.x, sum.y * norm.y), pack_bf16(sum.z * norm.z, sum.w * norm.w));
        squares += sum.x * sum.x + sum.y * sum.y + sum.z * sum.z + sum.w * sum.w;
    }
    write_squares<kAddThreads>(a.next, n, squares);
}

void prompt(Context& c, const Down& a, const Packed& shared) {
    const int64_t columns = a.experts.rows;
    if (down_streams(c, shape_of(a))) {
        down_fp4_prompt_terms(c, a);
    } else {
        gemm_down(c, a.experts, a.routed, a.groups, a.rows, a.used, a.terms);
        gemm(c, shared, a.shared_in, a.shared_width, a.rows,
             {.y = static_cast<bf16*>(a.terms) + a.used * columns, .ld = (a.used + 1) * columns},
             Split::never);
    }
    launch(c, "add terms", add_prompt_terms, a.rows, kAddThreads, 0, a);
}

/// Rows [first, first + count).
Down slice_of(const Down& a, int first, int count) {
    Down d = a;
    if (a.rows == 1) d.ready = nullptr;  // what comes there of one row says nothing of groups
    d.rows = count;
    d.first_pair = first * a.used;
    d.routed += static_cast<int64_t>(first) * a.used * a.width;
    d.shared_in += static_cast<int64_t>(first) * a.shared_width;
    d.weights += first * a.used, d.shared_gate += first;
    d.residual += first * a.ld, d.y += first * a.ld;
    d.next = a.next.from_row(first);
    return d;
}

}  // namespace

void moe_down(const Node& node, Context& c) {
    const auto& p = node.params<MoeDownParams>();
    const auto& experts = *static_cast<const PackedExperts*>(p.experts->placed);
    const auto& shared = *static_cast<const Packed*>(p.shared->placed);
    const Tensor &routed = *node.inputs[0], &shared_in = *node.inputs[1];
    const Tensor& y = *node.outputs[0];
    const Down a{.experts = experts,
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
                 .residual = node.inputs[7]->as<float>(),
                 .rows = static_cast<int>(routed.shape[0]),
                 .used = static_cast<int>(routed.shape[1]),
                 .y = y.as<float>(),
                 .ld = y.stride[0],
                 .terms = node.outputs[3]->data,
                 .ready = p.kind == StepKind::prompt ? nullptr : node.inputs[6]->as<uint64_t>(),
                 .next = defer_of(*node.inputs[8], *node.outputs[1], *node.outputs[2])};
    if (p.kind == StepKind::prompt) return prompt(c, a, shared);
    const MixtureProduct product = choose_down(c, shape_of(a));
    if (product != MixtureProduct::slices) return down_fp4(c, product, a);
    for (int first = 0; first < a.rows; first += kFewRows)
        few(c, slice_of(a, first, min(a.rows - first, kFewRows)));
}

}  // namespace quern::cuda
