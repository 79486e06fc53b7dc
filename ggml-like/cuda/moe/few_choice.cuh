// The choice of experts of a few rows by one block of gate and up, a warp a row, and the groups of rows that chose the same expert: of 2
// to 8 rows (gate_up_fp4_few.cu); block_choice.cuh has those of more.
//
//   a row's 256 logits: eight groups of 32, each the logits of four lanes, grouped in three ways
//     the largest key of each group | the smallest of eight, the largest of the three such | who reaches it: some 16 candidates |
//     each candidate's rank
//
// All of it is latency, before any weight of a routed expert can be asked for. So nothing but what is rare is behind a branch: a warp
// would wait there for each latency in turn (of 2 rows 3,550 cycles from the wait until ranks are known with branches, 2,430 without,
// 600 of them until the logits are there; H200, 2026-11). What is left is above all code that runs once, 8 cycles an instruction.
#pragma once

#include "ggml-like/cuda/moe/choice_list.cuh"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/moe/route_work.cuh"

namespace quern::cuda::moe {

using namespace ptx;

inline constexpr int kChoiceGroups = kMaxChoiceExperts / 32;

/// What was chosen, in shared memory.
struct FewChoices {
    __align__(
        16) int ids[kFewPairs + 4];  // of row after row, in order; then kNoExpert up to a multiple of four
    uint32_t keys[kFewPairs];
    float scale[kFewStepRows];  // the norm's factors
    /// Of an expert: a bit of kChosenRows for each row that chose it.
    __align__(16) uint32_t rows_of[kMaxChoiceExperts];
};

/// Shared memory of a row while its warp chooses: candidates, in the order of their experts; then zeros.
struct RowCandidates {
    static constexpr int kAtOnce = 32;   // candidates, a lane each, whose ranks are found at once
    static constexpr int kTogether = 4;  // of more, that a lane compares with its own at a time
    static constexpr int kNowhere =
        kMaxChoiceExperts + kTogether;  // where all that is no candidate goes; nobody reads it
    __align__(16) uint32_t key[kNowhere + 1];
    uint8_t id[kNowhere + 1];
};
static_assert(kMaxChoiceExperts <= 256, "an id is a byte");

/// What a lane has of a row's logits, as they lie in memory: of experts lane + 32 i.
struct RowLogits {
    long long fixed[kChoiceGroups];

    /// from: the lane's first. All loads are under way before the first is used.
    __device__ __forceinline__ void load(const long long* from, int experts) {
        if (experts == kMaxChoiceExperts) {  // without conditions their addresses are one
#pragma unroll
            for (int i = 0; i < kChoiceGroups; ++i) fixed[i] = __ldcg(from + 32 * i);
            return;
        }
#pragma unroll
        for (int i = 0; i < kChoiceGroups; ++i)
            fixed[i] = static_cast<int>(threadIdx.x) % 32 + 32 * i < experts ? __ldcg(from + 32 * i) : 0;
    }
};

/// A block, before it chooses for so many rows: nothing was chosen.
__device__ __forceinline__ void clear_choices(FewChoices& to, RowCandidates* row, int rows, int pairs) {
    const int tid = threadIdx.x;
    if (tid < kMaxChoiceExperts) to.rows_of[tid] = 0;
    if (tid < 4) to.ids[pairs + tid] = kNoExpert;
    if (tid < rows * RowCandidates::kAtOnce)
        row[tid / RowCandidates::kAtOnce].key[tid % RowCandidates::kAtOnce] = 0;
}

/// One warp: the rank of each lane's candidate among up to kAtOnce.
__device__ __forceinline__ int rank_at_once(const RowCandidates& c, uint32_t own) {
    constexpr int kLoads = RowCandidates::kAtOnce / 4;
    uint4 other[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) other[i] = reinterpret_cast<const uint4*>(c.key)[i];
    int rank[4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
        rank[0] += other[i].x > own, rank[1] += other[i].y > own;
        rank[2] += other[i].z > own, rank[3] += other[i].w > own;
    }
    // Of equal ones the first has the lower expert.
    const unsigned equal = __match_any_sync(0xffffffffu, own) & ((1u << threadIdx.x % 32) - 1);
    return rank[0] + rank[1] + rank[2] + rank[3] + __popc(equal);
}
/// One lane: the rank of candidate n of many, behind which are kTogether zeros.
__device__ __forceinline__ int rank_of_many(const RowCandidates& c, int n, int count) {
    const uint32_t own = c.key[n];
    int rank = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += RowCandidates::kTogether) {
        const uint4 other = *reinterpret_cast<const uint4*>(c.key + first);
        rank += other.x > own - (first < n ? 1 : 0);
        rank += other.y > own - (first + 1 < n ? 1 : 0);
        rank += other.z > own - (first + 2 < n ? 1 : 0);
        rank += other.w > own - (first + 3 < n ? 1 : 0);
    }
    return rank;
}

/// One warp: the `used` best experts of a row, in order: chosen(rank, expert, key) by a lane for each. At least eight
/// experts reach the smallest of eight maxima, so only those that do are ranked. Of random logits more than kAtOnce do in 0.3 % of the
/// rows; with one way of grouping in 8 %. c: its first kAtOnce keys are zeros.
template <class Chosen>
__device__ __forceinline__ void choose_few(const RowLogits& logits, int experts, int used, RowCandidates& c,
                                           const Chosen& chosen) {
    const int lane = threadIdx.x % 32;
    float logit[kChoiceGroups];
#pragma unroll
    for (int i = 0; i < kChoiceGroups; ++i) logit[i] = sum_of(logits.fixed[i]);
#pragma unroll
    for (int i = 0; i < kChoiceGroups; ++i)
        asm volatile(
            ""
            : "+f"(logit[i]));  // else a branch leaves out what no expert needs, eight times in a row
    uint32_t key[kChoiceGroups], best = 0;
#pragma unroll
    for (int i = 0; i < kChoiceGroups; ++i) {
        key[i] = lane + 32 * i < experts ? ordered_bits(logit[i]) : 0;  // 0: no such expert
        best = max(best, key[i]);
    }
    best = max(best, __shfl_xor_sync(0xffffffffu, best, 1));
    uint32_t least = 1;
#pragma unroll
    for (int other = 2; other <= 8; other *= 2)  // each time other groups of the same pairs of lanes
        least =
            max(least, __reduce_min_sync(0xffffffffu, max(best, __shfl_xor_sync(0xffffffffu, best, other))));
    int count = 0;
#pragma unroll
    for (int i = 0; i < kChoiceGroups; ++i) {
        const bool wanted = key[i] >= least;
        const unsigned all = __ballot_sync(0xffffffffu, wanted);
        const int place = wanted ? count + __popc(all & ((1u << lane) - 1)) : RowCandidates::kNowhere;
        c.key[place] = key[i], c.id[place] = static_cast<uint8_t>(lane + 32 * i);
        count += __popc(all);
    }
    const auto take = [&](int n, int rank) {
        if (n < count && rank < used) chosen(rank, static_cast<int>(c.id[n]), c.key[n]);
    };
    __syncwarp();
    if (count <= RowCandidates::kAtOnce) {
        take(lane, rank_at_once(c, c.key[lane]));
        return;
    }
    if (lane < RowCandidates::kTogether) c.key[count + lane] = 0;
    __syncwarp();
#pragma unroll 1
    for (int n = lane; n < count; n += 32) take(n, rank_of_many(c, n, count));
}

/// The rows that chose one expert: how many, and the place of the first one's pair.
struct __align__(8) FewGroup {
    short expert, count, first;
};

/// Groups and their pairs side by side, in shared memory.
struct FewGroups {
    FewGroup group[kFewPairs + 1];  // the last: anything, of experts that nobody chose
    short pair[kFewPairs];
    __align__(8) uint8_t first_of[kMaxChoiceExperts];  // the place of an expert's first pair
};
static_assert(kFewPairs < 256, "a place is a byte");

/// What a row left in FewChoices::rows_of says that it chose the expert.
inline constexpr unsigned kChosenRows = 0x88888888u;

/// One warp: group and first_of of what was chosen, in the order of the experts, as the list that is told has them (choice_list.cuh).
/// Returns the number of groups.
__device__ __forceinline__ int group_choices(const FewChoices& from, FewGroups& to) {
    constexpr int kEach = kMaxChoiceExperts / 32;  // experts of a lane, neighbours
    static_assert(kEach == 8, "first_of: eight bytes a lane");
    const int lane = threadIdx.x % 32;
    int count[kEach], own = 0;  // groups in the upper half, places in the lower one
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
        const uint4 rows = *reinterpret_cast<const uint4*>(from.rows_of + kEach * lane + i);
        count[i] = __popc(rows.x & kChosenRows), count[i + 1] = __popc(rows.y & kChosenRows);
        count[i + 2] = __popc(rows.z & kChosenRows), count[i + 3] = __popc(rows.w & kChosenRows);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) own += count[i] + (count[i] > 0 ? 1 << 16 : 0);
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d) sum += other;
    }
    int at = sum - own;
    uint32_t first[kEach / 4] = {};  // four bytes a word
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int place = at & 0xffff;
        to.group[count[i] > 0 ? at >> 16 : kFewPairs] = {
            static_cast<short>(kEach * lane + i), static_cast<short>(count[i]), static_cast<short>(place)};
        first[i / 4] |= static_cast<uint32_t>(place) << 8 * (i % 4);
        at += count[i] + (count[i] > 0 ? 1 << 16 : 0);
    }
    *reinterpret_cast<uint2*>(to.first_of + kEach * lane) = make_uint2(first[0], first[1]);
    __syncwarp();
    return __shfl_sync(0xffffffffu, sum, 31) >> 16;
}

/// Afterwards, the same warp: pair.
__device__ __forceinline__ void group_pairs(const FewChoices& from, int pairs, int used, FewGroups& to) {
#pragma unroll
    for (int i = 0; i < kFewPairs / 32; ++i) {
        const int p = threadIdx.x % 32 + 32 * i;
        if (p >= pairs) continue;
        const int id = from.ids[p];
        const unsigned before = from.rows_of[id] & kChosenRows & ((1u << 4 * quotient(p, used)) - 1);
        to.pair[to.first_of[id] + __popc(before)] = static_cast<short>(p);
    }
    __syncwarp();
}

}  // namespace quern::cuda::moe
