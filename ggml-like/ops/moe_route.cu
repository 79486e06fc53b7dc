// moe_route on the GPU.
//   up to 8 rows between a linear_add and a moe_gate_up that can do it: nothing (cuda/route_work.cuh)
//   other few rows: every block normalises x for itself and makes the logits of its tiles
//     (cuda/dense_rows.cuh); the block that ends last chooses experts, a warp a row, and groups the pairs
//   17 to 64 rows: norm, tiled product, one kernel that chooses and groups
//   many rows: norm, tiled product, a warp a row, a block an expert
// Limit of the few-row kernel: latency (norm, sums, one ticket, top-k).
#include "ggml-like/ops/moe_route.h"

#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/gemm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe.h"
#include "ggml-like/cuda/norm_rows.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/prologues.cuh"
#include "ggml-like/cuda/route.cuh"
#include "ggml-like/ops/moe_down.h"
#include "ggml-like/ops/moe_gate_up.h"

namespace quern::cuda {
namespace {

struct Route {
    const float *x, *norm;
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

struct StoreLogits {
    static constexpr bool kPaired = false;
    using Loaded = float;
    float* logits;
    int64_t ld;

    __device__ __forceinline__ float load(int, int) const { return 0; }
    __device__ __forceinline__ void store(int row, int n, float, float sum) const {
        logits[n * ld + row] = sum;
    }
};

/// One warp, row n: its experts, also into `ids`.
__device__ __forceinline__ void choose_row(const Route& r, int n, int* ids) {
    const float* logits = r.logits + n * r.logits_ld;
    float* weights = r.weights + static_cast<int64_t>(n) * r.used;
    if (r.experts <= 256)
        choose_experts<8>(logits, r.experts, r.used, ids, weights, r.shared + n);
    else
        choose_experts<kMostExperts / 32>(logits, r.experts, r.used, ids, weights, r.shared + n);
}

/// Block b writes h of rows b, b + grid, ..., from where the product had them.
__device__ __forceinline__ void write_rows(const Route& r, const bf16* rows, int stride) {
    for (int n = blockIdx.x; n < r.rows; n += gridDim.x)
        for (int k = 2 * threadIdx.x; k < r.columns; k += 2 * kThreads)
            *reinterpret_cast<uint32_t*>(r.h + static_cast<int64_t>(n) * r.columns + k) =
                *reinterpret_cast<const uint32_t*>(rows + n * stride + activation_place<Kind::bf16>(k));
}

/// The block that ends last chooses for all rows. kEach: experts of a lane.
template <int kEach>
__device__ __forceinline__ void choose_last(const Route& r) {
    __shared__ __align__(16) int ids[kFewRows * kMostUsed + 4];
    if (!last_block(r.counter, gridDim.x)) return;
    const int lane = threadIdx.x % 32;
    for (int n = threadIdx.x / 32; n < r.rows; n += kWarps) {
        int* mine = ids + n * r.used;
        choose_experts<kEach>(r.logits + n * r.logits_ld, r.experts, r.used, mine, r.weights + n * r.used,
                              r.shared + n);
        if (lane < r.used) r.ids[n * r.used + lane] = mine[lane];
    }
    if (threadIdx.x < 4) ids[r.rows * r.used + threadIdx.x] = kNoExpert;
    __syncthreads();
    static_assert(kMostExperts <= kThreads && kFewRows * kMostUsed <= kThreads, "as group_few wants");
    group_few(ids, r.rows * r.used, r.experts, r.groups);
}

/// kEach: experts of a lane.
template <int NT, bool kDeep, int kTogether, int kEach>
__global__ void __launch_bounds__(kThreads, 3 - NT)
    route_few(Route r, Part part, NormRows<Kind::bf16, kTogether> prologue) {
    dense_rows<Kind::bf16, NT, kDeep, kTogether == 1, false>(part, r.chunks, r.rows, prologue,
                                                             StoreLogits{r.logits, r.logits_ld});
    extern __shared__ __align__(128) uint8_t shared[];
    write_rows(r, dense_activations<Kind::bf16, NT, kDeep, false>(shared),
               activation_stride<Kind::bf16>(r.chunks));
    choose_last<kEach>(r);
}

template <int NT, bool kDeep, int kTogether>
void few(Context& c, const Route& r, const Packed& w) {
    const NormRows<Kind::bf16, kTogether> prologue{r.x,   r.norm,           r.columns, r.rows,
                                                   r.eps, 1.0f / r.columns, {}};
    const auto kernel = r.experts <= 256 ? route_few<NT, kDeep, kTogether, 8>
                                         : route_few<NT, kDeep, kTogether, kMostExperts / 32>;
    launch(c, "moe_route", kernel, tile_groups(w.part[0].tiles, w.chunks), kThreads,
           dense_shared_bytes<Kind::bf16, NT, kDeep>(r.rows, w.chunks), r, w.part[0], prologue);
}

constexpr int kStepThreads = 512, kStepBlocks = 16, kStepPairs = 512;  // of a decoding step

/// A warp a row; then the block that ends last makes groups: a bit a pair that chose an expert, so a pair's
/// place is a count of bits.
__global__ void __launch_bounds__(kStepThreads) choose_and_group(Route r) {
    __shared__ unsigned chose[kStepPairs / 32][kMostExperts];
    __shared__ int offset[kMostExperts], sums[kStepThreads / 32];
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, pairs = r.rows * r.used;
    allow_successor();
    for (int i = tid; i < kStepPairs / 32 * kMostExperts; i += kStepThreads) (&chose[0][0])[i] = 0;
    wait_for_predecessor();
    for (int n = blockIdx.x + warp * gridDim.x; n < r.rows; n += gridDim.x * (kStepThreads / 32))
        choose_row(r, n, r.ids + n * r.used);
    if (!last_block(r.counter, gridDim.x)) return;

    const int id = tid < pairs ? __ldcg(r.ids + tid) : 0;
    if (tid < pairs) atomicOr(&chose[tid / 32][id], 1u << tid % 32);
    __syncthreads();
    int own = 0;
    if (tid < r.experts)
        for (const auto& word : chose) own += __popc(word[tid]);
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    const int before =
        static_cast<int>(__reduce_add_sync(0xffffffffu, lane < warp ? sums[lane] : 0)) + sum - own;
    if (tid < r.experts) r.groups[tid] = offset[tid] = before;
    if (tid == 0) r.groups[r.experts] = pairs;
    __syncthreads();
    if (tid >= pairs) return;
    int place = offset[id] + __popc(chose[tid / 32][id] & ((1u << tid % 32) - 1));
    for (int word = 0; word < tid / 32; ++word) place += __popc(chose[word][id]);
    r.groups[r.experts + 1 + place] = tid;
}
static_assert(kMostExperts <= kStepThreads && kStepPairs <= kStepThreads,
              "a thread an expert, a thread a pair");

constexpr int kManyThreads = 256;

/// A warp a row.
__global__ void __launch_bounds__(kManyThreads) choose_many(Route r) {
    allow_successor();
    wait_for_predecessor();
    const int n = blockIdx.x * (kManyThreads / 32) + threadIdx.x / 32;
    if (n >= r.rows) return;
    choose_row(r, n, r.ids + static_cast<int64_t>(n) * r.used);
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

static_assert(kLeftRows == kAheadRows);

bool leave_route(Context& c, const Tensor& x, RouteWork& work) {
    if (c.after_count < 3 || c.after[0].op != &kMoeRoute || c.after[1].op != &kMoeGateUp ||
        c.after[2].op != &kMoeDown)
        return false;
    const Node &route = c.after[0], &gate_up = c.after[1], &down = c.after[2];
    const Tensor &h = *route.outputs[0], &ids = *route.outputs[1];
    const bool chained = route.inputs[0] == &x && gate_up.inputs[0] == &h && gate_up.inputs[1] == &ids &&
                         gate_up.inputs[2] == route.outputs[4] && down.inputs[2] == &ids;
    if (!chained || h.place != Place::scratch || x.shape[0] > kDownFewRows) return false;
    const auto& p = route.params<MoeRouteParams>();
    const Packed& w = *static_cast<const Packed*>(p.router->placed);
    const int columns = static_cast<int>(x.shape[1]);
    if (w.parts != 1 || w.part[0].kind != Kind::bf16 || w.rows > kLeftLogits || !leaves_tiles(columns) ||
        !gate_up_chooses(c, gate_up))
        return false;
    work = {.router = w.part[0],
            .chunks = w.chunks,
            .logits = w.rows,
            .x = {route.inputs[1]->as<float>(), h.as<bf16>(), columns, c.sums},
            .chosen = c.chosen,
            .used = p.used};
    c.left = {.norm = {&route, c.sums, columns / kTileRows, 1.0f / static_cast<float>(columns), p.eps},
              .experts = w.rows - 1,
              .ids = ids.as<int>(),
              .weights = route.outputs[2]->as<float>(),
              .shared = route.outputs[3]->as<float>(),
              .groups = route.outputs[4]->as<int>(),
              .chosen = c.chosen};
    return true;
}

void moe_route(const Node& node, Context& c) {
    if (c.left.norm.node == &node) return;
    const Tensor &x = *node.inputs[0], &norm = *node.inputs[1];
    const auto& p = node.params<MoeRouteParams>();
    const Packed& w = *static_cast<const Packed*>(p.router->placed);
    const int rows = static_cast<int>(x.shape[0]);
    const Route r{.x = x.as<float>(),
                  .norm = norm.as<float>(),
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
    const bool one_kernel = rows <= kFewRows && w.parts == 1 && w.part[0].kind == Kind::bf16;
    if (one_kernel &&
        dense_fits<Kind::bf16>(c, max(rows, 8), w.chunks)) {  // 1 to 8 rows the same way: the same bits
        const auto run = dense_shape<Kind::bf16>(c, rows, w.chunks, [&]<int NT, bool kDeep>() {
            if constexpr (NT == 1)
                return rows == 1 ? few<NT, kDeep, 1> : few<NT, kDeep, 4>;
            else
                return few<NT, kDeep, 4>;
        });
        return run(c, r, w);
    }
    norm_rows(c, r.x, r.norm, rows, r.columns, r.eps, r.h);
    gemm(c, w, r.h, r.columns, rows, {r.logits, r.logits_ld, true, nullptr, 0});
    if (rows * r.used <= kStepPairs)
        return launch(c, "moe_route", choose_and_group, min(kStepBlocks, rows), kStepThreads, 0, r);
    launch(c, "moe_route", choose_many, (rows + 7) / 8, kManyThreads, 0, r);
    launch(c, "moe_route", group_many, r.experts, kManyThreads, 0, r);
}

}  // namespace quern::cuda
