// moe_gate_up with NVFP4 weights and few rows. A tile of 16 packed rows holds 8 rows of gate and the same 8
// of up.
//   one row: 16 warps share a tile, a part of its columns each, and meet once at the end; a block's weights
//     are all under way at the same time. Where moe_route left the choice of experts, every block chooses
//   2 to 64 rows: tiles of all groups of up to 8 rows of an expert, shared out evenly (fp4_stream.cuh)
// Both add the same parts in the same order. Traffic: the weights of each needed expert once (again from L2
// for an expert's groups after its first).
#include "ggml-like/cuda/fp4_stream.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe.h"
#include "ggml-like/cuda/route.cuh"

namespace quern::cuda {
namespace {

struct Shape {
    ChunkParts parts;
    int tiles;  // of an expert in the list: the larger of routed and shared
    int piece_bytes;
    int depth;
    int turns;  // tiles of a block
};

__device__ __forceinline__ bf16 gated(float gate, float up) {
    return __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
}

/// Tile `tile` of an expert, -1: the shared one.
struct Tile {
    const uint8_t* data;
    const float* factor;
    int height;  // rows of the output that it has; 0 and less: there is no such tile

    __device__ __forceinline__ Tile(const GateUp& a, int expert, int tile) {
        const bool shared = expert < 0;
        const int64_t bytes = static_cast<int64_t>(tile) * a.chunks * kFp4Chunk;
        data = shared ? a.shared.data + bytes : a.experts.data + expert * a.experts.expert_bytes + bytes;
        factor = shared ? a.shared.factor + tile * kTileRows
                        : a.experts.factor + (expert * a.experts.tiles + tile) * kTileRows;
        height = (shared ? a.shared.rows : a.experts.rows) / 2 - tile * 8;
    }
};

// ---- one row ----

constexpr int kLeftEach = kMostLeftExperts / 32;

/// What every block knows of the choice; block 0 writes it to memory.
struct Choice {
    int ids[kMostUsed];
    float weights[kMostUsed], shared;
};

/// Whole block: what moe_route left out, and what moe_down waits for.
__device__ __forceinline__ void write_choice(const GateUp& a, Choice& choice) {
    const LeftChoice& to = a.left;
    const int i = threadIdx.x;
    if (i <= a.used)
        publish(to.chosen + i,
                i < a.used ? Chosen{choice.ids[i], choice.weights[i]} : Chosen{0, choice.shared});
    if (i < a.used) to.ids[i] = choice.ids[i], to.weights[i] = choice.weights[i];
    if (i == 0) *to.shared = choice.shared;
    int before = 0, place = 0;  // ids below expert i; of the row's choice i among the pairs by expert
    for (int j = 0; j < a.used; ++j) {
        before += choice.ids[j] < i;
        if (i < a.used) place += choice.ids[j] < choice.ids[i];
    }
    static_assert(kMostLeftExperts <= kThreads);
    if (i < to.experts) to.groups[i] = before;
    if (i == 0) to.groups[to.experts] = a.used;
    if (i < a.used) to.groups[to.experts + 1 + place] = i;
}

/// kEach: chunks of every part; 0: of most. kChooses: ids come from a.left.
template <int kEach, bool kChooses>
__global__ void __launch_bounds__(kThreads, 1) gate_up_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ Choice chosen;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* row = shared + kWarps * s.depth * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(row + fp4_row_bytes(a.chunks));  // [turn][part][16]
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    // Items: the tiles of the shared expert (choice -1), of choice 0 ...
    const int items = (a.used + 1) * s.tiles;
    const int begin = s.parts.begin(warp), bytes = (s.parts.end(warp) - begin) * kFp4Chunk;
    const int own = blockIdx.x + lane * gridDim.x, choice = quotient(own, s.tiles) - 1;  // of turn `lane`
    const bool works = warp < s.parts.count && own < items, routed = choice >= 0 && choice < a.used;
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own
                        // wait
    int id = !kChooses && routed ? __ldcg(a.ids + choice) : -1;
    Fp4Block block;
    if (threadIdx.x * 16 < static_cast<unsigned>(a.columns)) block.load(a.h + threadIdx.x * 16);
    if constexpr (kChooses) {
        if (warp == kWarps - 1)
            choose_experts<kLeftEach>(a.left.logits, a.left.experts, a.used, chosen.ids, chosen.weights,
                                      &chosen.shared);
        __syncthreads();
        if (routed) id = chosen.ids[choice];
    }
    const Tile mine(a, id, own - (choice + 1) * s.tiles);
    // A ring has a place for every turn: nothing is asked for later.
    const bool there = works && mine.height > 0;
    const uint8_t* first = works ? (there ? mine.data : a.shared.data) + begin * kFp4Chunk : nullptr;
    if constexpr (kEach > 0)
        ring.request_first<kEach * kFp4Chunk>(first);
    else
        ring.request_first(first, bytes);
    for (int b = threadIdx.x; b < a.chunks * 4; b += kThreads) {
        if (b != static_cast<int>(threadIdx.x)) {
            block = {};
            if (b * 16 < a.columns) block.load(a.h + b * 16);
        }
        block.store(row, b);
    }
    if constexpr (kChooses)
        if (blockIdx.x == 0) write_choice(a, chosen);
    __syncthreads();

    const uint8_t* x = row + 16 * (lane & 3) + begin * 128;
    const int turns = __popc(__ballot_sync(0xffffffffu, works));
    for (int turn = 0; turn < turns; ++turn) {
        const uint8_t* chunk = ring.wait();
        float acc[4] = {};
        const int chunks = kEach > 0 ? kEach : s.parts.end(warp) - begin;
#pragma unroll(kEach > 0 ? kEach : 1)
        for (int c = 0; c < chunks; ++c) multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc);
        ring.release();
        if ((lane & 3) == 0) {
            float* to = sums + (turn * kMostParts + warp) * kTileRows + (lane >> 2);
            to[0] = acc[0];
            to[8] = acc[2];
        }
    }
    __syncthreads();
    // A warp a turn; lanes r and r + 8 add the parts of gate and of up.
    for (int turn = warp; turn < s.turns; turn += kWarps) {
        const int at = __shfl_sync(0xffffffffu, choice, turn), expert = __shfl_sync(0xffffffffu, id, turn);
        const int index = __shfl_sync(0xffffffffu, own, turn), tile_index = index - (at + 1) * s.tiles;
        const Tile tile(a, expert, tile_index);
        if (index >= items) break;
        const float* from = sums + turn * kMostParts * kTileRows + lane % 16;
        const float sum = add_in_order(s.parts.count, [&](int p) { return from[p * kTileRows]; });
        const float value = tile.height > 0 ? sum * tile.factor[lane % 16] : 0.0f;
        const float up = __shfl_down_sync(0xffffffffu, value, 8);
        bf16* to = expert < 0 ? a.shared_out : a.routed + at * (a.experts.rows / 2);
        if (lane < min(8, tile.height)) to[tile_index * 8 + lane] = gated(value, up);
    }
}

// ---- more rows ----

struct GateUpWork {
    const GateUp& a;
    static constexpr bool kRowsFirst = true;  // both come late: the rows, which are fewer, before the weights

    __device__ __forceinline__ const bf16* row(bool is_shared, int index) const {
        return a.h + static_cast<int64_t>(is_shared ? index : quotient(index, a.used)) * a.columns;
    }
    __device__ __forceinline__ int width(bool) const { return a.columns; }
    __device__ __forceinline__ float weight(bool, int) const { return 0; }
    struct Target {
        bf16* to;
        int width;
    };
    __device__ __forceinline__ Target target(bool is_shared, int index, float) const {
        const int width = (is_shared ? a.shared.rows : a.experts.rows) / 2;
        return {(is_shared ? a.shared_out : a.routed) + static_cast<int64_t>(index) * width, width};
    }
    __device__ __forceinline__ void store(const Target& target, int tile, int r, float low, float high,
                                          float low_factor, float high_factor) const {
        const int at = tile * 8 + r;
        if (at < target.width) target.to[at] = gated(low * low_factor, high * high_factor);
    }
};

template <int kEach>
__global__ void __launch_bounds__(kThreads, 1) gate_up_few(GateUp a, Stream s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamShared k;
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own
                        // wait
    list_groups(k.list, a.groups, a.expert_count, a.experts.tiles > 0 ? a.rows * a.used : 0,
                a.shared.tiles > 0 ? a.rows : 0);
    stream_groups<kEach>(GateUpWork{a}, s, k, shared);
}

constexpr int kStatic = 8 * 1024;  // static shared memory at most

/// A launch of gate_up_one.
struct OneRow {
    Shape shape;
    int grid, bytes;

    OneRow(const Context& c, const GateUp& a)
        : shape{.parts = ChunkParts(a.chunks), .tiles = max(a.shared.tiles, a.experts.tiles)} {
        const int items = (a.used + 1) * shape.tiles;
        grid = min(c.sms, items);
        shape.depth = shape.turns = (items + grid - 1) / grid;
        shape.piece_bytes = shape.parts.each * kFp4Chunk;
        bytes = kWarps * shape.depth * shape.piece_bytes + fp4_row_bytes(a.chunks) +
                shape.turns * kMostParts * kTileRows * 4;
    }
};

template <bool kChooses>
void launch_one(Context& c, const GateUp& a, const OneRow& one) {
    const int each = a.chunks % one.shape.parts.each == 0 ? one.shape.parts.each : 0;
    const auto kernel = each == 1   ? gate_up_one<1, kChooses>
                        : each == 2 ? gate_up_one<2, kChooses>
                                    : gate_up_one<0, kChooses>;
    launch(c, "moe_gate_up", kernel, one.grid, kThreads, one.bytes, a, one.shape);
}

}  // namespace

bool gate_up_one_fits(const Context& c, const GateUp& a) {
    if (a.rows != 1 || a.experts.tiles == 0 || a.shared.tiles == 0) return false;
    const OneRow one(c, a);
    return one.bytes <= c.shared_bytes - kStatic && one.shape.depth <= kMostPieces;
}

bool gate_up_fp4(Context& c, const GateUp& a) {
    if (gate_up_one_fits(c, a)) {
        const OneRow one(c, a);
        if (a.left.logits != nullptr)
            launch_one<true>(c, a, one);
        else
            launch_one<false>(c, a, one);
        return true;
    }
    if (a.rows > kGroupRows || a.rows * a.used > kGroupPairs) return false;
    Stream stream{{a.experts.data, a.experts.factor, a.experts.expert_bytes, a.experts.tiles, a.chunks},
                  {a.shared.data, a.shared.factor, 0, a.shared.tiles, a.chunks}};
    if (!fit_stream(stream, c.shared_bytes - kStatic)) return false;
    const int tiles = a.rows * a.shared.tiles + a.rows * a.used * a.experts.tiles;
    const auto kernel = stream.each == 1   ? gate_up_few<1>
                        : stream.each == 2 ? gate_up_few<2>
                                           : gate_up_few<0>;
    launch(c, "moe_gate_up", kernel, min(c.sms, tiles), kThreads, stream.bytes(), a, stream);
    return true;
}

}  // namespace quern::cuda
