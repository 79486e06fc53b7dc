// The choice of experts of up to 64 rows by one block of gate and up, a warp a row and then another, and the list of the block's
// groups.
//
//   warp     chooses for its rows (few_choice.cuh); a bit of the row for each expert that it chose
//   warp 0   from these bits the place of each expert's first pair, and the groups
//   thread   the place of its pair
//
// All of it is latency, before any weight of a routed expert can be asked for: three barriers, and as little code as will do, since
// it runs once.
#pragma once

#include "ggml-like/cuda/moe/expert_groups.cuh"
#include "ggml-like/cuda/moe/few_choice.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace linear;

inline constexpr int kMaxChoicePairs = kMaxFp4Rows * kMaxChoiceUsed;
inline constexpr int kRowWords = kMaxFp4Rows / 32;  // words of a bit for each row
static_assert(kMaxChoicePairs <= kGroupPairs, "places of ExpertGroups::pair");
static_assert(kMaxChoiceExperts < kThreads && kMaxChoicePairs <= kThreads,
              "a thread an expert, a thread a pair");

/// Shared memory of the choice.
struct BlockChoice {
    int ids[kMaxChoicePairs];
    uint32_t keys[kMaxChoicePairs];
    __align__(16) uint32_t rows_of[kRowWords][kMaxChoiceExperts];  // that chose an expert
    __align__(16) uint16_t first[kMaxChoiceExperts];               // the place of its first pair
    RowCandidates candidates[kWarps];
    ChoiceList told;  // of the first block

    /// Rows before `end` that chose the expert.
    __device__ __forceinline__ int count_of(int expert, int end = kMaxFp4Rows) const {
        int count = 0;
#pragma unroll
        for (int w = 0; w < kRowWords; ++w) {
            const int bits = min(max(end - 32 * w, 0), 32);
            count += __popc(static_cast<uint32_t>(rows_of[w][expert] & ((uint64_t{1} << bits) - 1)));
        }
        return count;
    }
};

/// The whole block, before the wait; a barrier at the end.
__device__ __forceinline__ void begin_choice(BlockChoice& choice) {
    const int tid = threadIdx.x;
    if (tid < kMaxChoiceExperts)
#pragma unroll
        for (int w = 0; w < kRowWords; ++w) choice.rows_of[w][tid] = 0;
    choice.candidates[tid / 32].key[tid % 32] = 0;
    __syncthreads();
}
static_assert(RowCandidates::kAtOnce == 32);

/// What a warp reads to choose for a row. gate: the shared expert's logit, of the first block.
struct RowInputs {
    RowLogits logits;
    SquaresOfRow<4> squares;
    long long gate = 0;

    __device__ __forceinline__ void load(const Choice& to, int row) {
        const auto* sums =
            reinterpret_cast<const long long*>(to.logits.sums) + static_cast<int64_t>(row) * to.logits.pitch;
        logits.load(sums + threadIdx.x % 32, to.experts);
        squares.load(to.scale, row);
        if (blockIdx.x == 0) gate = __ldcg(sums + to.experts);
    }
};

/// One warp: a row's choice, and its norm's factor. The first block also writes the results.
__device__ __forceinline__ void choose_row(const Choice& to, int row, const RowInputs& in,
                                           BlockChoice& choice, float* scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = row * to.used + lane;
    choose_few(in.logits, to.experts, to.used, choice.candidates[warp], [&](int rank, int id, uint32_t key) {
        choice.ids[row * to.used + rank] = id, choice.keys[row * to.used + rank] = key;
        atomicOr(&choice.rows_of[row / 32][id], 1u << row % 32);
    });
    const float factor = norm_factor(to.scale, in.squares.sum(to.scale, row));
    if (lane == 0) *scale = factor;
    if (blockIdx.x > 0) return;
    __syncwarp();
    const bool any = lane < to.used;
    const int id = any ? choice.ids[at] : 0;
    const float weight = weight_of(any ? choice.keys[at] : 0, to.used, factor),
                gate = gate_of(sum_of(in.gate) * factor);
    if (any) to.ids[at] = id, to.weights[at] = weight;
    if (lane == 0) to.shared_gate[row] = gate;
    if (to.rows > 1) return;
    if (any) publish(to.ready + lane, {id, weight});  // down_fp4_one waits for it
    if (lane == 0) publish(to.ready + to.used, {0, gate});
}

/// The whole block: what all rows choose, and the rows' factors into `scale`.
__device__ __forceinline__ void choose_rows(const Choice& to, BlockChoice& choice, float* scale) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    RowInputs next;
    if (warp < to.rows) next.load(to, warp);
#pragma unroll 1
    for (int row = warp; row < to.rows; row += kWarps) {
        const RowInputs own = next;
        if (row + kWarps < to.rows) next.load(to, row + kWarps);
        choose_row(to, row, own, choice, scale + row);
        __syncwarp();
        choice.candidates[warp].key[lane] = 0;
        __syncwarp();
    }
    __syncthreads();
}

/// One warp: where experts' pairs begin, and groups of up to kPassRows of them from number `before` on, counted in one sum as
/// group_choices does. Returns the number of all groups.
__device__ __forceinline__ int list_chosen(BlockChoice& choice, ExpertGroups& list, int before) {
    constexpr int kEach = kMaxChoiceExperts / 32;  // experts of a lane, neighbours
    static_assert(kEach == 8, "first: 16 bytes a lane");
    const int lane = threadIdx.x % 32;
    int count[kEach] = {};  // rows that chose it
    int own = 0;            // groups in the upper half, pairs in the lower one
#pragma unroll
    for (int w = 0; w < kRowWords; ++w)
#pragma unroll
        for (int i = 0; i < kEach; i += 4) {
            const uint4 rows = *reinterpret_cast<const uint4*>(choice.rows_of[w] + kEach * lane + i);
            count[i] += __popc(rows.x), count[i + 1] += __popc(rows.y);
            count[i + 2] += __popc(rows.z), count[i + 3] += __popc(rows.w);
        }
    const auto both = [](int n) { return n + ((n + kPassRows - 1) / kPassRows << 16); };
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += both(count[i]);
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    constexpr int kNobody = kGroupPairs + kGroupRows / kPassRows - 1;  // there are never so many groups
    static_assert(kMaxChoiceExperts + (kMaxChoicePairs + kMaxFp4Rows) / kPassRows <= kNobody);
    const int begin = sum - own + (before << 16);
    int at = begin;
    bool more = false;
    uint32_t first[kEach / 2] = {};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int place = at & 0xffff;
        first[i / 2] |= static_cast<uint32_t>(place) << 16 * (i % 2);
        list.group[count[i] > 0 ? at >> 16 : kNobody] = {static_cast<short>(kEach * lane + i),
                                                         static_cast<short>(min(kPassRows, count[i])), place};
        at += both(count[i]);
        more |= count[i] > kPassRows;
    }
    if (more) {  // seldom
        at = begin;
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) {
            const int all = choice.count_of(kEach * lane + i), place = at & 0xffff;
#pragma unroll 1
            for (int n = kPassRows; n < all; n += kPassRows)
                list.group[(at >> 16) + n / kPassRows] = {static_cast<short>(kEach * lane + i),
                                                          static_cast<short>(min(kPassRows, all - n)),
                                                          place + n};
            at += both(all);
        }
    }
    *reinterpret_cast<uint4*>(choice.first + kEach * lane) =
        make_uint4(first[0], first[1], first[2], first[3]);
    return before + (__shfl_sync(0xffffffffu, sum, 31) >> 16);
}

/// The whole block, after choose_rows: the list of groups; the first block also writes groups (ops/moe_gate_up.h). routed: whether
/// pairs are on the list. A barrier has to follow.
__device__ __forceinline__ void list_choice(const Choice& to, BlockChoice& choice, ExpertGroups& list,
                                            bool routed, int shared_rows) {
    const int tid = threadIdx.x, pairs = to.rows * to.used;
    const int shared_groups = list_shared_groups(list, shared_rows);
    if (tid < 32) {
        const int all = list_chosen(choice, list, shared_groups);
        if (tid == 0) list.count = routed ? all : shared_groups, list.shared = shared_groups;
    }
    __syncthreads();
    if (tid < pairs) {
        const int row = quotient(tid, to.used), id = choice.ids[tid];
        const int place = choice.first[id] + choice.count_of(id, row);
        list.pair[place] = static_cast<short>(tid);
        if (blockIdx.x == 0) to.groups[to.experts + 1 + place] = tid;
    }
    if (blockIdx.x == 0 && tid <= to.experts) to.groups[tid] = tid < to.experts ? choice.first[tid] : pairs;
}

}  // namespace quern::cuda::moe
