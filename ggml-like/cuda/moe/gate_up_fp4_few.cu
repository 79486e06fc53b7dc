// moe_gate_up with NVFP4 weights and 2 to 8 answer rows; it also chooses the experts.
//
//   tile = 8 rows of gate and the same 8 of up, for the up to 8 rows of x that chose its expert
//
//   all tiles   | shared: 0 .. 63 | first group: 0 .. 63 | second group ...     tile i to block 1 + i % (blocks - 1)
//   a block     its tiles, one after another; 16 warps share each, a split of its columns each
//               a 17th warp plans: groups, the block's tiles, and asks the copy engine for them, a few at a time
//   epilogue    a thread adds the splits of one sum in order: a column of sums (a tile and one of its rows of x) has 16
//
//   Every block chooses, as in gate_up_fp4_one.cu. The first block has no tiles: it writes the choice's results and tells `down`.
//   The others store their sums twice, once permuted as `down` holds them in shared memory (GateUp::permuted).
//   Blocks hold all rows of x, which come after the choice, while the first weights do.
//
// Shared memory: a ring of whole tiles (four of 18 KB), rows of x, all sums of the block; before that, candidates of the choice.
//
// Traffic: the weights of each needed expert once for its up to 8 rows. Bound: bytes, from the moment they can be asked for. Of
// 4 rows (39 MB): 2.1 us until then, 0.9 until they come, 8.2 products, 0.8 end (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/moe/few_choice.cuh"
#include "ggml-like/cuda/moe/gate_up_fp4.h"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

using Launch = GateUpFewLaunch;
constexpr int kPlanner = kWarps;  // the warp that plans
constexpr int kFewThreads = kThreads + 32;

struct Shape {
    ColumnSplits splits;
    int depth;  // tiles on their way
};

/// A tile of the block: the place in x_at of its first row, its rows, its first column of sums.
struct FewTile {
    int x, count, column;
};
/// A column of sums: its tile's place in the factors; its pair, or ~row of the shared expert; its row in GateUp::permuted.
struct FewColumn {
    int factor, index, place;
};

struct Memory {
    uint64_t full[Launch::kMaxDepth], empty[Launch::kMaxDepth];  // of the ring
    FewChoices chosen;
    union {
        FewGroups groups;
        ChoiceList list;  // of the first block
    };
    int x_at[kFewStepRows +
             kFewPairs];  // bytes before a row of x: rows of the shared expert, then of pairs by group
    FewTile tile[Launch::kMaxTiles];
    FewColumn column[Launch::kMaxColumns];
    int tiles, columns;
};

/// A barrier: all have chosen, and the planner may plan.
__device__ __forceinline__ void choices_complete(int rows) {
    asm volatile("bar.arrive 1, %0;" ::"r"((rows + 1) * 32) : "memory");
}
__device__ __forceinline__ void await_choices(int rows) {
    asm volatile("bar.sync 1, %0;" ::"r"((rows + 1) * 32) : "memory");
}

/// The planner's part.
struct Plan {
    const GateUp& a;
    const Shape& s;
    Memory& m;
    uint8_t* ring;
    const uint8_t* source = nullptr;  // of the tile whose number is the lane's
    int bytes, tiles = 0;             // of a tile; of the block

    __device__ __forceinline__ Plan(const GateUp& arguments, const Shape& shape, Memory& memory,
                                    uint8_t* data)
        : a(arguments), s(shape), m(memory), ring(data), bytes(a.chunks * kFp4Chunk) {}
    /// Before the wait: announces the first tiles; asks for the first one, if it is one of the shared expert's.
    __device__ __forceinline__ void begin() const {
        const int lane = threadIdx.x % 32;
        if (lane < s.depth) arrive_and_expect(m.full + lane, bytes);
        __syncwarp();
        if (begins_early() && lane == 0) copy(0, shared_tile(block()));
    }
    /// When all choices are complete, for which it waits: the block's tiles; asks for the first of them.
    __device__ __forceinline__ void make() {
        const int lane = threadIdx.x % 32, at = block() + lane * blocks();
        const bool of_shared = at < a.shared.tiles;
        const Divisor each(a.experts.tiles);
        const int routed = max(0, at - a.shared.tiles), number = each.quotient(routed);
        const int tile = of_shared ? at : routed - number * each.by();
        await_choices(a.rows);
        const int groups = group_choices(m.chosen, m.groups);
        const int all = a.shared.tiles + groups * a.experts.tiles;
        const int expert = m.groups.group[of_shared || at >= all ? kFewPairs : number].expert;
        source = of_shared
                     ? shared_tile(tile)
                     : a.experts.data + expert * a.experts.expert_bytes + static_cast<int64_t>(tile) * bytes;
        tiles = __popc(__ballot_sync(0xffffffffu, at < all));
#pragma unroll
        for (int i = 0; i < Launch::kMaxDepth; ++i)
            if (i < min(tiles, s.depth)) copy_tile(i, i, i == 0 && begins_early());
        group_pairs(m.chosen, a.rows * a.used, a.used, m.groups);
        FewGroup group = {0, 0, 0};
        if (at < all) group = of_shared ? FewGroup{0, static_cast<short>(a.rows), 0} : m.groups.group[number];
        list_columns(of_shared, group, (group.expert * a.experts.tiles + tile) * kTileRows);
        const int row_bytes = fp4_row_bytes(a.chunks), pairs = a.rows * a.used;
        if (lane < a.rows) m.x_at[lane] = lane * row_bytes;
        for (int p = lane; p < pairs; p += 32)
            m.x_at[a.rows + p] = quotient(m.groups.pair[p], a.used) * row_bytes;
    }
    /// Asks for the other tiles, each when all warps have read what is in its place.
    __device__ __forceinline__ void run() const {
        int stage = 0;
        uint32_t parity = 0;
#pragma unroll 1
        for (int i = s.depth; i < tiles; ++i) {
            wait_phase(m.empty + stage, parity);
            if (elected()) arrive_and_expect(m.full + stage, bytes);
            copy_tile(stage, i, false);
            if (++stage == s.depth) stage = 0, parity ^= 1;
        }
    }

  private:
    __device__ __forceinline__ static int blocks() { return static_cast<int>(gridDim.x) - 1; }
    __device__ __forceinline__ static int block() { return static_cast<int>(blockIdx.x) - 1; }
    __device__ __forceinline__ bool begins_early() const { return block() < a.shared.tiles; }
    __device__ __forceinline__ const uint8_t* shared_tile(int tile) const {
        return a.shared.data + static_cast<int64_t>(tile) * bytes;
    }
    /// The whole warp: asks for the tile of lane `i`, unless that has been done.
    __device__ __forceinline__ void copy_tile(int stage, int i, bool is_there) const {
        const auto from = reinterpret_cast<const uint8_t*>(
            __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(source), i));
        if (!is_there && elected()) copy(stage, from);
    }
    __device__ __forceinline__ void copy(int stage, const uint8_t* from) const {
        copy_bytes(ring + stage * bytes, from, bytes, m.full + stage);
    }
    /// Of the lane's tile, for `group`.
    __device__ __forceinline__ void list_columns(bool of_shared, const FewGroup& group, int factor) const {
        const int lane = threadIdx.x % 32;
        int end = group.count;  // columns of the tiles up to the lane's
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, end, d);
            if (lane >= d) end += other;
        }
        if (lane == 31) m.tiles = tiles, m.columns = end;
        const int column = end - group.count;
        m.tile[lane] = {of_shared ? 0 : a.rows + group.first, group.count, column};
#pragma unroll 1
        for (int c = 0; c < group.count; ++c)
            m.column[column + c] =
                of_shared ? FewColumn{factor, ~c, c}
                          : FewColumn{factor, m.groups.pair[group.first + c], a.rows + group.first + c};
    }
};
static_assert(Launch::kMaxTiles == 32, "a lane a tile");
static_assert(sizeof(RowCandidates) <= 2 * Launch::kColumn * sizeof(float),
              "a row has two columns of sums or more");

/// Rows of x on their way into shared memory, a warp a piece at a time.
struct RowPieces {
    static constexpr int kMost = 4;
    static_assert(kMost * kWarps * kFp4PieceChunks >= kFewStepRows * kGateUpEach * kMaxSplits);
    const GateUp& a;
    int each, all;  // pieces of a row, of all rows
    Fp4Piece x[kMost];

    __device__ __forceinline__ explicit RowPieces(const GateUp& arguments)
        : a(arguments), each(a.chunks * kChunkCols / Fp4Piece::kNumbers), all(a.rows * each) {}
    __device__ __forceinline__ void load() {
        const Divisor of_row(each);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const int p = threadIdx.x / 32 + i * kWarps, row = of_row.quotient(p);
            const int column = (p - row * each) * Fp4Piece::kNumbers;
            if (p >= all) break;
            if (column + 8 * static_cast<int>(threadIdx.x % 32) < a.columns)
                x[i].load(a.h + static_cast<int64_t>(row) * a.columns + column);
        }
    }
    __device__ __forceinline__ void store(uint8_t* rows) const {
        const Divisor of_row(each);
#pragma unroll
        for (int i = 0; i < kMost; ++i) {
            const int p = threadIdx.x / 32 + i * kWarps, row = of_row.quotient(p);
            if (p >= all) break;
            x[i].store(rows + row * fp4_row_bytes(a.chunks) + (p - row * each) * Fp4Piece::kBytes);
        }
    }
};

/// Where a lane's first logit of the row that its warp chooses for is.
__device__ __forceinline__ const long long* logits_of_lane(const Choice& to) {
    return reinterpret_cast<const long long*>(to.logits.sums) +
           static_cast<int64_t>(threadIdx.x / 32) * to.logits.pitch + threadIdx.x % 32;
}

/// The multiplying warps: of the first eight one chooses for each row, of the others one adds up each row's squares, and all load rows
/// of x. logits: of the lane; gate_logit: of the shared expert; of the first block.
__device__ __forceinline__ void choose_and_load(const GateUp& a, Memory& m, RowCandidates* candidates,
                                                uint8_t* rows, const long long* logits, float& gate_logit) {
    const Choice& to = a.choice;
    const int warp = threadIdx.x / 32, measured = warp - kWarps / 2;
    const bool chooses = warp < a.rows, measures = measured >= 0 && measured < a.rows;
    if (chooses) {
        RowLogits own;
        own.load(logits, to.experts);
        if (blockIdx.x == 0) gate_logit = sum_of(__ldcg(logits - threadIdx.x % 32 + to.experts));
        choose_few(own, to.experts, a.used, candidates[warp], [&](int rank, int id, uint32_t key) {
            const int at = warp * a.used + rank;
            m.chosen.ids[at] = id, m.chosen.keys[at] = key;
            atomicOr(m.chosen.rows_of + id, 8u << 4 * warp);
        });
        __syncwarp();  // one lane's arrival stands for all
        choices_complete(a.rows);
    }
    SquaresOfRow<4> squares;
    if (measures) squares.load(to.scale, measured);
    RowPieces pieces(a);  // not sooner, lest the logits queue behind them
    pieces.load();
    if (measures) {
        const float factor = norm_factor(to.scale, squares.sum(to.scale, measured));
        if (threadIdx.x % 32 == 0) m.chosen.scale[measured] = factor;
    }
    pieces.store(rows);
}
static_assert(kFewStepRows <= kWarps / 2);

/// The whole first block: the results of the choice.
__device__ __forceinline__ void write_choices(const GateUp& a, Memory& m, float gate_logit) {
    const Choice& to = a.choice;
    const FewChoices& from = m.chosen;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32;
    if (row < a.rows) {
        const int at = row * a.used + lane;
        const float factor = from.scale[row], gate = gate_of(gate_logit * factor);
        const float weight = weight_of(lane < a.used ? from.keys[at] : 0, a.used, factor);
        if (lane < a.used) to.ids[at] = from.ids[at], to.weights[at] = weight;
        if (lane == 0) to.shared_gate[row] = gate;
    }
    __syncthreads();
    tell_choices(to, m.list);
    group_few(from.ids, a.rows * a.used, to.experts, to.groups);
}

/// One warp: its split of the block's tiles, as they come; sums into [column][split][16].
__device__ __forceinline__ void multiply(const GateUp& a, const Shape& s, Memory& m, const uint8_t* ring,
                                         const uint8_t* rows, float* sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    const int tile_bytes = a.chunks * kFp4Chunk, tiles = m.tiles;
    rows += s.splits.begin(warp) * 128 + 16 * t;
    ring += s.splits.begin(warp) * kFp4Chunk;
    sums += warp * kTileRows + g;
    int stage = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
        const FewTile tile = m.tile[i];
        // With up to four rows, row i is columns 2i and 2i + 1 of the products, and only the first is summed.
        const bool half = tile.count <= kPassRows / 2;
        const uint8_t* x = rows + m.x_at[tile.x + min(half ? g / 2 : g, tile.count - 1)];
        const uint8_t* chunk = ring + stage * tile_bytes;
        float* to = sums + tile.column * Launch::kColumn;
        float acc[4] = {};
        wait_phase(m.full + stage, parity);
        if (half) {
#pragma unroll
            for (int c = 0; c < kGateUpEach; ++c)
                multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc);
            if (t < tile.count) {
                to += t * Launch::kColumn;
                to[0] = acc[0], to[8] = acc[2];
            }
        } else {
#pragma unroll
            for (int c = 0; c < kGateUpEach; ++c)
                multiply_fp4<false>(chunk + c * kFp4Chunk, x + c * 128, lane, acc);
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (2 * t + c < tile.count) {
                    float* of_row = to + (2 * t + c) * Launch::kColumn;
                    of_row[0] = acc[c], of_row[8] = acc[2 + c];
                }
        }
        __syncwarp();
        if (lane == 0) arrive(m.empty + stage);
        if (++stage == s.depth) stage = 0, parity ^= 1;
    }
}

/// The epilogue: 16 threads have the 16 rows of a column, kEach columns each.
struct Columns {
    static constexpr int kTogether = kThreads / kTileRows;
    static constexpr int kEach = Launch::kMaxColumns / kTogether;
    static_assert(Launch::kMaxColumns % kTogether == 0);
    const GateUp& a;
    const Memory& m;
    float factors[kEach];

    __device__ __forceinline__ static int number(int i) { return threadIdx.x / kTileRows + i * kTogether; }
    /// The factors of the weights' rows are asked for early.
    __device__ __forceinline__ Columns(const GateUp& arguments, const Memory& memory)
        : a(arguments), m(memory) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            factors[i] = 0;
            if (number(i) >= m.columns) continue;
            const FewColumn own = m.column[number(i)];
            factors[i] =
                (own.index < 0 ? a.shared.factor : a.experts.factor)[own.factor + threadIdx.x % kTileRows];
        }
    }
    __device__ __forceinline__ void store(int splits, const float* sums) const {
        const int r = threadIdx.x % kTileRows;
#pragma unroll 1
        for (int i = 0; i * kTogether < m.columns; ++i) {
            const int q = number(i);
            FewColumn own = {0, 0, 0};
            if (q < m.columns) own = m.column[q];
            float factor = factors[0];
#pragma unroll
            for (int k = 1; k < kEach; ++k) factor = i == k ? factors[k] : factor;
            const bool is_shared = own.index < 0;
            const int row = is_shared ? ~own.index : quotient(own.index, a.used);
            float value = 0;
            if (q < m.columns)
                value = add_in_order(splits, sums + q * Launch::kColumn + r, kTileRows) * factor *
                        m.chosen.scale[row];
            const float up = __shfl_down_sync(0xffffffffu, value, 8);
            if (q >= m.columns || r >= 8) continue;
            const int width = (is_shared ? a.shared.rows : a.experts.rows) / 2;
            const int first = is_shared ? own.factor : own.factor % (a.experts.tiles * kTileRows);
            bf16* to = is_shared ? a.shared_out + row * width : a.routed + own.index * width;
            const int column = first / 2 + r;
            if (column >= width) continue;
            const bf16 y = gated(value, up);
            to[column] = y;
            if (a.permuted == nullptr) continue;
            uint8_t* row_of_down = a.permuted + own.place * fp4_row_bytes(width / kChunkCols);
            *reinterpret_cast<bf16*>(row_of_down + fp4_place(column)) = lifted(y);
        }
    }
};

__global__ void __launch_bounds__(kFewThreads, 1) gate_up_fp4_few(GateUp a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Memory m;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* rows = shared + s.depth * a.chunks * kFp4Chunk;
    float* sums = reinterpret_cast<float*>(rows + a.rows * fp4_row_bytes(a.chunks));
    RowCandidates* candidates = reinterpret_cast<RowCandidates*>(sums);
    const bool writes = blockIdx.x == 0;
    Plan plan(a, s, m, shared);
    if (warp == kPlanner) {
        if (lane < s.depth) init_phases(m.full + lane, 1), init_phases(m.empty + lane, s.splits.count);
        publish_phases();
        __syncwarp();
        if (!writes) plan.begin();
    }
    clear_choices(m.chosen, candidates, a.rows, a.rows * a.used);
    const long long* logits = logits_of_lane(a.choice);
    __syncthreads();
    bring_near(a.experts.tiles), bring_near(a.permuted), bring_near(a.choice.scale.squares);
    wait_for_predecessor();
    allow_successor();  // only now: before its own wait the successor reads what this kernel's predecessor wrote
    float gate_logit = 0;
    if (warp < kWarps)
        choose_and_load(a, m, candidates, rows, logits, gate_logit);
    else if (writes)
        await_choices(a.rows);
    if (writes) {
        __syncthreads();
        return write_choices(a, m, gate_logit);
    }
    if (warp == kPlanner) plan.make();
    __syncthreads();
    if (warp == kPlanner) return plan.run();
    const Columns columns(a, m);
    if (warp < s.splits.count) multiply(a, s, m, shared, rows, sums);
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
    columns.store(s.splits.count, sums);
}

}  // namespace

void launch_gate_up_few(Context& c, const GateUp& a) {
    const GateUpFewLaunch few(c, a.rows, a.used, a.experts.tiles, a.shared.tiles, a.chunks);
    launch(c, "moe_gate_up few", gate_up_fp4_few, few.grid, kFewThreads, few.bytes, a,
           Shape{few.splits, few.depth});
}

}  // namespace quern::cuda::moe
