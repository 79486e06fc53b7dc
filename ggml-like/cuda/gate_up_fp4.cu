// moe_gate_up with NVFP4 weights and few rows. A tile of 16 packed rows holds 8 rows of gate and the same 8 of up.
//   one row: 16 warps share a tile, a part of its columns each, and meet once at the end; a block's weights are all under
//     way at the same time
//   more rows: a warp has a tile of its own for a group of up to 4 rows of an expert, and nobody waits
// Both add the same parts in the same order. Traffic: the weights of each needed expert once (again from L2 for an
// expert's groups after its first).
#include "ggml-like/cuda/expert_groups.cuh"
#include "ggml-like/cuda/few_rows.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe.h"

namespace quern::cuda {
namespace {

struct Shape {
    ChunkParts parts;
    int piece_parts;  // parts a piece
    int piece_bytes;
    int depth;
    int turns;  // tiles of a block; one row only
};

__device__ __forceinline__ bf16 gated(float gate, float up) {
    return __float2bfloat16(gate / (1.0f + __expf(-gate)) * up);
}

struct Tile {
    const uint8_t* data;
    const float* factor;
    int height;  // rows of the output that it has
};

__device__ __forceinline__ Tile find_tile(const GateUp& a, int expert, int tile) {
    if (expert < 0)
        return {a.shared.data + static_cast<int64_t>(tile) * a.chunks * kFp4Chunk, a.shared.factor + tile * kTileRows,
                a.shared.rows / 2 - tile * 8};
    return {a.experts.data + expert * a.experts.expert_bytes + static_cast<int64_t>(tile) * a.chunks * kFp4Chunk,
            a.experts.factor + (expert * a.experts.tiles + tile) * kTileRows, a.experts.rows / 2 - tile * 8};
}

// ---- one row ----

/// Item `index` of a step of one row: the shared expert's tiles, then those of choice 0, 1 ...
struct OneItem {
    int choice;  // -1: the shared expert
    int tile;

    __device__ __forceinline__ OneItem(const GateUp& a, int index) {
        choice = -1, tile = index;
        if (index < a.shared.tiles) return;
        choice = (index - a.shared.tiles) / a.experts.tiles;
        tile = index - a.shared.tiles - choice * a.experts.tiles;
    }
};

__global__ void __launch_bounds__(kThreads, 1) gate_up_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ uint32_t most[kWarps];
    __shared__ int ids[32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* row = shared + kWarps * s.depth * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(row + fp4_row_bytes(a.chunks));  // [turn][part][16 rows][4 numbers]
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    const int items = a.shared.tiles + a.used * a.experts.tiles;
    const int begin = s.parts.begin(warp), bytes = (s.parts.end(warp) - begin) * kFp4Chunk;
    const bool works = warp < s.parts.count;
    int id = 0;  // of choice `lane`
    int ahead = blockIdx.x;
    const auto request = [&] {
        if (!works || ahead >= items) return;
        const OneItem item(a, ahead);
        const int expert = item.choice < 0 ? -1 : __shfl_sync(0xffffffffu, id, item.choice);
        ring.request(find_tile(a, expert, item.tile).data + begin * kFp4Chunk, bytes);
        ahead += gridDim.x;
    };
    if (ahead < a.shared.tiles) request();
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own wait
    if (lane < a.used && a.experts.tiles > 0) id = __ldcg(a.ids + lane);
    Fp4Unit unit;
    const int units = a.chunks * 16;
    if (static_cast<int>(threadIdx.x) < units) unit.load(a.h, threadIdx.x, a.columns);
    while (ahead < items && ahead < static_cast<int>(blockIdx.x + s.depth * gridDim.x) && works) request();
    if (warp == 0) ids[lane] = id;

    uint32_t largest = unit.most();
    for (int u = threadIdx.x + kThreads; u < units; u += kThreads) {
        Fp4Unit other;
        other.load(a.h, u, a.columns);
        largest = max(largest, other.most());
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) most[warp] = largest;
    __syncthreads();
    largest = __reduce_max_sync(0xffffffffu, most[lane % kWarps]);
    const Fp4Scale scale(largest);
    if (static_cast<int>(threadIdx.x) < units) unit.store(row, threadIdx.x, scale.up);
    for (int u = threadIdx.x + kThreads; u < units; u += kThreads) {
        Fp4Unit other;
        other.load(a.h, u, a.columns);
        other.store(row, u, scale.up);
    }
    __syncthreads();

    const Fp4Columns x(lane, [&](int) { return row; });
    int turn = 0;
    for (int index = blockIdx.x; index < items && works; index += gridDim.x, ++turn) {
        const uint8_t* chunk = ring.wait();
        float acc[2][4] = {};
        for (int c = begin; c < s.parts.end(warp); ++c, chunk += kFp4Chunk) multiply_fp4<false>(chunk, x, c, lane, acc);
        ring.release();
        request();
        if ((lane & 3) < 2) {
            const Fp4Raw raw(acc, lane);
            float2* to = reinterpret_cast<float2*>(sums + (turn * kMostParts + warp) * 64 + (lane >> 2) * 4) + (lane & 1);
            to[0] = raw.low;
            to[16] = raw.high;
        }
    }
    __syncthreads();
    // A warp a tile: lane 4r + i adds number i of gate row r and of up row r.
    for (turn = warp; turn < s.turns; turn += kWarps) {
        const int index = blockIdx.x + turn * gridDim.x;
        if (index >= items) break;
        const OneItem item(a, index);
        const Tile tile = find_tile(a, item.choice < 0 ? -1 : ids[item.choice], item.tile);
        const int r = lane >> 2;
        const float gate_factor = tile.factor[r] * kFp4Lift * scale.down, up_factor = tile.factor[r + 8] * kFp4Lift * scale.down;
        const float* from = sums + turn * kMostParts * 64 + lane;
        const float gate = join_fp4(add_parts(s.parts.count, [&](int p) { return from[p * 64]; }), lane) * gate_factor;
        const float up = join_fp4(add_parts(s.parts.count, [&](int p) { return from[p * 64 + 32]; }), lane) * up_factor;
        bf16* to = item.choice < 0 ? a.shared_out : a.routed + item.choice * (a.experts.rows / 2);
        if ((lane & 3) == 0 && r < tile.height) to[item.tile * 8 + r] = gated(gate, up);
    }
}

// ---- more rows ----

struct ManyItem {
    int group;
    int tile;

    __device__ __forceinline__ ManyItem(const GateUp& a, int shared_groups, int index) {
        const int shared_items = shared_groups * a.shared.tiles;
        const bool is_shared = index < shared_items;
        const int at = is_shared ? index : index - shared_items, tiles = is_shared ? a.shared.tiles : a.experts.tiles;
        const int g = at / tiles;
        group = is_shared ? g : g + shared_groups;
        tile = at - g * tiles;
    }
};

__global__ void __launch_bounds__(kThreads, 1) gate_up_few(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ ExpertGroups list;
    __shared__ float scales[kFewRows];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2;
    const int row_bytes = fp4_row_bytes(a.chunks);
    uint8_t* rows = shared + kWarps * s.depth * s.piece_bytes;
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    wait_for_predecessor();
    allow_successor();
    const int shared_groups = a.shared.tiles > 0 ? (a.rows + kPassRows - 1) / kPassRows : 0;
    list_groups(list, a.groups, a.expert_count, a.experts.tiles > 0 ? a.rows * a.used : 0, shared_groups > 0 ? a.rows : 0);
    const int items = shared_groups * a.shared.tiles + (list.count - shared_groups) * a.experts.tiles;
    // neighbouring tiles go to different blocks: work is even when there is little
    const int first = warp * gridDim.x + blockIdx.x, by = gridDim.x * kWarps;

    int ahead = first, part = 0;
    const uint8_t* from = nullptr;
    const auto request = [&] {
        if (ahead >= items) return;
        if (part == 0) {
            const ManyItem item(a, shared_groups, ahead);
            from = find_tile(a, list.group[item.group].expert, item.tile).data;
        }
        const int end = min(part + s.piece_parts, s.parts.count);
        const int bytes = (s.parts.end(end - 1) - s.parts.begin(part)) * kFp4Chunk;
        ring.request(from, bytes);
        from += bytes;
        part = end;
        if (part == s.parts.count) part = 0, ahead += by;
    };
    for (int i = 0; i < s.depth; ++i) request();
    if (warp < a.rows) {
        const float scale = load_fp4_row(rows + warp * row_bytes, a.h + static_cast<int64_t>(warp) * a.columns, a.columns,
                                         a.chunks, lane);
        if (lane == 0) scales[warp] = scale;
    }
    __syncthreads();

    for (int index = first; index < items; index += by) {
        const ManyItem item(a, shared_groups, index);
        const ExpertGroup group = list.group[item.group];
        const auto pair_of = [&](int i) {
            const int at = group.first + min(i, group.count - 1);
            return group.expert < 0 ? at : static_cast<int>(list.pair[at]);
        };
        const auto row_of = [&](int i) { return group.expert < 0 ? pair_of(i) : pair_of(i) / a.used; };
        const Tile tile = find_tile(a, group.expert, item.tile);
        const float gate_factor = tile.factor[g] * kFp4Lift, up_factor = tile.factor[g + 8] * kFp4Lift;
        const Fp4Columns x(lane, [&](int i) { return rows + row_of(i) * row_bytes; });
        float acc[2][4] = {};
        if (group.count > 2)
            sum_tile<true>(ring, s.parts, s.piece_parts, x, lane, request, acc);
        else
            sum_tile<false>(ring, s.parts, s.piece_parts, x, lane, request, acc);
        const Fp4Sums sums(acc);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int n = Fp4Sums::row(lane, i);
            if (n >= group.count || g >= tile.height) continue;
            const float scale = scales[row_of(n)];
            bf16* to = group.expert < 0 ? a.shared_out + pair_of(n) * (a.shared.rows / 2)
                                        : a.routed + pair_of(n) * (a.experts.rows / 2);
            to[item.tile * 8 + g] = gated(sums.low[i] * (gate_factor * scale), sums.high[i] * (up_factor * scale));
        }
    }
}

}  // namespace

bool gate_up_fp4(Context& c, const GateUp& a) {
    Shape s{.parts = ChunkParts(a.chunks), .piece_parts = 1};
    const int row_bytes = fp4_row_bytes(a.chunks), part_bytes = s.parts.each * kFp4Chunk;
    const auto bytes = [&](int rest) { return kWarps * s.depth * s.piece_bytes + rest; };
    const int limit = c.shared_bytes - 8 * 1024;  // static shared memory
    if (a.rows == 1) {
        const int items = a.shared.tiles + a.used * a.experts.tiles, grid = min(c.sms, items);
        s.turns = (items + grid - 1) / grid;
        s.piece_bytes = part_bytes;
        const int rest = row_bytes + s.turns * kMostParts * 64 * static_cast<int>(sizeof(float));
        for (s.depth = min(s.turns, kMostPieces); s.depth > 1 && bytes(rest) > limit; --s.depth) {}
        if (a.used > 32 || bytes(rest) > limit) return false;
        launch(c, "moe_gate_up", gate_up_one, grid, kThreads, bytes(rest), a, s);
        return true;
    }
    const int rest = a.rows * row_bytes;
    s.depth = 2;
    for (s.piece_parts = 4;; s.piece_parts /= 2) {
        s.piece_bytes = s.piece_parts * part_bytes;
        if (bytes(rest) <= limit) break;
        if (s.piece_parts == 1) return false;
    }
    const int items = a.shared.tiles + min(a.rows * a.used, a.expert_count) * a.experts.tiles;
    launch(c, "moe_gate_up", gate_up_few, min(c.sms, items), kThreads, bytes(rest), a, s);
    return true;
}

}  // namespace quern::cuda
