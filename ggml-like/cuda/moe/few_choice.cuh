// The choice of experts of 2 to 8 rows by one block of gate and up, several warps a row, and the groups of rows that chose the same
// expert.
//
//   a row's 256 logits in eight groups of 32; its warps have 1, 2 or 4 groups each
//     largest key of each group | the smallest of these eight | who reaches it: some 20 candidates | each candidate's rank
//
// All of it is latency, before any weight of a routed expert can be asked for: 1.6 us from the wait on for two rows, 2.4 for eight
// (H200, 2026-11; one warp a row, round after round: 2.5 and 3.1).
#pragma once

#include "ggml-like/cuda/moe/choice_list.cuh"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/moe/route_work.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace linear;

inline constexpr int kChoiceGroups = kMaxChoiceExperts / 32;

/// What was chosen, in shared memory.
struct FewChoices {
    __align__(
        16) int ids[kFewPairs + 4];  // of row after row, in order; then kNoExpert up to a multiple of four
    uint32_t keys[kFewPairs];
    float scale[kFewStepRows];  // the norm's factors
    /// Of an expert: four bits a row, 8 + its number among what the row chose, or 0.
    uint32_t rows_of[kMaxChoiceExperts];
};

/// Shared memory of a row while its warps choose.
struct RowCandidates {
    static constexpr int kTogether = 8;  // that a lane compares with its own at a time
    /// Keys and, below them, the complements of experts, so that of equal keys the lower expert is more; then zeros.
    __align__(16) uint64_t candidate[kMaxChoiceExperts];
    __align__(16) uint32_t best[kChoiceGroups];
    int count;
};

/// The row that a warp helps to choose for, and its groups of experts: part, part + warps, ...
struct ChoiceShare {
    static constexpr int kMost = 4;  // groups of a warp
    int warps, row, part, each;

    __device__ __forceinline__ ChoiceShare(int rows, int warp) {
        const int log_warps = rows <= 2 ? 3 : rows <= 4 ? 2 : 1;
        warps = 1 << log_warps, row = warp >> log_warps, part = warp & (warps - 1);
        each = kChoiceGroups >> log_warps;
    }
    __device__ __forceinline__ int expert(int i) const {
        return static_cast<int>(threadIdx.x) % 32 + 32 * (part + warps * i);
    }
    __device__ __forceinline__ bool is_last() const { return part == warps - 1; }
};
static_assert(kWarps * ChoiceShare::kMost == kFewStepRows * kChoiceGroups && kWarps / 2 == kChoiceGroups);

/// Logits of share.expert(i), of which there are `experts`; all loads are under way before the first is used.
__device__ __forceinline__ void read_logits(const int64_t* sums, const ChoiceShare& share, int experts,
                                            float (&logits)[ChoiceShare::kMost]) {
    long long fixed[ChoiceShare::kMost];
#pragma unroll
    for (int i = 0; i < ChoiceShare::kMost; ++i) {
        const int e = share.expert(i);
        fixed[i] = i < share.each && e < experts ? __ldcg(reinterpret_cast<const long long*>(sums) + e) : 0;
    }
#pragma unroll
    for (int i = 0; i < ChoiceShare::kMost; ++i) logits[i] = sum_of(fixed[i]);
}

/// `threads` of a block, before they choose for so many rows: nothing was chosen.
__device__ __forceinline__ void clear_choices(FewChoices& to, RowCandidates* row, int rows, int pairs,
                                              int threads) {
    const int tid = threadIdx.x;
    if (tid < kMaxChoiceExperts) to.rows_of[tid] = 0;
    if (tid < 4) to.ids[pairs + tid] = kNoExpert;
    if (tid < rows) row[tid].count = 0;
    for (int i = tid; i < rows * kMaxChoiceExperts; i += threads)
        row[i / kMaxChoiceExperts].candidate[i % kMaxChoiceExperts] = 0;
}

/// The warps of one row: its `used` best experts, as choose_in_order has them. At least kChoiceGroups >= used experts reach
/// the smallest of the groups' maxima, so only those that do are ranked. logits: of share.expert(i).
__device__ __forceinline__ void choose_few(const ChoiceShare& share,
                                           const float (&logits)[ChoiceShare::kMost], int experts, int used,
                                           RowCandidates& c, FewChoices& to) {
    constexpr int kMost = ChoiceShare::kMost;
    const int lane = threadIdx.x % 32;
    const auto barrier = [&] {
        asm volatile("bar.sync %0, %1;" ::"r"(share.row + 1), "r"(share.warps * 32) : "memory");
    };
    uint32_t key[kMost];
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        key[i] = 0;  // no such expert
        if (i >= share.each) break;
        if (share.expert(i) < experts) key[i] = ordered_bits(logits[i]);
        const uint32_t best = __reduce_max_sync(0xffffffffu, key[i]);
        if (lane == 0) c.best[share.part + share.warps * i] = best;
    }
    barrier();
    const uint4 a = *reinterpret_cast<const uint4*>(c.best), b = *reinterpret_cast<const uint4*>(c.best + 4);
    const uint32_t least = max(1u, min(min(min(a.x, a.y), min(a.z, a.w)), min(min(b.x, b.y), min(b.z, b.w))));
    unsigned wanted[kMost];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= share.each) break;
        wanted[i] = __ballot_sync(0xffffffffu, key[i] >= least);
        count += __popc(wanted[i]);
    }
    int place = 0;
    if (lane == 0 && count > 0) place = atomicAdd(&c.count, count);
    place = __shfl_sync(0xffffffffu, place, 0);
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
        if (i >= share.each) break;
        if (key[i] >= least)
            c.candidate[place + __popc(wanted[i] & ((1u << lane) - 1))] =
                static_cast<uint64_t>(key[i]) << 32 | ~static_cast<uint32_t>(share.expert(i));
        place += __popc(wanted[i]);
    }
    barrier();
    count = c.count;
#pragma unroll 1
    for (int n = lane + 32 * share.part; n < count; n += 32 * share.warps) {
        const uint64_t own = c.candidate[n];
        int rank = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += RowCandidates::kTogether) {
            uint64_t other[RowCandidates::kTogether];
#pragma unroll
            for (int j = 0; j < RowCandidates::kTogether; ++j) other[j] = c.candidate[first + j];
#pragma unroll
            for (int j = 0; j < RowCandidates::kTogether; ++j) rank += other[j] > own ? 1 : 0;
        }
        if (rank >= used) continue;
        const int id = static_cast<int>(~static_cast<uint32_t>(own)), at = share.row * used + rank;
        to.ids[at] = id, to.keys[at] = static_cast<uint32_t>(own >> 32);
        atomicOr(to.rows_of + id, (8u + rank) << 4 * share.row);
    }
}
static_assert(kMaxChoiceExperts % RowCandidates::kTogether == 0, "zeros behind the candidates");

/// The rows that chose one expert: how many, and the place of the first one's pair.
struct FewGroup {
    int expert, count, first;
};

/// Groups and their pairs side by side, in shared memory.
struct FewGroups {
    FewGroup group[kFewPairs];
    short pair[kFewPairs];
    int first_of[kFewPairs];  // the place of a pair that is the first of its group
};

/// One warp: the groups of what was chosen, in the order of the first pair that has their expert. Returns their number.
__device__ __forceinline__ int group_choices(const FewChoices& from, int pairs, int used, FewGroups& to) {
    constexpr unsigned kRowBits = 0x88888888u;
    constexpr int kEach = kFewPairs / 32;  // pairs of a lane: lane, lane + 32
    const int lane = threadIdx.x % 32;
    unsigned rows[kEach];  // a bit for each row that chose the pair's expert
    int id[kEach], row[kEach], places = 0, groups = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int p = lane + 32 * i;
        id[i] = p < pairs ? from.ids[p] : 0;
        rows[i] = p < pairs ? from.rows_of[id[i]] & kRowBits : 0;
        row[i] = quotient(p, used);
        const bool leads = p < pairs && (rows[i] & ((1u << 4 * row[i]) - 1)) == 0;
        const unsigned leaders = __ballot_sync(0xffffffffu, leads);
        const int count = leads ? __popc(rows[i]) : 0;
        int sum = count;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        const int first = places + sum - count;
        if (leads) {
            to.group[groups + __popc(leaders & ((1u << lane) - 1))] = {id[i], count, first};
            to.first_of[p] = first;
        }
        places += __shfl_sync(0xffffffffu, sum, 31);
        groups += __popc(leaders);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int p = lane + 32 * i;
        if (p >= pairs) continue;
        const int leading_row = (__ffs(rows[i]) - 1) / 4;
        const int leader = leading_row * used + (from.rows_of[id[i]] >> 4 * leading_row & 7);
        to.pair[to.first_of[leader] + __popc(rows[i] & ((1u << 4 * row[i]) - 1))] = static_cast<short>(p);
    }
    __syncwarp();
    return groups;
}

}  // namespace quern::cuda::moe
