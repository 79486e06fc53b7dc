// The choice of experts, and their groups, where no kernel of gate and up chooses (gate_up_fp4.cu).
//
//   up to 512 pairs   one kernel: eight blocks, a warp a row; one of them makes groups
//   more (prompts)    a warp a row; then a block an expert, which reads all pairs twice
//
// Shared memory: for groups a bit for each pair and expert (32 KB). Bound: latency. Measured with 64 rows, as part of
// the router's 19.1 us; with one block instead of 16 that took 25.0 (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/moe/route_work.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

__device__ __forceinline__ float logit_at(const Logits& l, int64_t row, int e) {
    return l.floats != nullptr ? __ldcg(l.floats + row * l.pitch + e) : read_sum(l.sums + row * l.pitch + e);
}

/// One warp: the choice of row n, its weights, the gate of the shared expert, the norm's factor. kEach: experts of a
/// lane, at most.
template <int kEach>
__device__ __forceinline__ void choose_row(const Choice& c, int n) {
    const int lane = threadIdx.x % 32;
    const float squares = load_squares(c.scale, n), gate = logit_at(c.logits, n, c.experts);
    int* ids = c.ids + static_cast<int64_t>(n) * c.used;
    const uint32_t bits =
        choose_in_order<kEach>([&](int e) { return logit_at(c.logits, n, e); }, c.experts, c.used, ids);
    const float factor = norm_factor(c.scale, squares), weight = weight_of(bits, c.used, factor);
    const float own_gate = gate_of(gate * factor);
    __syncwarp();
    if (lane < c.used) c.weights[static_cast<int64_t>(n) * c.used + lane] = weight;
    if (lane == 0) c.shared_gate[n] = own_gate, c.factor[n] = factor;
    if (c.rows > 1 || c.ready == nullptr) return;
    if (lane < c.used) publish(c.ready + lane, {ids[lane], weight});
    if (lane == 0) publish(c.ready + c.used, {0, own_gate});
}
__device__ __forceinline__ void choose_row(const Choice& c, int n) {
    if (c.experts <= 256)
        choose_row<8>(c, n);
    else
        choose_row<kMaxExperts / 32>(c, n);
}

constexpr int kStepThreads = 512, kStepBlocks = 8, kStepPairs = 512;

/// Once all blocks have chosen: true in one of them. A cluster needs no counter.
__device__ __forceinline__ bool makes_groups(unsigned* counter) {
#if __CUDA_ARCH__ >= 900
    cluster_barrier();
    return cluster_rank() == 0;
#else
    return last_block(counter, gridDim.x);
#endif
}

/// A warp a row; then one block makes groups.
__global__ void CLUSTER_OF(kStepBlocks) __launch_bounds__(kStepThreads)
    choose_and_group(Choice c, unsigned* counter) {
    __shared__ unsigned chose[kStepPairs / 32 * kMaxExperts];
    __shared__ int offset[kMaxExperts], sums[kStepThreads / 32];
    const int tid = threadIdx.x, warp = tid / 32, pairs = c.rows * c.used;
    allow_successor();
    for (int i = tid; i < kStepPairs / 32 * kMaxExperts; i += kStepThreads) chose[i] = 0;
    wait_for_predecessor();
    for (int n = blockIdx.x + warp * gridDim.x; n < c.rows; n += gridDim.x * (kStepThreads / 32))
        choose_row(c, n);
    if (!makes_groups(counter)) return;

    const int id = tid < pairs ? __ldcg(c.ids + tid) : 0;
    group_by_bits(chose, offset, sums, id, pairs, c.experts, c.groups);
    if (c.ready == nullptr || c.rows == 1) return;
    __syncthreads();
    if (tid == 0) {
        __threadfence();  // what all blocks wrote comes before the flag
        publish(c.ready, {0, 0});
    }
}
static_assert(kMaxExperts <= kStepThreads && kStepPairs <= kStepThreads,
              "a thread an expert, a thread a pair");

constexpr int kManyThreads = 256;

/// A warp a row.
__global__ void __launch_bounds__(kManyThreads) choose_many(Choice c) {
    allow_successor();
    wait_for_predecessor();
    const int n = blockIdx.x * (kManyThreads / 32) + threadIdx.x / 32;
    if (n < c.rows) choose_row(c, n);
}

constexpr int kGroupThreads = 1024;

/// A block an expert, a run of pairs a thread: it counts the run's pairs of the expert and of those before it, then writes
/// its own in order.
__global__ void __launch_bounds__(kGroupThreads) group_many(Choice c) {
    constexpr int kWarps = kGroupThreads / 32, kTogether = 4;
    static_assert(kWarps == 32, "a lane a warp");
    __shared__ int own_of[kWarps], smaller_of[kWarps];
    allow_successor();
    wait_for_predecessor();
    const int e = blockIdx.x, pairs = c.rows * c.used, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = (pairs + kTogether * kGroupThreads - 1) / (kTogether * kGroupThreads) * kTogether,
              begin = threadIdx.x * run, end = min(begin + run, pairs);
    // Four ids from pair i on; beyond the end none that exists.
    const auto ids_at = [&](int i, int(&id)[kTogether]) {
        if (i + kTogether <= end) {
            const int4 v = __ldcg(reinterpret_cast<const int4*>(c.ids + i));
            id[0] = v.x, id[1] = v.y, id[2] = v.z, id[3] = v.w;
            return;
        }
#pragma unroll
        for (int j = 0; j < kTogether; ++j) id[j] = i + j < end ? __ldcg(c.ids + i + j) : kMaxExperts;
    };
    int own = 0, smaller = 0;
#pragma unroll 4
    for (int i = begin; i < end; i += kTogether) {
        int id[kTogether];
        ids_at(i, id);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) own += id[j] == e, smaller += id[j] < e;
    }
    int place = own;  // of the warp's runs up to this one
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, place, d);
        if (lane >= d) place += other;
    }
    smaller = static_cast<int>(__reduce_add_sync(0xffffffffu, smaller));
    if (lane == 31) own_of[warp] = place, smaller_of[warp] = smaller;
    __syncthreads();
    const int first = static_cast<int>(__reduce_add_sync(0xffffffffu, smaller_of[lane]));
    place += first - own + static_cast<int>(__reduce_add_sync(0xffffffffu, lane < warp ? own_of[lane] : 0));
    if (threadIdx.x == 0) {
        c.groups[e] = first;
        if (e == 0) c.groups[c.experts] = pairs;
    }
    if (own == 0) return;
    for (int i = begin; i < end; i += kTogether) {
        int id[kTogether];
        ids_at(i, id);
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
            if (id[j] == e) c.groups[c.experts + 1 + place++] = i + j;
    }
}

}  // namespace

void choose_experts(Context& context, const Choice& c) {
    if (c.experts > kMaxExperts || c.used > kMaxUsed) unsupported("moe_gate_up", "so many experts");
    if (c.rows * c.used <= kStepPairs)
        return launch(context, "choose_experts", choose_and_group, kStepBlocks, kStepThreads, 0, c,
                      context.counters);
    launch(context, "choose_experts", choose_many, (c.rows + 7) / 8, kManyThreads, 0, c);
    launch(context, "group_pairs", group_many, c.experts, kGroupThreads, 0, c);
}

}  // namespace quern::cuda::moe
