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
//   lest rows of x queue behind them. Rows of x and sums lie in shared memory in the order of their places (choice_list.cuh). Where
//   gate_up_fp4_few.cu ran before, it has left rows so and permuted, and they are copied; else the block's threads permute them.
//
// Shared memory: a ring of two chunks a warp, four deep, or two where that does not fit; rows of routed and shared_in; sums; terms.
//
// Traffic: the weights of each needed expert once; every block reads all rows of x. Bound: instructions, some 98 for 16 x 64
// weights: of 4 rows 0.6 us until it is known what was chosen, from the end of gate and up 1.5 until x is there, 4.3
// products (bytes 4.6), 0.8 end (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/fp4_rows.cuh"
#include "ggml-like/cuda/moe/choice_list.cuh"
#include "ggml-like/cuda/moe/down_fp4.cuh"

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
    int column, depth;  // floats of a place's sums; units of a warp on their way
};

/// A group: the block's tile of its expert, its rows, the place of the first.
struct Group {
    const uint8_t* weights;
    int count, place;
};
static_assert(kFp4PieceChunks * kChunkCols == Fp4Piece::kNumbers);

struct Memory {
    Group group[kFewPlaces];
    int term[kFewPlaces];      // of a place
    int place[kFewPlaces];     // of a term
    int expert[kFewPlaces];    // of a term; -1: the shared one
    float weight[kFewPlaces];  // of a term
};
static_assert(sizeof(Memory) + 512 <= Launch::kStaticBytes);

/// The whole block: what was chosen, as soon as it was. Returns the number of groups, with a barrier.
__device__ __forceinline__ int read_choices(const Down& a, Memory& m) {
    constexpr int kSecond = kThreads / 2;
    static_assert(kFewPlaces <= kSecond && kEarly <= Launch::kShallow);
    const int tid = threadIdx.x, places = a.rows * (a.used + 1);
    bool is_group = false;
    if (tid < places) {
        const ListedGroup listed = ListedGroup::of(told(a.ready + tid));
        is_group = listed.count > 0;
        m.group[tid] = {DownTile(a, listed.expert).data, listed.count, listed.place};
    } else if (tid >= kSecond && tid < kSecond + places) {
        const int place = tid - kSecond;
        const ListedRow listed = ListedRow::of(told(a.ready + places + place));
        m.term[place] = listed.term, m.place[listed.term] = place;
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
    int bytes;   // of the ring
    int at = 0;  // in it: where the oldest chunks are, and then the newest

    /// Asks for chunks in place of the oldest.
    __device__ __forceinline__ void request() {
        if (next < groups) {
            const int lane = threadIdx.x % 32;
            const uint8_t* source = m.group[next].weights + offset;
            uint8_t* place = ring + at + 16 * lane;
            copy_async16(place, source), copy_async16(place + 512, source + 512);
            if (lane < kUnitBytes / 16 - 64) copy_async16(place + 1024, source + 1024);
        }
        commit_copies();
        next += by;
        at = at + kUnitBytes == bytes ? 0 : at + kUnitBytes;
    }
    /// The oldest.
    __device__ __forceinline__ const uint8_t* wait() const {
        if (bytes == Launch::kDeep * kUnitBytes)
            wait_copies<Launch::kDeep - 1>();
        else
            wait_copies<Launch::kShallow - 1>();
        __syncwarp();
        return ring + at;
    }
};

/// The whole block asks for permuted rows. (The copy engine takes 0.4 us longer for all of 8.)
__device__ __forceinline__ void copy_rows(const uint8_t* permuted, int bytes, uint8_t* rows) {
#pragma unroll 1
    for (int at = 16 * threadIdx.x; at < bytes; at += 16 * kThreads) copy_async16(rows + at, permuted + at);
    commit_copies();
}

/// The whole block brings rows and permutes them. once_asked(): when the first loads are under way.
template <class Then>
__device__ __forceinline__ void load_all_rows(const Down& a, const Memory& m, uint8_t* rows,
                                              Then&& once_asked) {
    constexpr int kTogether = 5;  // pieces of a warp that are under way at the same time
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, terms = a.used + 1;
    const int each = a.experts.chunks * kChunkCols / Fp4Piece::kNumbers, all = a.rows * terms * each;
    const Divisor of_row(each);
#pragma unroll 1
    for (int first = warp; first == warp || first < all; first += kTogether * kWarps) {
        Fp4Piece x[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int p = first + i * kWarps, place = of_row.quotient(p);
            const int column = (p - place * each) * Fp4Piece::kNumbers;
            if (p >= all) break;
            const int term = m.term[place], row = quotient(term, terms);
            const bool is_shared = term - row * terms == a.used;
            const int width = is_shared ? a.shared_width : a.width;
            const bf16* from = is_shared ? a.shared_in + row * width : a.routed + (term - row) * width;
            if (column + 8 * lane < width) x[i].load(from + column);
        }
        if (first == warp) once_asked();
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
            const int p = first + i * kWarps, place = of_row.quotient(p);
            if (p >= all) break;
            x[i].store(rows + place * fp4_row_bytes(a.experts.chunks) +
                       (p - place * each) * Fp4Piece::kBytes);
        }
    }
}

/// One warp: the sums of its splits of its groups, into [place][split][16]. rows, sums: from its split on, a place's `row_bytes` and
/// `column` apart.
__device__ __forceinline__ void multiply(const Memory& m, OwnChunks& chunks, int set, const uint8_t* rows,
                                         int row_bytes, float* sums, int column) {
    const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
    rows += 16 * t, sums += g;
#pragma unroll 1
    for (int i = set; i < chunks.groups; i += chunks.by) {
        const int count = m.group[i].count, place = m.group[i].place;
        // With up to four rows, row i is columns 2i and 2i + 1 of the products, and only the first is summed.
        const bool half = count <= kPassRows / 2;
        const uint8_t* x = rows + (place + min(half ? g / 2 : g, count - 1)) * row_bytes;
        float* to = sums + (place + (half ? t : 2 * t)) * column;
        float acc[Launch::kUnit][4] = {};
        const uint8_t* chunk = chunks.wait();
        if (half) {
#pragma unroll
            for (int c = 0; c < Launch::kUnit; ++c)
                multiply_fp4<true>(chunk + c * kFp4Chunk, x + c * 128, lane, acc[c]);
            if (t < count)
#pragma unroll
                for (int c = 0; c < Launch::kUnit; ++c)
                    to[c * kTileRows] = acc[c][0], to[c * kTileRows + 8] = acc[c][2];
        } else {
#pragma unroll
            for (int c = 0; c < Launch::kUnit; ++c)
                multiply_fp4<false>(chunk + c * kFp4Chunk, x + c * 128, lane, acc[c]);
#pragma unroll
            for (int j = 0; j < 2; ++j)
                if (2 * t + j < count)
#pragma unroll
                    for (int c = 0; c < Launch::kUnit; ++c)
                        to[j * column + c * kTileRows] = acc[c][j],
                                            to[j * column + c * kTileRows + 8] = acc[c][2 + j];
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
    const int ring_bytes = s.depth * kUnitBytes, row_bytes = fp4_row_bytes(a.experts.chunks);
    uint8_t* rows = shared + kWarps * ring_bytes;
    float* sums = reinterpret_cast<float*>(rows + places * row_bytes);
    float* terms = sums + places * s.column;                             // [row][used + 1][16]
    const int r = threadIdx.x % kTileRows, n = threadIdx.x / kTileRows;  // of the output
    const bool adds = n < a.rows;
    End end(given);
    Before before;
    if (adds) before.load(a, n, r);
    const int groups = read_choices(a, m);
    const int warps = s.splits.count / Launch::kUnit, set = quotient(warp, warps);  // those of one group
    const int split = (warp - set * warps) * Launch::kUnit;
    OwnChunks chunks{m,         shared + warp * ring_bytes, split * kFp4Chunk + 16 * lane,
                     set,       quotient(kWarps, warps),    groups,
                     ring_bytes};
#pragma unroll
    for (int i = 0; i < kEarly; ++i) chunks.request();
    constexpr int kEach = (kFewPlaces * kTileRows + kThreads - 1) / kThreads;  // terms of a thread
    float factor[kEach];  // of the weights' rows, which may come from far
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int term = n + i * kThreads / kTileRows;
        factor[i] = term < places ? DownTile(a, m.expert[term]).factor[r] : 0.0f;
    }
    wait_for_predecessor();
    allow_successor();
    end.begin(adds, n, r);
    const auto ask_for_more = [&] {
#pragma unroll 1
        for (int i = kEarly; i < s.depth; ++i) chunks.request();
    };
    if (a.permuted != nullptr) {
        copy_rows(a.permuted, places * row_bytes, rows);
        ask_for_more();
        if (s.depth == Launch::kDeep)  // all but what was asked for since
            wait_copies<Launch::kDeep - kEarly>();
        else
            wait_copies<Launch::kShallow - kEarly>();
    } else {
        load_all_rows(a, m, rows, ask_for_more);
    }
    __syncthreads();
    multiply(m, chunks, set, rows + split * 128, row_bytes, sums + split * kTileRows, s.column);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int term = n + i * kThreads / kTileRows;
        if (term < places)
            terms[term * kTileRows + r] =
                factor[i] * m.weight[term] *
                add_in_order(s.splits.count, sums + m.place[term] * s.column + r, kTileRows);
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
