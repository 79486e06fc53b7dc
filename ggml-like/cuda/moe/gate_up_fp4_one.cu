// moe_gate_up with NVFP4 weights and one answer row; it also chooses the experts.
//
//   tile = 8 rows of gate and the same 8 of up; 16 warps share it, a split of its columns each
//
//     round       0            1            2  ..  (a block's tiles)          warps 0..7: the shared expert's tiles,
//     tile     shared 12    choice 0, 5  choice 2, 9                          two splits each, while warps 8..15 choose
//     warp w   split w      split w      split w                              experts; then all: the choices' tiles
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

__device__ __forceinline__ const uint8_t* tile_data(const GateUp& a, const Rounds::Tile& t, const int* ids) {
    const int64_t at = static_cast<int64_t>(t.index) * a.chunks * kFp4Chunk;
    return t.choice < 0 ? a.shared.data + at : a.experts.data + ids[t.choice] * a.experts.expert_bytes + at;
}

constexpr int kFirstRanker = kWarps - kRankers;  // the warps that choose
static_assert(kMaxChoiceExperts == kRankers * 32 && kMaxChoiceUsed == kRankers);

__global__ void __launch_bounds__(kThreads, 1) gate_up_fp4_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ RankedChoice choice;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* row = shared + kWarps * s.rounds * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(row + fp4_row_bytes(a.chunks));  // [round][split][16]
    const Rounds rounds(a);
    const bool works = warp < s.splits.count;
    // Split w of a round's tile: its place in shared memory, and its chunks.
    const auto place = [&](int w, int round) { return shared + (w * s.rounds + round) * s.piece_bytes; };
    const auto request = [&](int w, int round, const uint8_t* tile) {
        uint8_t* to = place(w, round) + 16 * lane;
        const uint8_t* from = tile + s.splits.begin(w) * kFp4Chunk + 16 * lane;
        constexpr int kBytes = kGateUpEach * kFp4Chunk;
#pragma unroll
        for (int i = 0; i < kBytes; i += 512)
            if (i + 16 * lane < kBytes) copy_async16(to + i, from + i);
    };
    // Warps that do not choose have the tiles of the shared expert, two splits each.
    const bool chooses = warp >= kFirstRanker;
    constexpr int kShares = kWarps / kFirstRanker;
    if (!chooses)
#pragma unroll 1
        for (int i = 0; i < kShares * rounds.shared; ++i) {
            const int round = i / kShares, w = warp + i % kShares * kFirstRanker;
            if (w < s.splits.count) request(w, round, tile_data(a, rounds.tile(round), choice.ids));
        }
    commit_copies();
    const Rounds::Tile mine = rounds.tile(rounds.shared + lane);
    wait_for_predecessor();
    allow_successor();  // only now: before its own wait the successor reads what this kernel's predecessor wrote
    // Epilogue: a warp a round; lanes r and r + 8 have a row of gate and of up.
    const Rounds::Tile end = rounds.tile(warp);
    const bool is_shared = end.choice < 0, adds = warp < rounds.all;
    const bool writes = warp == kFirstRanker && blockIdx.x == 0;
    const float squares = adds || writes ? load_squares(a.choice.scale, 0) : 0.0f;
    if (chooses) {
        const int i = threadIdx.x - 32 * kFirstRanker;
        const float logit = i < a.choice.experts ? read_sum(a.choice.logits.sums + i) : 0.0f;
        choose_by_rank(logit, a.choice.experts, a.used, i, choice);
    } else {
        for (int b = threadIdx.x; b < a.chunks * 4; b += 32 * kFirstRanker) {
            Fp4Block block;
            if (b * 16 < a.columns) block.load(a.h + b * 16);
            block.store(row, b);
        }
        // x is there; the tiles of the shared expert need not wait for the choice
        asm volatile("bar.sync 1, %0;" ::"n"(32 * kFirstRanker) : "memory");
    }

    float factor = 0;
    const auto multiply = [&](int w, int round) {
        const uint8_t* chunk = place(w, round);
        const uint8_t* x = row + 16 * (lane & 3) + s.splits.begin(w) * 128;
        float acc[4] = {};
#pragma unroll
        for (int c = 0; c < kGateUpEach; ++c)
            multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc);
        if ((lane & 3) == 0) {
            float* to = sums + (round * kMaxSplits + w) * kTileRows + (lane >> 2);
            to[0] = acc[0];
            to[8] = acc[2];
        }
    };
    const auto ask_for_routed = [&] {
        __syncthreads();
        const auto from = reinterpret_cast<uint64_t>(
            rounds.shared + lane < rounds.all ? tile_data(a, mine, choice.ids) : nullptr);
#pragma unroll 4
        for (int i = 0; i < kMaxPieces; ++i) {
            const uint64_t tile = __shfl_sync(0xffffffffu, from, i);
            if (works && tile != 0) request(warp, rounds.shared + i, reinterpret_cast<const uint8_t*>(tile));
            commit_copies();
        }
        if (adds)
            factor =
                is_shared
                    ? a.shared.factor[end.index * kTileRows + lane % 16]
                    : a.experts.factor[(choice.ids[end.choice] * a.experts.tiles + end.index) * kTileRows +
                                       lane % 16];
        if (writes) write_choice(a, choice, norm_factor(a.choice.scale, squares));
    };
    // Steps: splits of the shared expert's tiles, then of the choices'. The first that needs the choice is `known`.
    const int known = kShares * rounds.shared, steps = kShares * rounds.shared + rounds.all - rounds.shared;
#pragma unroll 1
    for (int step = chooses ? known : 0;; ++step) {
        if (step == known) ask_for_routed();
        if (step == steps) break;
        const bool is_routed = step >= kShares * rounds.shared;
        const int round = is_routed ? step - (kShares - 1) * rounds.shared : step / kShares;
        const int w = is_routed ? warp : warp + step % kShares * kFirstRanker;
        if (step < known)
            wait_copies<0>();
        else
            wait_copies<kMaxPieces - 1>();
        __syncwarp();
        if (w < s.splits.count) multiply(w, round);
        if (is_routed) commit_copies();
    }
    __syncthreads();
    if (blockIdx.x == 0 && !adds) write_groups(a, choice.ids, rounds.all);
    if (!adds) return;
    const float* from = sums + warp * kMaxSplits * kTileRows + lane % 16;
    const float value =
        factor * add_in_order(s.splits.count, from, kTileRows) * norm_factor(a.choice.scale, squares);
    const float up = __shfl_down_sync(0xffffffffu, value, 8);
    const int width = (is_shared ? a.shared.rows : a.experts.rows) / 2, at = end.index * 8 + lane;
    bf16* to = is_shared ? a.shared_out : a.routed + end.choice * width;
    if (lane < 8 && at < width) to[at] = gated(value, up);
}

}  // namespace

void launch_gate_up_one(Context& c, const GateUp& a) {
    const GateUpOneLaunch one(c, a.used, a.experts.tiles, a.shared.tiles, a.chunks);
    launch(c, "moe_gate_up one", gate_up_fp4_one, one.grid, kThreads, one.bytes, a,
           Shape{one.splits, one.piece_bytes, one.rounds});
}

}  // namespace quern::cuda::moe
