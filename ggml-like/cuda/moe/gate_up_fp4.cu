// moe_gate_up with NVFP4 weights and few rows. A tile of 16 packed rows holds 8 rows of gate and the same 8
// of up.
//   answers, one row: 16 warps share a tile, a split of its columns each, and meet once at the end; a block's weights
//     are all under way at the same time
//   answers, 2 to 64 rows, and prompts: tiles of all groups of up to 8 rows of an expert, shared out evenly
//     (fp4_stream.cuh)
// In answers of up to 8 rows every block chooses experts. Answers add the same splits in the same order; prompts add as
// gemm.h does.
// Traffic: the weights of each needed expert once (again from L2 for an expert's groups after its first).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/activation.cuh"
#include "ggml-like/cuda/linear/deferred.cuh"
#include "ggml-like/cuda/moe/fp4_stream.cuh"
#include "ggml-like/cuda/moe/moe.h"
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
    int rounds;       // tiles of a block at most
};

// ---- one row ----

/// One warp of one block: what moe_down waits for, and the results of the choice but groups.
__device__ __forceinline__ void write_choice(const GateUp& a, const RankedChoice& choice, float factor) {
    const Choice& to = a.choice;
    const int lane = threadIdx.x % 32, id = lane < a.used ? choice.ids[lane] : 0;
    const float weight = weight_of(lane < a.used ? choice.bits[lane] : 0, a.used, factor);
    if (lane < a.used) publish(to.ready + lane, {id, weight});
    const float gate = gate_of(read_sum(to.logits.sums + to.experts) * factor);
    if (lane == 0) publish(to.ready + a.used, {0, gate}), *to.shared_gate = gate;
    if (lane < a.used) to.ids[lane] = id, to.weights[lane] = weight;
}
/// Groups, by all warps from `first` on of one block.
__device__ __forceinline__ void write_groups(const GateUp& a, const int* ids, int first) {
    const Choice& to = a.choice;
#pragma unroll 1
    for (int e = threadIdx.x - 32 * first; e <= to.experts && e >= 0; e += kThreads - 32 * first) {
        int before = 0, place = 0;  // ids below e; of choice e among the pairs by expert
        const int id = ids[min(e, a.used - 1)];
#pragma unroll 8
        for (int j = 0; j < a.used; ++j) before += ids[j] < e, place += ids[j] < id;
        to.groups[e] = before;
        if (e < a.used) to.groups[to.experts + 1 + place] = e;
    }
}

/// A block's tiles, round after round: of the shared expert, then of the choices. The first blocks have fewer
/// of the choices and more of the shared expert, but the very first, which also tells others what was chosen.
struct Rounds {
    const GateUp& a;
    int first_shared, first_routed, by;
    int shared, all;  // rounds

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

/// kEach: chunks of every split; 0: of most.
template <int kEach>
__global__ void __launch_bounds__(kThreads, 1) gate_up_fp4_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ RankedChoice choice;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* row = shared + kWarps * s.rounds * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(row + fp4_row_bytes(a.chunks));  // [round][split][16]
    const Rounds rounds(a);
    const bool works = warp < s.splits.count;
    // Of warp w's split of a tile: its place in the ring, and its columns.
    const auto place = [&](int w, int round) { return shared + (w * s.rounds + round) * s.piece_bytes; };
    const auto chunks_of = [&](int w) { return kEach > 0 ? kEach : s.splits.end(w) - s.splits.begin(w); };
    const auto request = [&](int w, int round, const uint8_t* tile) {
        uint8_t* to = place(w, round) + 16 * lane;
        const uint8_t* from = tile + s.splits.begin(w) * kFp4Chunk + 16 * lane;
        const int bytes = chunks_of(w) * kFp4Chunk;
#pragma unroll(kEach > 0 ? 4 : 1)
        for (int i = 0; i < bytes; i += 512)
            if (i + 16 * lane < bytes) copy_async16(to + i, from + i);
    };
    // The tiles of the shared expert are those of the warps that do not choose: they have two splits each.
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
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own
                        // wait
    // The end: a warp a round; lanes r and r + 8 have rows of gate and of up.
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
        // the tiles of the shared expert need not wait for the choice
        asm volatile("bar.sync 1, %0;" ::"n"(32 * kFirstRanker) : "memory");
    }

    float factor = 0;
    const auto multiply = [&](int w, int round) {
        const uint8_t* chunk = place(w, round);
        const uint8_t* x = row + 16 * (lane & 3) + s.splits.begin(w) * 128;
        float acc[4] = {};
#pragma unroll(kEach > 0 ? kEach : 1)
        for (int c = 0; c < chunks_of(w); ++c)
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
    // Steps: the shares of the shared expert's tiles, then the choices' tiles. The first that needs the
    // choice:
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

// ---- more rows ----

/// Who chose, or for what.
enum class Mode { chooses, chosen, prompt };

/// scale[n]: the factor of row n, in shared memory if the block chose.
template <Mode kMode>
struct GateUpWork {
    const GateUp& a;
    const float* scale;
    static constexpr bool kPrompt = kMode == Mode::prompt;
    static constexpr bool kRowsFirst = true;  // both come late: the rows, which are fewer, before the weights

    __device__ __forceinline__ int row_of(bool is_shared, int index) const {
        return is_shared ? index : quotient(index, a.used);
    }
    __device__ __forceinline__ const bf16* row(bool is_shared, int index) const {
        return a.h + static_cast<int64_t>(row_of(is_shared, index)) * a.columns;
    }
    __device__ __forceinline__ int width(bool) const { return a.columns; }
    __device__ __forceinline__ float weight(bool is_shared, int index) const {
        const float* from = scale + row_of(is_shared, index);
        return kMode == Mode::chooses ? *from : __ldcg(from);
    }
    struct Target {
        bf16* to;
        int width;
        float scale;
    };
    __device__ __forceinline__ Target target(bool is_shared, int index, float weight) const {
        const int width = (is_shared ? a.shared.rows : a.experts.rows) / 2;
        return {(is_shared ? a.shared_out : a.routed) + static_cast<int64_t>(index) * width, width, weight};
    }
    __device__ __forceinline__ void store(const Target& target, int tile, int r, float low, float high,
                                          float low_factor, float high_factor) const {
        const int at = tile * 8 + r;
        if (at >= target.width) return;
        constexpr float kLift = kRowLift<Kind::nvfp4>;
        if constexpr (kPrompt)
            target.to[at] = __float2bfloat16_rn(gated_prompt(low * (low_factor * kLift) * target.scale,
                                                             high * (high_factor * kLift) * target.scale));
        else
            target.to[at] = gated(low * low_factor * target.scale, high * high_factor * target.scale);
    }
};

constexpr int kMaxChoicePairs = kFewStepRows * kMaxChoiceUsed;

struct FewChoice {
    __align__(16) int ids[kMaxChoicePairs + 4];
    int groups[kMaxChoiceExperts + 1 + kMaxChoicePairs];
};

/// Whole block: ids and groups of all rows, a warp a row, without a barrier at the end, and the rows' factors. The first
/// block also writes the choice's results.
__device__ __forceinline__ void choose_few(const GateUp& a, FewChoice& choice, float* scale) {
    const Choice& to = a.choice;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.rows * a.used;
    const bool writes = blockIdx.x == 0;
    if (warp < a.rows) {
        const int64_t* sums = to.logits.sums + static_cast<int64_t>(warp) * to.logits.pitch;
        int* ids = choice.ids + warp * a.used;
        const float squares = load_squares(to.scale, warp);
        const auto logit = [&](int e) { return read_sum(sums + e); };
        const float gate_logit = writes ? logit(to.experts) : 0.0f;  // on its way while choosing
        const uint32_t bits = choose_in_order<kMaxChoiceExperts / 32>(logit, to.experts, a.used, ids);
        const float factor = norm_factor(to.scale, squares);
        if (lane == 0) scale[warp] = factor;
        if (writes) {
            const float weight = weight_of(bits, a.used, factor), gate = gate_of(gate_logit * factor);
            if (lane < a.used)
                to.ids[warp * a.used + lane] = ids[lane], to.weights[warp * a.used + lane] = weight;
            if (lane == 0) to.shared_gate[warp] = gate;
            if (a.rows == 1) {  // what down_one waits for
                if (lane < a.used) publish(to.ready + lane, {ids[lane], weight});
                if (lane == 0) publish(to.ready + a.used, {0, gate});
            }
        }
    }
    if (threadIdx.x < 4) choice.ids[pairs + threadIdx.x] = kNoExpert;
    __syncthreads();
    group_few(choice.ids, pairs, to.experts, choice.groups);
}
static_assert(kFewStepRows <= kWarps && kMaxChoiceExperts < kThreads && kMaxChoicePairs <= kThreads,
              "a warp a row, a thread an expert, a thread a pair");
static_assert(kMaxChoiceExperts + 1 + kMaxChoicePairs <= kThreads, "a thread a number of groups");

template <int kEach, Mode kMode>
__global__ void __launch_bounds__(kThreads, 1) gate_up_fp4_few(GateUp a, Stream s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamShared k;
    __shared__ float scale[kFewStepRows];
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own
                        // wait
    const int pairs = a.experts.tiles > 0 ? a.rows * a.used : 0,
              shared_rows = a.shared.tiles > 0 ? a.rows : 0;
    if constexpr (kMode == Mode::chooses) {
        FewChoice& choice = *reinterpret_cast<FewChoice*>(shared);  // before anything else is there
        choose_few(a, choice, scale);
        __syncthreads();
        const int numbers = a.choice.experts + 1 + pairs;
        if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < numbers)
            a.choice.groups[threadIdx.x] = choice.groups[threadIdx.x];
        list_groups(
            k.list, [&](int i) { return choice.groups[i]; }, a.experts.count, pairs, shared_rows);
        if (blockIdx.x == 0 && threadIdx.x == 0 && a.rows > 1) {
            __threadfence();  // what the whole block wrote, before the sign that it did
            publish(a.choice.ready, {0, 0});
        }
    } else {
        list_groups(k.list, a.groups, a.experts.count, pairs, shared_rows);
    }
    const float* factors = kMode == Mode::chooses ? scale : a.factor;
    stream_groups<kEach>(GateUpWork<kMode>{a, factors}, s, k, shared);
}

constexpr int kStatic = 8 * 1024;  // static shared memory at most

/// A launch of gate_up_fp4_one.
struct OneRow {
    Shape shape;
    int grid, bytes;

    OneRow(const Context& c, const GateUp& a) : shape{.splits = ColumnSplits(a.chunks)} {
        const int routed = a.used * a.experts.tiles;
        grid = min(c.sms, max(routed, a.shared.tiles));
        shape.rounds = (routed + grid - 1) / grid + (a.shared.tiles + grid - 1) / grid;
        shape.piece_bytes = shape.splits.each * kFp4Chunk;
        bytes = max(kWarps * shape.rounds * shape.piece_bytes + fp4_row_bytes(a.chunks) +
                        shape.rounds * kMaxSplits * kTileRows * 4,
                    c.shared_bytes / 2 + 1024);  // two blocks on one SM would leave another idle
    }
};

void launch_one(Context& c, const GateUp& a, const OneRow& one) {
    const int each = a.chunks % one.shape.splits.each == 0 ? one.shape.splits.each : 0;
    const auto kernel = each == 1 ? gate_up_fp4_one<1> : each == 2 ? gate_up_fp4_one<2> : gate_up_fp4_one<0>;
    launch(c, "moe_gate_up", kernel, one.grid, kThreads, one.bytes, a, one.shape);
}

bool one_fits(const Context& c, const GateUp& a) {
    if (a.rows != 1 || a.experts.tiles == 0 || a.shared.tiles == 0) return false;
    const OneRow one(c, a);
    return one.bytes <= c.shared_bytes - kStatic && one.shape.rounds <= kMaxPieces;
}

/// False: too many rows, or too little shared memory.
bool fit_stream(const Context& c, const GateUp& a, Stream& stream) {
    return a.rows <= kGroupRows && a.rows * a.used <= kGroupPairs &&
           fit_stream(stream, c.shared_bytes - kStatic);
}
Stream stream_of(const GateUp& a) {
    return {{a.experts.data, a.experts.factor, a.experts.expert_bytes, a.experts.tiles, a.chunks},
            {a.shared.data, a.shared.factor, 0, a.shared.tiles, a.chunks}};
}

template <Mode kMode>
void launch_few(Context& c, const GateUp& a) {
    Stream stream = stream_of(a);
    fit_stream(c, a, stream);
    const int tiles = a.rows * a.shared.tiles + a.rows * a.used * a.experts.tiles;
    const auto kernel = stream.each == 1   ? gate_up_fp4_few<1, kMode>
                        : stream.each == 2 ? gate_up_fp4_few<2, kMode>
                                           : gate_up_fp4_few<0, kMode>;
    launch(c, "moe_gate_up", kernel, min(c.sms, tiles), kThreads, stream.bytes(), a, stream);
}

}  // namespace

bool gate_up_fp4_fits(const Context& c, const GateUp& a) {
    Stream stream = stream_of(a);
    return a.experts.kind == Kind::nvfp4 && fit_stream(c, a, stream);
}

bool gate_up_fp4_chooses(const Context& c, const GateUp& a) {
    GateUp most = a;
    most.rows = kFewStepRows;
    return a.rows <= kFewStepRows && a.shared.kind == Kind::nvfp4 && a.experts.count <= kMaxChoiceExperts &&
           a.used <= kMaxChoiceUsed && gate_up_fp4_fits(c, most);
}

void gate_up_fp4(Context& c, const GateUp& a, bool chooses) {
    if (chooses && one_fits(c, a)) return launch_one(c, a, OneRow(c, a));
    chooses ? launch_few<Mode::chooses>(c, a) : launch_few<Mode::chosen>(c, a);
}

void gate_up_fp4_prompt(Context& c, const GateUp& a) { launch_few<Mode::prompt>(c, a); }

}  // namespace quern::cuda::moe
