// The choice of experts, and their groups, where no kernel of gate and up chooses (gate_up_fp4.cu).
//
//   up to 512 pairs   one kernel: eight blocks, a warp a row; one of them makes groups
//   more (prompts)    a warp a row, 8 or 32 rows a block, which counts who chose each expert; then 32 rows a block, which adds up
//                     all counts (32 KB for 1,024 rows and 256 experts) and places its own pairs
//
// Shared memory: for groups a bit for each pair and expert (32 KB). Bound: latency. Measured with 64 rows, as part of
// the router's 19.1 us; with one block instead of 16 that took 25.0 (H200, early in 2026-11; a row's choice has become 7 us shorter).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/choice_list.cuh"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/moe/route_work.cuh"
#include "ggml-like/cuda/ptx/cluster.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// What a lane got of a row's choice: in lane j number j.
struct InOrder {
    uint32_t key = 0;
    int id = 0;
};

/// One warp: the `used` best experts. logits: of the lane's experts, lane + 32 i. No branches, since warps that part and meet
/// again in each round take longer than what they leave out.
template <int kEach>
__device__ __forceinline__ InOrder choose_in_order(const float (&logits)[kEach], int experts, int used) {
    static_assert((kEach & (kEach - 1)) == 0, "maxima are found in halves");
    const int lane = threadIdx.x % 32;
    uint32_t key[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) key[i] = lane + 32 * i < experts ? ordered_bits(logits[i]) : 0;
    InOrder mine;
#pragma unroll 1
    for (int j = 0; j < used; ++j) {
        uint32_t most[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) most[i] = key[i];
#pragma unroll
        for (int n = kEach / 2; n > 0; n /= 2)
#pragma unroll
            for (int i = 0; i < n; ++i) most[i] = max(most[i], most[i + n]);
        const uint32_t best = __reduce_max_sync(0xffffffffu, most[0]);
        unsigned own = 0xffffu;
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) own = key[i] == best ? lane + 32 * i : own;
        const int id = static_cast<int>(__reduce_min_sync(0xffffffffu, own));
        if (j == lane) mine = {best, min(id, experts - 1)};
#pragma unroll
        for (int i = 0; i < kEach; ++i) key[i] = id == lane + 32 * i ? 0 : key[i];
    }
    return mine;
}

/// As group_few for more pairs, by at least as many threads as pairs and as experts. A pair's place is a count of bits: of
/// each 32 pairs and expert those that chose it. `id`: of the thread's pair. chose: [pairs / 32 rounded up][experts],
/// zeros; offset: [experts]; sums: [warps]. Returns the place of the thread's pair.
__device__ __forceinline__ int group_by_bits(unsigned* chose, int* offset, int* sums, int id, int pairs,
                                             int experts, int* groups) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, words = (pairs + 31) / 32;
    if (tid < pairs) atomicOr(chose + warp * experts + id, 1u << lane);
    __syncthreads();
    int own = 0;
    if (tid < experts)
        for (int word = 0; word < words; ++word) own += __popc(chose[word * experts + tid]);
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
    if (tid < experts) groups[tid] = offset[tid] = before;
    if (tid == 0) groups[experts] = pairs;
    __syncthreads();
    if (tid >= pairs) return 0;
    int place = offset[id] + __popc(chose[warp * experts + id] & ((1u << lane) - 1));
    for (int word = 0; word < warp; ++word) place += __popc(chose[word * experts + id]);
    groups[experts + 1 + place] = tid;
    return place;
}

/// One warp: of a row's sums those of experts lane + 32 i, 0 of those that do not exist. All loads are under way before the first is used.
template <int kEach>
__device__ __forceinline__ void read_sums(const int64_t* sums, int experts, float (&logits)[kEach]) {
    const auto* from = reinterpret_cast<const long long*>(sums) + threadIdx.x % 32;
    long long fixed[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        fixed[i] = static_cast<int>(threadIdx.x) % 32 + 32 * i < experts ? __ldcg(from + 32 * i) : 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        logits[i] = sum_of(fixed[i]);
        asm volatile(
            ""
            : "+f"(logits[i]));  // else a branch leaves out what no expert needs, eight times in a row
    }
}

/// One warp: a row's logits of experts lane + 32 i, 0 of those that do not exist. All loads are under way before the first is used.
template <int kEach>
__device__ __forceinline__ void load_logits(const Logits& l, int64_t row, int experts,
                                            float (&logits)[kEach]) {
    if (l.floats == nullptr) return read_sums(l.sums + row * l.pitch, experts, logits);
    const float* from = l.floats + row * l.pitch + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kEach; ++i)
        logits[i] = static_cast<int>(threadIdx.x) % 32 + 32 * i < experts ? __ldcg(from + 32 * i) : 0.0f;
}
__device__ __forceinline__ float logit_at(const Logits& l, int64_t row, int e) {
    return l.floats != nullptr ? __ldcg(l.floats + row * l.pitch + e) : read_sum(l.sums + row * l.pitch + e);
}

/// One warp: the choice of row n, its weights, the gate of the shared expert, the norm's factor. kEach: experts of a
/// lane, at most. Returns in lane j < used the id of number j.
template <int kEach>
__device__ __forceinline__ int choose_row(const Choice& c, int n) {
    const int lane = threadIdx.x % 32;
    float logits[kEach];
    load_logits(c.logits, n, c.experts, logits);
    const float gate = logit_at(c.logits, n, c.experts), squares = load_squares(c.scale, n);
    const InOrder own = choose_in_order(logits, c.experts, c.used);
    const float factor = norm_factor(c.scale, squares), weight = weight_of(own.key, c.used, factor);
    const float own_gate = gate_of(gate * factor);
    const int64_t to = static_cast<int64_t>(n) * c.used + lane;
    if (lane < c.used) c.ids[to] = own.id, c.weights[to] = weight;
    if (lane == 0) c.shared_gate[n] = own_gate, c.factor[n] = factor;
    if (c.rows == 1 && c.ready != nullptr) {
        if (lane < c.used) publish(c.ready + lane, {own.id, weight});
        if (lane == 0) publish(c.ready + c.used, {0, own_gate});
    }
    return own.id;
}
__device__ __forceinline__ int choose_row(const Choice& c, int n) {
    return c.experts <= 256 ? choose_row<8>(c, n) : choose_row<kMaxExperts / 32>(c, n);
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
    __shared__ ChoiceList list;
    const int tid = threadIdx.x, warp = tid / 32, pairs = c.rows * c.used;
    allow_successor();
    for (int i = tid; i < kStepPairs / 32 * kMaxExperts; i += kStepThreads) chose[i] = 0;
    wait_for_predecessor();
    for (int n = blockIdx.x + warp * gridDim.x; n < c.rows; n += gridDim.x * (kStepThreads / 32))
        choose_row(c, n);
    if (!makes_groups(counter)) return;

    const int id = tid < pairs ? __ldcg(c.ids + tid) : 0;
    const int place = group_by_bits(chose, offset, sums, id, pairs, c.experts, c.groups);
    if (c.places != nullptr && tid < pairs) c.places[tid] = place;
    if (c.ready == nullptr || c.rows == 1) return;
    __syncthreads();
    if (c.rows <= kFewStepRows && c.used <= kMaxChoiceUsed) {
        tell_choices(c, list);
    } else if (tid == 0) {
        __threadfence();  // what all blocks wrote comes before the flag
        publish(c.ready, {0, 0});
    }
}
static_assert(kStepPairs == kGroupPairs);
static_assert(kMaxExperts <= kStepThreads && kStepPairs <= kStepThreads,
              "a thread an expert, a thread a pair");

/// Of a block that chooses, a warp each. With more of them, blocks that make groups have fewer counts to add up.
constexpr int choice_rows(int rows) { return rows > 2048 ? 32 : 8; }
constexpr int kBlockRows = 32;            // of a block that makes groups
constexpr int kMaxGroupedRows = 1 << 16;  // so that 16 bits hold a thread's counts
constexpr int kManyThreads = 1024;        // of a block that makes groups; of one that chooses, at most

/// Counts of blocks: [blocks][words] of four bytes each, how many of the block's rows chose expert 4 w + i.
__host__ __device__ constexpr int count_words(int experts) {
    return experts <= 128 ? 32 : experts <= 256 ? 64 : kMaxExperts / 4;
}

/// A warp a row, and how many of the block's rows chose each expert, eight bits in `chose`.
__global__ void __launch_bounds__(kManyThreads) choose_many(Choice c) {
    __shared__ unsigned chose[kMaxExperts / 4];
    allow_successor();
    const int tid = threadIdx.x, lane = tid % 32, n = static_cast<int>(blockIdx.x * blockDim.x + tid) / 32,
              words = count_words(c.experts);
    if (tid < kMaxExperts / 4) chose[tid] = 0;
    wait_for_predecessor();
    __syncthreads();
    if (n < c.rows) {
        const int e = choose_row(c, n);
        if (lane < c.used) atomicAdd(chose + e / 4, 1u << (e % 4 * 8));
    }
    __syncthreads();
    if (tid < words) c.counts[blockIdx.x * words + tid] = chose[tid];
}

/// A block the pairs of 32 rows: into groups. each: rows of a block that counted. A pair comes behind all smaller experts' pairs, those of its expert in
/// the blocks before, and those of the block's rows before its own.
__global__ void __launch_bounds__(kManyThreads) group_many(Choice c, int each) {
    __shared__ unsigned rows[kMaxExperts];
    __shared__ int all[kMaxExperts], before[kMaxExperts], sums[kMaxExperts / 32];
    allow_successor();
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, block = blockIdx.x,
              words = count_words(c.experts), pairs = min(kBlockRows, c.rows - block * kBlockRows) * c.used;
    if (tid < kMaxExperts) rows[tid] = 0, all[tid] = 0, before[tid] = 0;
    wait_for_predecessor();
    __syncthreads();
    const int first = block * kBlockRows * c.used, id = tid < pairs ? __ldcg(c.ids + first + tid) : 0;
    const int row = quotient(tid, c.used);
    if (tid < pairs) atomicOr(rows + id, 1u << row);

    const int word = tid & (words - 1), by = kManyThreads / words, choices = (c.rows + each - 1) / each;
    uint32_t sum[2] = {}, earlier[2] = {};  // of experts 4 word and + 2, of + 1 and + 3, 16 bits each
#pragma unroll 4
    for (int b = tid / words; b < choices; b += by) {
        const uint32_t four = __ldcg(c.counts + b * words + word);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t two = (four >> (8 * i)) & 0x00ff00ffu;
            sum[i] += two;
            if (b * each < block * kBlockRows) earlier[i] += two;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int shift = i / 2 * 16;
        atomicAdd(all + 4 * word + i, static_cast<int>(sum[i % 2] >> shift & 0xffffu));
        atomicAdd(before + 4 * word + i, static_cast<int>(earlier[i % 2] >> shift & 0xffffu));
    }
    __syncthreads();
    const int own = tid < kMaxExperts ? all[tid] : 0;
    int place = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, place, d);
        if (lane >= d) place += other;
    }
    if (lane == 31 && tid < kMaxExperts) sums[warp] = place;
    __syncthreads();
    if (tid < kMaxExperts) {
        place -= own;
        place += static_cast<int>(__reduce_add_sync(0xffffffffu, lane < warp ? sums[lane & 15] : 0));
        before[tid] += place;
        if (block == 0 && tid < c.experts) c.groups[tid] = place;
        if (block == 0 && tid == 0) c.groups[c.experts] = c.rows * c.used;
    }
    __syncthreads();
    if (tid >= pairs) return;
    const int place_of_pair = before[id] + __popc(rows[id] & ((1u << row) - 1));
    c.groups[c.experts + 1 + place_of_pair] = first + tid;
    if (c.places != nullptr) c.places[first + tid] = place_of_pair;
}
static_assert(kMaxExperts / 32 <= 16 && kMaxUsed * kBlockRows <= kManyThreads, "a thread a pair");

}  // namespace

void choose_experts(Context& context, const Choice& c) {
    if (c.experts > kMaxExperts || c.used > kMaxUsed) unsupported("moe_gate_up", "so many experts");
    if (c.rows * c.used <= kStepPairs)
        return launch(context, "choose_experts", choose_and_group, kStepBlocks, kStepThreads, 0, c,
                      context.counters);
    const int each = choice_rows(c.rows), choices = (c.rows + each - 1) / each;
    if (int64_t{choices} * count_words(c.experts) * 4 > c.counts_bytes || c.rows > kMaxGroupedRows)
        unsupported("moe_gate_up", "so many rows, or so many experts of so few columns");
    launch(context, "choose_experts", choose_many, choices, 32 * each, 0, c);
    launch(context, "group_pairs", group_many, (c.rows + kBlockRows - 1) / kBlockRows, kManyThreads, 0, c,
           each);
}

}  // namespace quern::cuda::moe
