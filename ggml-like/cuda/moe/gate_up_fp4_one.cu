// moe_gate_up with NVFP4 weights and one answer row; it also chooses the experts.
//
//   tile = 8 rows of gate and the same 8 of up; 16 warps share it, a split of its columns each
//
//     round       0            1            2  ..  (a block's tiles)          the shared expert's tiles come first and are under
//     tile     shared 12    choice 0, 5  choice 2, 9                          way while warps 8..15 choose experts
//     warp w   split w      split w      split w
//
//   epilogue: warp i adds round i's splits in order, and stores silu(gate) * up
//
//   Every block chooses, which is sooner than waiting for one block's choice. The first block also writes the choice's
//   results, tells `down` what was chosen (Choice::ready), and therefore has fewer tiles.
//
// Shared memory: a place for every piece (a split of a tile) of the block, no ring: all weights are under way at once.
// Also the row of x and the sums. At least half of an SM's, since two blocks on one SM would leave another SM idle (up
// to 60 % slower).
//
// Traffic: the weights of each chosen expert once. Bound: latency. Inside the kernel 1.3 us choose experts, 3.3 to 4 us
// products, 0.3 us end; the weights take 2.9 us (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/moe/gate_up_fp4.h"
#include "ggml-like/cuda/moe/piece_ring.cuh"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/moe/route_work.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

struct Shape {
    ColumnSplits splits;
    int piece_bytes;  // a split of a tile
    int rounds;       // tiles of a block, at most
};

/// One warp of one block: what down_fp4_one waits for, and the results of the choice but its groups.
__device__ __forceinline__ void write_choice(const GateUp& a, const RankedChoice& choice, float factor) {
    const Choice& to = a.choice;
    const int lane = threadIdx.x % 32, id = lane < a.used ? choice.ids[lane] : 0;
    const float weight = weight_of(lane < a.used ? choice.bits[lane] : 0, a.used, factor);
    if (lane < a.used) publish(to.ready + lane, {id, weight});
    const float gate = gate_of(read_sum(to.logits.sums + to.experts) * factor);
    if (lane == 0) publish(to.ready + a.used, {0, gate}), *to.shared_gate = gate;
    if (lane < a.used) to.ids[lane] = id, to.weights[lane] = weight;
}
/// The groups, by all warps from `first` on of one block.
__device__ __forceinline__ void write_groups(const GateUp& a, const int* ids, int first) {
    const Choice& to = a.choice;
#pragma unroll 1
    for (int e = threadIdx.x - 32 * first; e <= to.experts && e >= 0; e += kThreads - 32 * first) {
        int before = 0, place = 0;  // ids below e; the place of choice e among the pairs, ordered by expert
        const int id = ids[min(e, a.used - 1)];
#pragma unroll 8
        for (int j = 0; j < a.used; ++j) before += ids[j] < e, place += ids[j] < id;
        to.groups[e] = before;
        if (e < a.used) to.groups[to.experts + 1 + place] = e;
    }
}

/// A block's tiles, one a round: the shared expert's, then those of the choices. The first blocks have more of the
/// shared expert and fewer of the choices, except block 0, which has fewer of both.
struct Rounds {
    const GateUp& a;
    int first_shared, first_routed, by;  // tiles: first_shared, first_shared + by, ...
    int shared, all;                     // rounds of the shared expert; of both

    __device__ __forceinline__ explicit Rounds(const GateUp& arguments)
        : a(arguments),
          first_shared((blockIdx.x == 0 ? gridDim.x : blockIdx.x) - 1),
          first_routed(gridDim.x - 1 - blockIdx.x),
          by(gridDim.x) {
        const Divisor blocks(by);
        shared = blocks.quotient(max(0, a.shared.tiles - first_shared + by - 1));
        all = shared + blocks.quotient(max(0, a.used * a.experts.tiles - first_routed + by - 1));
    }
    struct Tile {
        int choice;  // -1: of the shared expert
        int index;
    };
    __device__ __forceinline__ Tile tile(int round) const {
        if (round < shared) return {-1, first_shared + round * by};
        const int at = first_routed + (round - shared) * by, choice = quotient(at, a.experts.tiles);
        return {choice, at - choice * a.experts.tiles};
    }
};

/// A warp's split of a piece, from a lane's first 16 bytes on; the rest of a chunk's bytes by the first lanes.
__device__ __forceinline__ void copy_split(uint8_t* to, const uint8_t* from) {
    constexpr int kBytes = kGateUpEach * kFp4Chunk;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kBytes; i += 512)
        if (i + 16 * lane < kBytes) copy_async16(to + i, from + i);
}

/// A round of the choices' tiles, all of it that is known before they are. In shared memory: else the assembler makes it only where it is
/// needed, between the choice and the first request.
struct __align__(8) RoutedTile {
    int choice, offset;  // bytes from an expert's first on; of rounds that do not exist some

    RoutedTile() = default;
    __device__ __forceinline__ RoutedTile(const GateUp& a, const Rounds& rounds, int i) {
        const int at = rounds.first_routed + i * rounds.by, which = quotient(at, a.experts.tiles);
        choice = min(which, a.used - 1);
        offset = (at - which * a.experts.tiles) * a.chunks * kFp4Chunk;
    }
};

template <int kGroups>
__device__ __forceinline__ void commit_empty() {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) commit_copies();
}

/// One warp: its split of each of the choices' tiles, a group of copies each of kMaxPieces. to: the lane's place of the first. Four at
/// a time, so that what one needs from shared memory does not wait for the one before.
__device__ __forceinline__ void request_routed(const GateUp& a, const int* ids, const RoutedTile* routed,
                                               int count, uint8_t* to, int begin, int piece_bytes) {
    constexpr int kTogether = 4;
    static_assert(kMaxPieces % kTogether == 0);
    const uint8_t* from = a.experts.data + begin * kFp4Chunk + 16 * (threadIdx.x % 32);
    const uint32_t expert_bytes = static_cast<uint32_t>(a.experts.expert_bytes);
#pragma unroll
    for (int first = 0; first < kMaxPieces; first += kTogether) {
        if (first >= count) {
            commit_empty<kTogether>();
            continue;
        }
        RoutedTile tile[kTogether];
        const uint8_t* data[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) tile[i] = routed[first + i];
#pragma unroll
        for (int i = 0; i < kTogether; ++i)
            data[i] =
                from + uint64_t{static_cast<uint32_t>(ids[tile[i].choice])} * expert_bytes + tile[i].offset;
#pragma unroll
        for (int i = 0; i < kTogether; ++i, to += piece_bytes) {
            if (first + i < count) copy_split(to, data[i]);
            commit_copies();
        }
    }
}

constexpr int kFirstRanker = kWarps - kRankers;  // the warps that choose
static_assert(kMaxChoiceExperts == kRankers * 32 && kMaxChoiceUsed == kRankers);
static_assert(kMaxPieces <= kFirstRanker, "a warp that adds up a round does not choose");

__global__ void __launch_bounds__(kThreads, 1) gate_up_fp4_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ RankedChoice choice;
    __shared__ __align__(16) RoutedTile routed[kMaxPieces];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* row = shared + kWarps * s.rounds * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(row + fp4_row_bytes(a.chunks));  // [round][split][16]
    const Rounds rounds(a);
    const bool works = warp < s.splits.count;
    // The warp's split of a round's tile: the lane's place in shared memory.
    const auto place = [&](int round) {
        return shared + (warp * s.rounds + round) * s.piece_bytes + 16 * lane;
    };
    const bool chooses = warp >= kFirstRanker;
    if (works)
#pragma unroll 1
        for (int round = 0; round < rounds.shared; ++round) {
            const int tile = rounds.first_shared + round * rounds.by;
            copy_split(place(round), a.shared.data + int64_t{tile} * a.chunks * kFp4Chunk +
                                         s.splits.begin(warp) * kFp4Chunk + 16 * lane);
        }
    commit_copies();
    const bool adds = warp < rounds.all, writes = warp == kFirstRanker && blockIdx.x == 0;
    // What a thread loads after the wait: a logit, or 16 numbers of x.
    const int ranker = threadIdx.x - 32 * kFirstRanker;
    const bool has_logit = chooses && ranker < a.choice.experts;
    const int64_t* logit_sum = a.choice.logits.sums + (has_logit ? ranker : 0);
    const bf16* x = a.h + (chooses ? 0 : 16 * threadIdx.x);
    if (chooses)
        clear_ranked(ranker, choice);
    else if (threadIdx.x < kMaxPieces)
        routed[threadIdx.x] = RoutedTile(a, rounds, threadIdx.x);
    bring_near(a.choice.ready);
    wait_for_predecessor();
    allow_successor();  // only now: before its own wait the successor reads what this kernel's predecessor wrote
    SquaresOfRow<4> squares;
    if (chooses) {
        const int64_t sum = has_logit ? __ldcg(reinterpret_cast<const long long*>(logit_sum)) : 0;
        if (writes) squares.load(a.choice.scale, 0);
        choose_by_rank(sum_of(sum), a.choice.experts, a.used, ranker, choice);
    } else {
        if (adds) squares.load(a.choice.scale, 0);
#pragma unroll 1
        for (int b = threadIdx.x; b < a.chunks * 4; b += 32 * kFirstRanker, x += 16 * 32 * kFirstRanker) {
            Fp4Block block;
            if (b * 16 < a.columns) block.load(x);
            block.store(row, b);
        }
    }
    __syncthreads();
    if (works)
        request_routed(a, choice.ids, routed, rounds.all - rounds.shared, place(rounds.shared),
                       s.splits.begin(warp), s.piece_bytes);
    else
        commit_empty<kMaxPieces>();
    // The epilogue: a warp a round; lanes r and r + 8 have a row of gate and of up.
    const Rounds::Tile end = rounds.tile(warp);
    const bool is_shared = end.choice < 0;
    float factor = 0;
    if (adds)
        factor =
            is_shared
                ? a.shared.factor[end.index * kTileRows + lane % 16]
                : a.experts
                      .factor[(choice.ids[end.choice] * a.experts.tiles + end.index) * kTileRows + lane % 16];
    if (writes) write_choice(a, choice, norm_factor(a.choice.scale, squares.sum(a.choice.scale, 0)));

#pragma unroll 1
    for (int round = 0; round < rounds.all; ++round) {
        if (round < rounds.shared)
            wait_copies<kMaxPieces>();
        else
            wait_copies<kMaxPieces - 1>();
        __syncwarp();
        if (works) {
            const uint8_t* chunk = place(round) - 16 * lane;
            const uint8_t* x = row + 16 * (lane & 3) + s.splits.begin(warp) * 128;
            float acc[4] = {};
#pragma unroll
            for (int c = 0; c < kGateUpEach; ++c)
                multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc);
            if ((lane & 3) == 0) {
                float* to = sums + (round * kMaxSplits + warp) * kTileRows + (lane >> 2);
                to[0] = acc[0];
                to[8] = acc[2];
            }
        }
        if (round >= rounds.shared) commit_copies();
    }
    __syncthreads();
    if (blockIdx.x == 0 && !adds) write_groups(a, choice.ids, rounds.all);
    if (!adds) return;
    const float* from = sums + warp * kMaxSplits * kTileRows + lane % 16;
    const float value = factor * add_in_order(s.splits.count, from, kTileRows) *
                        norm_factor(a.choice.scale, squares.sum(a.choice.scale, 0));
    const float up = __shfl_down_sync(0xffffffffu, value, 8);
    const int width = (is_shared ? a.shared.rows : a.experts.rows) / 2, at = end.index * 8 + lane;
    bf16* to = is_shared ? a.shared_out : a.routed + end.choice * width;
    if (lane < 8 && at < width) to[at] = gated(value, up);
}

}  // namespace

void launch_gate_up_one(Context& c, const GateUp& a) {
    if (a.experts.expert_bytes > INT32_MAX) unsupported("moe_gate_up", "an expert of 2 GB");
    const GateUpOneLaunch one(c, a.used, a.experts.tiles, a.shared.tiles, a.chunks);
    launch(c, "moe_gate_up one", gate_up_fp4_one, one.grid, kThreads, one.bytes, a,
           Shape{one.splits, one.piece_bytes, one.rounds});
}

}  // namespace quern::cuda::moe
