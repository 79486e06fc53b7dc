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

/// One warp: the row's ids, and of lane j the ordered bits of choice j.
__device__ __forceinline__ uint32_t choose(const GateUp& a, int* ids) {
    const LeftChoice& left = a.left;
    uint32_t mine = 0;
    if (!choose_sorted<kLeftEach>(left.logits, left.experts, a.used, ids, mine))
        mine = choose_slowly<kLeftEach>(left.logits, left.experts, a.used, ids);
    return mine;
}

/// The same warp of one block: what moe_route left out, and what moe_down waits for.
__device__ __forceinline__ void write_choice(const GateUp& a, const int* ids, uint32_t mine) {
    const LeftChoice& to = a.left;
    const int lane = threadIdx.x % 32, id = lane < a.used ? ids[lane] : 0;
    const float weight = weight_of(mine, a.used);
    const float gate = gate_of(__ldcg(to.logits + to.experts));
    if (lane < a.used) publish(to.chosen + lane, {id, weight});
    if (lane == 0) publish(to.chosen + a.used, {0, gate}), *to.shared = gate;
    if (lane < a.used) to.ids[lane] = id, to.weights[lane] = weight;
#pragma unroll 1
    for (int e = lane; e <= to.experts; e += 32) {
        int before = 0;
#pragma unroll 1
        for (int j = 0; j < a.used; ++j) before += ids[j] < e;
        to.groups[e] = before;
    }
    int place = 0;
#pragma unroll 1
    for (int j = 0; j < a.used; ++j) place += ids[j] < id;
    if (lane < a.used) to.groups[to.experts + 1 + place] = lane;
}

/// kEach: chunks of every part; 0: of most. kChooses: ids come from a.left.
template <int kEach, bool kChooses>
__global__ void __launch_bounds__(kThreads, 1) gate_up_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ int ids[kMostUsed];
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
    uint32_t bits = 0;
    if constexpr (kChooses) {
        if (warp == kWarps - 1) bits = choose(a, ids);
        __syncthreads();
        if (routed) id = ids[choice];
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
        if (blockIdx.x == gridDim.x - 1 && warp == kWarps - 1) write_choice(a, ids, bits);
    __syncthreads();

    const uint8_t* x = row + 16 * (lane & 3) + begin * 128;
    // The end: warp `warp` adds up the tile of that turn. Lanes r and r + 8 have rows of gate and of up.
    const int end_at = __shfl_sync(0xffffffffu, choice, warp), end_id = __shfl_sync(0xffffffffu, id, warp),
              end_item = __shfl_sync(0xffffffffu, own, warp);
    const Tile last(a, end_id, end_item - (end_at + 1) * s.tiles);
    const bool adds = warp < s.turns && end_item < items;
    const float factor = adds && last.height > 0 ? last.factor[lane % 16] : 0.0f;
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
    if (!adds) return;
    const float* from = sums + warp * kMostParts * kTileRows + lane % 16;
    const float value = last.height > 0 ? factor * add_in_order(s.parts.count, from, kTileRows) : 0.0f;
    const float up = __shfl_down_sync(0xffffffffu, value, 8);
    bf16* to = end_id < 0 ? a.shared_out : a.routed + end_at * (a.experts.rows / 2);
    if (lane < min(8, last.height)) to[(end_item - (end_at + 1) * s.tiles) * 8 + lane] = gated(value, up);
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
