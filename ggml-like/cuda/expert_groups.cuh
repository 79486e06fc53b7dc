// The work of a few-row step as groups: up to kPassRows rows of one expert. Read from ids and groups by every block for
// itself; the shared expert's groups come first.
#pragma once

#include "ggml-like/cuda/fp4_rows.cuh"
#include "ggml-like/cuda/piece_ring.cuh"

namespace quern::cuda {

inline constexpr int kGroupPairs = 256;  // of a step
inline constexpr int kGroupThreads = 512;

struct ExpertGroup {
    short expert;  // -1: the shared expert
    short count;   // rows, 1..kPassRows
    int first;     // in `pair`; of the shared expert: the first row
};

struct ExpertGroups {
    ExpertGroup group[kGroupPairs + kGroupPairs / kPassRows];
    short pair[kGroupPairs];  // t * used + j
    int count;
    int sums[kGroupThreads / 32];
};

/// All kGroupThreads threads; a barrier at the end. groups: ops/moe_route.h; `shared_rows`: rows of the shared expert.
__device__ __forceinline__ void list_groups(ExpertGroups& list, const int* groups, int experts, int pairs,
                                            int shared_rows) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    if (tid < pairs) list.pair[tid] = static_cast<short>(__ldcg(groups + experts + 1 + tid));
    int before = (shared_rows + kPassRows - 1) / kPassRows;
    if (tid < before)
        list.group[tid] = {-1, static_cast<short>(min(kPassRows, shared_rows - tid * kPassRows)), tid * kPassRows};
    for (int base = 0; base < experts && pairs > 0; base += kGroupThreads) {
        const int e = base + tid;
        const int begin = e < experts ? __ldcg(groups + e) : 0, end = e < experts ? __ldcg(groups + e + 1) : 0;
        const int own = (end - begin + kPassRows - 1) / kPassRows;
        int sum = own;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) list.sums[warp] = sum;
        __syncthreads();
        int place = before + sum - own;
#pragma unroll
        for (int w = 0; w < kGroupThreads / 32; ++w) {
            if (w < warp) place += list.sums[w];
            before += list.sums[w];
        }
        for (int i = 0; i < own; ++i)
            list.group[place + i] = {static_cast<short>(e), static_cast<short>(min(kPassRows, end - begin - i * kPassRows)),
                                     begin + i * kPassRows};
        __syncthreads();
    }
    if (tid == 0) list.count = before;
    __syncthreads();
}

/// Sums over a tile whose pieces come through a ring: parts in their order, `piece_parts` of them a piece.
template <bool kWide, typename Request>
__device__ __forceinline__ void sum_tile(PieceRing& ring, const ChunkParts& parts, int piece_parts, const Fp4Columns& x,
                                         int lane, Request&& request, float (&total)[2][4]) {
    float four[2][4] = {};
    const uint8_t* chunk = nullptr;
    for (int p = 0, left = 0; p < parts.count; ++p) {
        if (left == 0) chunk = ring.wait(), left = piece_parts;
        float sum[2][4] = {};
        for (int c = parts.begin(p); c < parts.end(p); ++c, chunk += kFp4Chunk) multiply_fp4<kWide>(chunk, x, c, lane, sum);
        if (--left == 0 || p + 1 == parts.count) {
            left = 0;
            ring.release();
            request();
        }
        const bool end = p % 4 == 3 || p + 1 == parts.count;
#pragma unroll
        for (int n = 0; n < (kWide ? 2 : 1); ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                four[n][i] += sum[n][i];
                if (end) total[n][i] += four[n][i], four[n][i] = 0;
            }
    }
}

}  // namespace quern::cuda
