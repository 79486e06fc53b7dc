// moe_gate_up with NVFP4 weights and few rows. A tile of 16 packed rows holds 8 rows of gate and the same 8 of up.
//   one row: 16 warps share a tile, a part of its columns each, and meet once at the end; a block's weights are all under
//     way at the same time
//   more rows: a warp has a tile of its own for a group of up to 8 rows of an expert, and nobody waits
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
    int tiles;        // of an expert in the list: the larger of routed and shared
    int piece_parts;  // parts a piece
    int piece_bytes;
    int depth;
    int turns;        // tiles of a block; one row only
    int step_groups, step_tiles;  // from an item of a warp to its next; more rows only
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
        factor = shared ? a.shared.factor + tile * kTileRows : a.experts.factor + (expert * a.experts.tiles + tile) * kTileRows;
        height = (shared ? a.shared.rows : a.experts.rows) / 2 - tile * 8;
    }
};

// ---- one row ----

__global__ void __launch_bounds__(kThreads, 1) gate_up_one(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* row = shared + kWarps * s.depth * s.piece_bytes;
    float* sums = reinterpret_cast<float*>(row + fp4_row_bytes(a.chunks));  // [turn][part][16]
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    // Items: the tiles of the shared expert (choice -1), of choice 0 ...
    const int items = (a.used + 1) * s.tiles;
    const int begin = s.parts.begin(warp), bytes = (s.parts.end(warp) - begin) * kFp4Chunk;
    const int own = blockIdx.x + lane * gridDim.x, choice = own / s.tiles - 1;  // of turn `lane`
    const bool works = warp < s.parts.count && own < items;
    wait_for_predecessor();
    allow_successor();  // only now: the successor may then read what our predecessor wrote before its own wait
    const int id = choice >= 0 && choice < a.used ? __ldcg(a.ids + choice) : -1;
    Fp4Block block;
    if (threadIdx.x * 16 < static_cast<unsigned>(a.columns)) block.load(a.h + threadIdx.x * 16);
    const Tile mine(a, id, own - (choice + 1) * s.tiles);
    // A ring has a place for every turn: nothing is asked for later.
    const bool there = works && mine.height > 0;
    ring.request_first(works ? (there ? mine.data : a.shared.data) + begin * kFp4Chunk : nullptr, bytes);
    for (int b = threadIdx.x; b < a.chunks * 4; b += kThreads) {
        if (b != static_cast<int>(threadIdx.x)) {
            block = {};
            if (b * 16 < a.columns) block.load(a.h + b * 16);
        }
        block.store(row, b);
    }
    __syncthreads();

    const uint8_t* x = row + 16 * (lane & 3) + begin * 128;
    const int turns = __popc(__ballot_sync(0xffffffffu, works));
    for (int turn = 0; turn < turns; ++turn) {
        const uint8_t* chunk = ring.wait();
        float acc[4] = {};
#pragma unroll 2
        for (int c = 0; c < s.parts.end(warp) - begin; ++c) multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc);
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

/// A warp's place in the list of items: tiles of the first group, then of the second ...
struct Item {
    int group, tile;

    __device__ __forceinline__ void advance(const Shape& s) {
        group += s.step_groups;
        tile += s.step_tiles;
        if (tile >= s.tiles) tile -= s.tiles, ++group;
    }
    /// To the next one that exists, from here on.
    __device__ __forceinline__ bool settle(const GateUp& a, const Shape& s, const ExpertGroups& list) {
        while (group < list.count && tile >= (list.group[group].expert < 0 ? a.shared.tiles : a.experts.tiles)) advance(s);
        return group < list.count;
    }
};

__global__ void __launch_bounds__(kThreads, 1) gate_up_few(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMostPieces];
    __shared__ ExpertGroups list;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2;
    const int row_bytes = fp4_row_bytes(a.chunks), blocks = a.chunks * 4;
    uint8_t* rows = shared + kWarps * s.depth * s.piece_bytes;
    PieceRing ring(shared + warp * s.depth * s.piece_bytes, barriers[warp], s.piece_bytes, s.depth, lane);
    // neighbouring tiles go to different blocks: work is even when there is little
    const int first = warp * gridDim.x + blockIdx.x;
    Item item{first / s.tiles, first % s.tiles};
    wait_for_predecessor();
    allow_successor();
    // Asked for before the weights, which would be in the way.
    const auto load_block = [&](Fp4Block& block, int b) {
        const int n = b / blocks, k = b - n * blocks;
        if (n < a.rows && k * 16 < a.columns) block.load(a.h + static_cast<int64_t>(n) * a.columns + k * 16);
    };
    const auto store_block = [&](const Fp4Block& block, int b) {
        const int n = b / blocks;
        if (n < a.rows) block.store(rows + n * row_bytes, b - n * blocks);
    };
    Fp4Block early[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) load_block(early[i], threadIdx.x + i * kThreads);
    list_groups(list, a.groups, a.expert_count, a.experts.tiles > 0 ? a.rows * a.used : 0, a.shared.tiles > 0 ? a.rows : 0);
#pragma unroll
    for (int i = 0; i < 2; ++i) store_block(early[i], threadIdx.x + i * kThreads);
#pragma unroll 2
    for (int b = threadIdx.x + 2 * kThreads; b < a.rows * blocks; b += kThreads) {
        Fp4Block block;
        load_block(block, b);
        store_block(block, b);
    }

    Item ahead = item;
    int part = 0;
    bool more = ahead.settle(a, s, list);
    const uint8_t* from = more ? Tile(a, list.group[ahead.group].expert, ahead.tile).data : nullptr;
    const auto request = [&] {
        if (!more) return;
        const int end = min(part + s.piece_parts, s.parts.count);
        const int bytes = (s.parts.end(end - 1) - s.parts.begin(part)) * kFp4Chunk;
        ring.request(from, bytes);
        from += bytes;
        part = end;
        if (part < s.parts.count) return;
        part = 0;
        ahead.advance(s);
        more = ahead.settle(a, s, list);
        if (more) from = Tile(a, list.group[ahead.group].expert, ahead.tile).data;
    };
#pragma unroll 1
    for (int i = 0; i < s.depth; ++i) request();
    __syncthreads();

    for (; item.settle(a, s, list); item.advance(s)) {
        const ExpertGroup group = list.group[item.group];
        const bool is_shared = group.expert < 0;
        const auto pair_of = [&](int i) {
            const int at = group.first + min(i, group.count - 1);
            return is_shared ? at : static_cast<int>(list.pair[at]);
        };
        const Tile tile(a, group.expert, item.tile);
        const float gate_factor = tile.factor[g], up_factor = tile.factor[g + 8];
        const uint8_t* x = rows + (is_shared ? pair_of(g) : pair_of(g) / a.used) * row_bytes + 16 * (lane & 3);
        float acc[4];
        if (group.count == 1)
            sum_tile<true>(ring, s.parts, s.piece_parts, x, lane, request, acc);
        else
            sum_tile<false>(ring, s.parts, s.piece_parts, x, lane, request, acc);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int n = 2 * (lane & 3) + i;
            if (n >= group.count || g >= tile.height) continue;
            bf16* to = is_shared ? a.shared_out + pair_of(n) * (a.shared.rows / 2)
                                 : a.routed + pair_of(n) * (a.experts.rows / 2);
            to[item.tile * 8 + g] = gated(acc[i] * gate_factor, acc[2 + i] * up_factor);
        }
    }
}

}  // namespace

bool gate_up_fp4(Context& c, const GateUp& a) {
    Shape s{.parts = ChunkParts(a.chunks), .tiles = max(a.shared.tiles, a.experts.tiles), .piece_parts = 1};
    const int row_bytes = fp4_row_bytes(a.chunks), part_bytes = s.parts.each * kFp4Chunk;
    const int limit = c.shared_bytes - 8 * 1024;  // static shared memory
    if (a.rows == 1) {
        const int items = (a.used + 1) * s.tiles, grid = min(c.sms, items);
        s.depth = s.turns = (items + grid - 1) / grid;
        s.piece_bytes = part_bytes;
        const int bytes = kWarps * s.depth * part_bytes + row_bytes + s.turns * kMostParts * kTileRows * 4;
        if (bytes <= limit && s.depth <= kMostPieces && a.experts.tiles > 0 && a.shared.tiles > 0) {
            launch(c, "moe_gate_up", gate_up_one, grid, kThreads, bytes, a, s);
            return true;
        }
    }
    const int rest = a.rows * row_bytes;
    const auto bytes = [&] { return kWarps * s.depth * s.piece_bytes + rest; };
    s.depth = 2;
    for (s.piece_parts = 4;; s.piece_parts /= 2) {
        s.piece_bytes = s.piece_parts * part_bytes;
        if (bytes() <= limit) break;
        if (s.piece_parts == 1) return false;
    }
    const int items = (1 + min(a.rows * a.used, a.expert_count)) * s.tiles, grid = min(c.sms, items);
    s.step_groups = grid * kWarps / s.tiles;
    s.step_tiles = grid * kWarps % s.tiles;
    launch(c, "moe_gate_up", gate_up_few, grid, kThreads, bytes(), a, s);
    return true;
}

}  // namespace quern::cuda
