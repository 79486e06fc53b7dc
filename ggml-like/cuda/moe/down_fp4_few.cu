// moe_down with NVFP4 weights and 2 to 8 answer rows: all terms of 16 output rows in one block.
//
//   block = a tile of 16 output rows; 16 warps
//
//     groups (up to 8 rows of one expert)   | shared | expert 3 | expert 7 | expert 9 | expert 12 ...    (choice_list.cuh)
//     splits 0, 1 | 2, 3 | 4, 5 | 6, 7        warp     warp       warp       warp       warp
//                                            0 .. 3   4 .. 7     8 .. 11    12 .. 15    0 .. 3
//
//   A warp has the same two splits of every fourth group (where there are eight splits). Their sums meet in shared memory, where a
//   thread an output row and term adds splits in order, then a thread an output terms in order, of ranks also these sums
//   (comm/tile_sums.cuh), and does the next norm's part.
//
//   What was chosen is told before gate and up end, so that weights are asked for before the wait: two chunks of each warp's four,
//   lest rows of x queue behind them. Where gate_up_fp4_few.cu ran before, it has left rows permuted as they lie in shared memory, and
//   the copy engine brings all of them at once; else the block's threads permute them.
//
// Shared memory: a ring of two chunks a warp, four deep, or two where that does not fit; rows of routed and shared_in; sums; terms.
//
// Traffic: the weights of each needed expert once; every block reads all rows of x. Bound: instructions, some 95 for 16 x 64
// weights: of 4 rows 0.6 us until it is known what was chosen, from the end of gate and up 2.8 until x is there (permuted by threads), 4.6
// products (bytes 4.6), 0.6 end (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/moe/choice_list.cuh"
#include "ggml-like/cuda/moe/down_fp4.cuh"
#include "ggml-like/cuda/ptx/copy_bytes.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

using Launch = DownFewLaunch;
constexpr int kUnitBytes = Launch::kUnit * kFp4Chunk;
constexpr int kEarly = 2;  // of these, asked for before the wait

struct Shape {
    ColumnSplits splits;
    int column, depth;  // floats of a term's sums; units of a warp on their way
};

/// A group: the block's tile of its expert, its rows, the place of the first.
struct Group {
    const uint8_t* weights;
    int count, place;
};
static_assert(kFp4PieceChunks * kChunkCols == Fp4Piece::kNumbers);

struct Memory {
    Group group[kFewPlaces];
    int x_at[kFewPlaces],
        sums_at[kFewPlaces];   // of a place: bytes before its row of x, floats before its term's sums
    int expert[kFewPlaces];    // of a term; -1: the shared one
    float weight[kFewPlaces];  // of a term
    uint64_t rows_here;        // a barrier: all rows have come
};
static_assert(sizeof(Memory) + 512 <= Launch::kStaticBytes);

/// The whole block: what was chosen, as soon as it was. Returns the number of groups, with a barrier.
__device__ __forceinline__ int read_choices(const Down& a, int column, Memory& m) {
    constexpr int kSecond = kThreads / 2;
    static_assert(kFewPlaces <= kSecond && kEarly <= Launch::kShallow);
    const int tid = threadIdx.x, pairs = a.rows * a.used, places = pairs + a.rows;
    bool is_group = false;
    if (tid < places) {
        const ListedGroup listed = ListedGroup::of(told(a.ready + tid));
        is_group = listed.count > 0;
        m.group[tid] = {DownTile(a, listed.expert).data, listed.count, listed.place};
    } else if (tid >= kSecond && tid < kSecond + places) {
        const int place = tid - kSecond;
        const ListedRow listed = ListedRow::of(told(a.ready + places + place));
        const int row = quotient(listed.term, a.used + 1);
        const int x = listed.expert < 0 ? pairs + row : listed.term - row;
        m.x_at[place] = x * fp4_row_bytes(a.experts.chunks);
        m.sums_at[place] = listed.term * column;
        m.expert[listed.term] = listed.expert, m.weight[listed.term] = listed.weight;
    }
    return __syncthreads_count(is_group);
}

/// A warp's chunks, of the same splits of every by-th group, on their way into its ring.
struct OwnChunks {
    const Memory& m;
    uint8_t* ring;
    int offset;  // of the lane's bytes in a tile
    int next, by, groups;
    int bytes;  // of the ring
    int to = 0, from = 0;

    __device__ __forceinline__ void request() {
        if (next < groups) {
            const int lane = threadIdx.x % 32;
            const uint8_t* source = m.group[next].weights + offset;
            uint8_t* place = ring + to + 16 * lane;
            copy_async16(place, source), copy_async16(place + 512, source + 512);
            if (lane < kUnitBytes / 16 - 64) copy_async16(place + 1024, source + 1024);
        }
        commit_copies();
        next += by;
        to = to + kUnitBytes == bytes ? 0 : to + kUnitBytes;
    }
    __device__ __forceinline__ const uint8_t* wait() {
        if (bytes == Launch::kDeep * kUnitBytes)
            wait_copies<Launch::kDeep - 1>();
        else
            wait_copies<Launch::kShallow - 1>();
        __syncwarp();
        const uint8_t* unit = ring + from;
        from = from + kUnitBytes == bytes ? 0 : from + kUnitBytes;
        return unit;
    }
};

/// The whole block brings the rows of pairs, then those of the shared expert. once_asked(): when the first loads are under way.
template <class Then>
__device__ __forceinline__ void load_all_rows(const Down& a, uint8_t* rows, Then&& once_asked) {
    constexpr int kTogether = 5;  // pieces of a warp that are under way at the same time
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pairs = a.rows * a.used;
    const int each = a.experts.chunks * kChunkCols / Fp4Piece::kNumbers, all = (pairs + a.rows) * each;
    const Divisor of_row(each);
#pragma unroll 1
    for (int first = warp; first == warp || first < all; first += kTogether * kWarps) {
        Fp4Piece x[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int p = first + i * kWarps, row = of_row.quotient(p);
            const int column = (p - row * each) * Fp4Piece::kNumbers;
            if (p >= all) break;
            const bool is_shared = row >= pairs;
            const int width = is_shared ? a.shared_width : a.width;
            const bf16* from = is_shared ? a.shared_in + (row - pairs) * width : a.routed + row * width;
            if (column + 8 * lane < width) x[i].load(from + column);
        }
        if (first == warp) once_asked();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int p = first + i * kWarps, row = of_row.quotient(p);
            if (p >= all) break;
            x[i].store(rows + row * fp4_row_bytes(a.experts.chunks) + (p - row * each) * Fp4Piece::kBytes);
        }
    }
}

/// One warp: the sums of its splits of its groups, into [term][split][16]. rows, sums: from its split on.
__device__ __forceinline__ void multiply(const Memory& m, OwnChunks& chunks, int set, const uint8_t* rows,
                                         float* sums) {
    const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    rows += 16 * t, sums += g;
#pragma unroll 1
    for (int i = set; i < chunks.groups; i += chunks.by) {
        const int count = m.group[i].count, place = m.group[i].place;
        // With up to four rows, row i is columns 2i and 2i + 1 of the products, and only the first is summed.
        const bool half = count <= kPassRows / 2;
        const uint8_t* x = rows + m.x_at[place + min(half ? g / 2 : g, count - 1)];
        float* to[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) to[j] = sums + m.sums_at[place + min(half ? t : 2 * t + j, count - 1)];
        float acc[Launch::kUnit][4] = {};
        const uint8_t* chunk = chunks.wait();
        if (half) {
#pragma unroll
            for (int c = 0; c < Launch::kUnit; ++c)
                multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc[c]);
            if (t < count)
#pragma unroll
                for (int c = 0; c < Launch::kUnit; ++c)
                    to[0][c * kTileRows] = acc[c][0], to[0][c * kTileRows + 8] = acc[c][2];
        } else {
#pragma unroll
            for (int c = 0; c < Launch::kUnit; ++c)
                multiply_fp4<false>(chunk + c * kFp4Chunk, x + c * 128, lane, acc[c]);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (2 * t + j < count)
#pragma unroll
                    for (int c = 0; c < Launch::kUnit; ++c)
                        to[j][c * kTileRows] = acc[c][j], to[j][c * kTileRows + 8] = acc[c][2 + j];
        }
        __syncwarp();
        chunks.request();
    }
}

template <class End>
__global__ void __launch_bounds__(kThreads, 1)
    down_fp4_few(Down a, Shape s, const __grid_constant__ typename End::Parameter given) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ Memory m;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, places = a.rows * (a.used + 1);
    const int ring_bytes = s.depth * kUnitBytes;
    uint8_t* rows = shared + kWarps * ring_bytes;
    float* sums = reinterpret_cast<float*>(rows + places * fp4_row_bytes(a.experts.chunks));
    float* terms = sums + places * s.column;                             // [row][used + 1][16]
    const int r = threadIdx.x % kTileRows, n = threadIdx.x / kTileRows;  // of the output
    const bool adds = n < a.rows;
    if (threadIdx.x == 0) init_phases(&m.rows_here, 1), publish_phases();
    End end(given);
    Before before;
    if (adds) before.load(a, n, r);
    const int groups = read_choices(a, s.column, m);
    const int warps = s.splits.count / Launch::kUnit, set = quotient(warp, warps);  // those of one group
    const int split = (warp - set * warps) * Launch::kUnit;
    OwnChunks chunks{m,         shared + warp * ring_bytes, split * kFp4Chunk + 16 * lane,
                     set,       quotient(kWarps, warps),    groups,
                     ring_bytes};
#pragma unroll
    for (int i = 0; i < kEarly; ++i) chunks.request();
    wait_for_predecessor();
    allow_successor();
    end.begin(adds, n, r);
    const auto ask_for_more = [&] {
#pragma unroll 1
        for (int i = kEarly; i < s.depth; ++i) chunks.request();
    };
    if (a.permuted != nullptr) {
        if (threadIdx.x == 0) {
            const int bytes = places * fp4_row_bytes(a.experts.chunks);
            arrive_and_expect(&m.rows_here, bytes);
            copy_bytes(rows, a.permuted, bytes, &m.rows_here);
        }
        ask_for_more();
    } else {
        load_all_rows(a, rows, ask_for_more);
    }
    constexpr int kEach = (kFewPlaces * kTileRows + kThreads - 1) / kThreads;  // terms of a thread
    float factor[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int term = n + i * kThreads / kTileRows;
        factor[i] = term < places ? DownTile(a, m.expert[term]).factor[r] * m.weight[term] : 0.0f;
    }
    __syncthreads();
    if (a.permuted != nullptr) wait_phase(&m.rows_here, 0);
    multiply(m, chunks, set, rows + split * 128, sums + split * kTileRows);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int term = n + i * kThreads / kTileRows;
        if (term < places)
            terms[term * kTileRows + r] =
                factor[i] * add_in_order(s.splits.count, sums + term * s.column + r, kTileRows);
    }
    __syncthreads();
    if (adds) end.add(a, terms + n * (a.used + 1) * kTileRows, n, r, before);
}

}  // namespace

void launch_down_few(Context& c, const Down& a, const comm::Peers* peers) {
    const DownFewLaunch l(c, a.rows, a.used, a.experts.chunks, a.shared_chunks);
    const Shape s{l.splits, l.column, l.depth};
    if (peers == nullptr)
        launch(c, "moe_down few", down_fp4_few<AddTerms>, a.experts.tiles, kThreads, l.bytes, a, s,
               AddTerms::Parameter{});
    else
        launch(c, "moe_down few of ranks", down_fp4_few<AddTermsOverRanks>, a.experts.tiles, kThreads,
               l.bytes, a, s, *peers);
}

}  // namespace quern::cuda::moe
