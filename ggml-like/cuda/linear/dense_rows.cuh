// y = h W^T for up to 8 rows, or 16 (two products a piece), W one part of a packed weight: the main loop that norm_linear,
// norm_gate_up and linear_add share. They differ in how h comes into shared memory and in what happens to a sum, or in paired
// order to the sums of gate and up.
//
//   block b owns tile groups b, b + grid, ...; a group is 16 / S tiles, S warps a tile (few_rows.cuh); warp
//   `rank` of S takes pieces rank, rank + S, ... of its tile, one or two chunks each
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/linear/finish_sum.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// The pieces of one warp, tile group after tile group. Kept as running sums: a step is one chunk's worth of
/// decoding, so that addresses made anew each time would show.
template <Kind K>
struct DenseSource {
    int log_split, split, rank, steps;  // warps a tile, this warp's place among them, steps a tile
    const uint8_t* from;                // the next piece, at this lane's 16 bytes
    int chunk, tile, chunks, tiles;
    int first, end;  // chunks of the first step and after the last
    int tile_step;
    int64_t tile_jump;  // bytes from the end of a tile's steps to the next tile's first

    __device__ DenseSource(const Part& p, int chunk_count, int warp, int lane)
        : chunks(chunk_count), tiles(p.tiles) {
        const int pieces = pieces_for(K, chunks);
        log_split = log_warps_per_tile(pieces);
        split = 1 << log_split;
        rank = warp & (split - 1);
        steps = (pieces + split - 1) >> log_split;
        const int group = kWarps >> log_split;
        tile = blockIdx.x * group + (warp >> log_split);
        tile_step = gridDim.x * group;
        chunk = first = rank * kPieceChunks<K>;
        end = first + steps * split * kPieceChunks<K>;
        from = p.data + (static_cast<int64_t>(tile) * chunks + chunk) * chunk_bytes(K) + 16 * lane;
        tile_jump = (static_cast<int64_t>(tile_step) * chunks - (end - first)) * chunk_bytes(K);
    }
    /// Some steps have no piece, and the last piece of a tile may be one chunk short.
    __device__ __forceinline__ bool has_piece() const { return tile < tiles && chunk < chunks; }
    __device__ __forceinline__ bool has_whole_piece() const { return chunk + kPieceChunks<K> <= chunks; }
    __device__ __forceinline__ void advance() {
        chunk += split * kPieceChunks<K>;
        from += split * kPieceBytes<K>;
        if (chunk != end) return;
        chunk = first;
        tile += tile_step;
        from += tile_jump;
    }
};

/// Whether this code is for cards with deep rings (dense_is_deep).
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
inline constexpr bool kDeep = false;
#else
inline constexpr bool kDeep = true;
#endif

/// The pieces of one warp on their way.
template <Kind K>
struct DenseRing {
    uint8_t* base;  // of this warp
    int at = 0;     // bytes: the current piece

    static constexpr int kBytes = dense_ring_bytes(K, kDeep);

    __device__ DenseRing(uint8_t* ring, int warp) : base(ring + warp * kBytes) {}

    __device__ __forceinline__ void fill(DenseSource<K>& source, int lane) {
#pragma unroll
        for (int i = 0; i < dense_pieces(K, kDeep); ++i) request(source, i * kPieceBytes<K>, lane);
    }
    /// Waits for the current step's piece.
    __device__ __forceinline__ const uint8_t* wait() {
        wait_copies<dense_pieces(K, kDeep) - 1>();
        if constexpr (K != Kind::bf16) __syncwarp();  // parts were copied by other lanes
        return base + at;
    }
    /// Gives the piece's place to the next copy.
    __device__ __forceinline__ void release(DenseSource<K>& source, int lane) {
        if constexpr (K != Kind::bf16) __syncwarp();
        request(source, at, lane);
        at = at + kPieceBytes<K> == kBytes ? 0 : at + kPieceBytes<K>;
    }

  private:
    __device__ __forceinline__ void request(DenseSource<K>& source, int place, int lane) {
        const bool any = source.has_piece(), whole = any && source.has_whole_piece();
        uint8_t* to = base + place + 16 * lane;
#pragma unroll
        for (int offset = 0; offset < kPieceBytes<K>; offset += 512) {
            const bool in_first = offset + 512 <= chunk_bytes(K) || offset + 16 * lane < chunk_bytes(K);
            const bool in_piece = offset + 512 <= kPieceBytes<K> || offset + 16 * lane < kPieceBytes<K>;
            if ((any && in_first) || (whole && in_piece)) copy_async16(to + offset, source.from + offset);
        }
        source.advance();
        commit_copies();
    }
};

/// A lane's sums of the first `rows` columns into [rows][16 weight rows].
template <int NT>
__device__ __forceinline__ void store_row_sums(float* to, const float (&sum)[NT][4], int rows, int lane) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int n = 8 * nt + 2 * t + (i & 1);
            if (n < rows) to[n * 16 + g + (i >> 1) * 8] = sum[nt][i];
        }
}

// ---- prologues: how rows come into shared memory, as they are, with or without the factors of their norm ----

/// Rows of x in memory, ld apart.
struct RowsOfX {
    const bf16* x;
    int64_t ld;
    int columns, rows;
};

/// h = x, by all threads of the block. What a thread loads first is known before the wait.
template <Kind K>
struct FewRows {
    static constexpr int kTogether = 4;
    RowsOfX of;
    const uint8_t* from = nullptr;  // the thread's first eight columns, of its first row
    int jump = 0, count = 0;        // bytes to its next row; rows that it has
    int log_threads = 0;            // of a row
    uint4 first[kTogether] = {};

    __device__ __forceinline__ explicit FewRows(const RowsOfX& rows) : of(rows) {}
    __device__ __forceinline__ int rows() const { return of.rows; }
    __device__ __forceinline__ void early(bf16* h, int stride) {
        zero_padding(h, stride, of.rows, of.columns);
        log_threads = log_threads_of_row(of.columns, kThreads);
        const int step = kThreads >> log_threads;
        count = column() < of.columns ? (of.rows - row() + step - 1) / step : 0;
        from = reinterpret_cast<const uint8_t*>(of.x + row() * of.ld + column());
        jump = 2 * step * static_cast<int>(of.ld);
        pin(from), pin(jump), pin(count);
    }
    __device__ __forceinline__ void ask() { load(first, 0, 0); }
    __device__ __forceinline__ void operator()(bf16* h, int stride) const {
        bf16* to = h + row() * stride + column();
        const int apart = (kThreads >> log_threads) * stride;
        store(to, apart, first, 0);
#pragma unroll 1
        for (int k = 0; column() + k < of.columns; k += 8 << log_threads)
#pragma unroll 1
            for (int n = k == 0 ? kTogether : 0; n < count; n += kTogether) {
                uint4 v[kTogether];
                load(v, n, k);
                store(to + k, apart, v, n);
            }
    }
    __device__ __forceinline__ void late() const {}

  private:
    __device__ __forceinline__ int row() const { return static_cast<int>(threadIdx.x) >> log_threads; }
    __device__ __forceinline__ int column() const {
        return (static_cast<int>(threadIdx.x) & ((1 << log_threads) - 1)) * 8;
    }
    /// The thread's rows from its n-th on, columns from its first plus k.
    __device__ __forceinline__ void load(uint4 (&v)[kTogether], int n, int k) const {
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
            if (n + j < count)
                v[j] = __ldcg(reinterpret_cast<const uint4*>(from + int64_t{n + j} * jump + 2 * k));
    }
    __device__ __forceinline__ void store(bf16* to, int apart, const uint4 (&v)[kTogether], int n) const {
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
            if (n + j < count) store_eight<K>(to + (n + j) * apart, v[j]);
    }
};

/// The same of rows whose norm is deferred, and the rows' factors in shared memory: the last warps make them. kHeld: of SquaresOfRow.
template <class Rows, int kHeld>
struct Scaled {
    Rows plain;
    RowScale scale;
    float* factor;  // [rows]
    SquaresOfRow<kHeld> squares = {};

    __device__ __forceinline__ static int row() { return kWarps - 1 - static_cast<int>(threadIdx.x) / 32; }
    __device__ __forceinline__ void early(bf16* h, int stride) { plain.early(h, stride); }
    __device__ __forceinline__ void ask() {
        plain.ask();
        if (row() < plain.rows()) squares.load(scale, row());
    }
    __device__ __forceinline__ void operator()(bf16* h, int stride) const { plain(h, stride); }
    __device__ __forceinline__ void late() const {
        if (row() >= plain.rows()) return;
        const float own = norm_factor(scale, squares.sum(scale, row()));
        if (threadIdx.x % 32 == 0) factor[row()] = own;
    }
};
template <Kind K>
using ScaledRows = Scaled<FewRows<K>, 4>;

/// What a launch is given besides the part.
struct DenseLaunch {
    int chunks, rows;
};

/// Everything from the first weight to the last sum. NT: products of 8 rows.
///   prologue   early(h, stride) knows of no activations; ask(), after the wait for the predecessor, starts loads of them; prologue(h, stride)
///              writes `rows` rows of them; late() comes before the products and is done before the first finish.store; all by all threads
///   finish     early(loaded, row of the part, column n) fills what of a Finish::Loaded needs no activations, load(...) the rest; both before
///              the sums are made; store(row, n, loaded, sum) after; each once for each sum. With Finish::kPaired the part is in paired
///              order, a row one of gate and up, there is nothing to load, and store(row, n, gate sum, up sum)
template <Kind K, int NT = 1, typename Prologue, typename Finish>
__device__ __forceinline__ void dense_rows(const Part& part, const DenseLaunch& s, Prologue&& prologue,
                                           const Finish& finish) {
    extern __shared__ __align__(128) uint8_t shared[];
    bf16* h = reinterpret_cast<bf16*>(shared + kWarps * dense_ring_bytes(K, kDeep));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = s.chunks, rows = s.rows;
    const int stride = activation_stride(chunks), blocks = gridDim.x;
    float* sums = reinterpret_cast<float*>(h + rows * stride);

    allow_successor();
    DenseSource<K> source(part, chunks, warp, lane);
    const int split = source.split, mine = source.rank, steps = source.steps,
              log_group = 4 - source.log_split, group = 1 << log_group;
    DenseRing<K> ring(shared, warp);
    ring.fill(source, lane);
    prologue.early(h, stride);

    const int groups = (part.tiles + group - 1) >> log_group, most = groups_together(K, kDeep, rows);
    constexpr int kOut = Finish::kPaired ? 8 : 16;  // rows of y that a tile has
    const int height = Finish::kPaired ? part.rows / 2 : part.rows;
    const Divisor by_rows(rows);
    // Result i of a round: of tile `tile`, counted from the round's first, row n of x, row r of the tile.
    struct Result {
        int tile, n, row;
    };
    int at = blockIdx.x, round = 0;
    const auto result = [&](int i) {
        const int j = i / kOut, tile = by_rows.quotient(j);
        return Result{tile, j - tile * rows,
                      ((at + (tile >> log_group) * blocks) * group + (tile & (group - 1))) * kOut + i % kOut};
    };
    // A round's end: the thread's first result and what it needs from memory, without activations; then what comes from these. Other
    // warps finish each round, so that none falls behind.
    int together = 0, all = 0, thread = 0;
    Result own{};
    bool stores = false;
    float factor = 1, up_factor = 1;
    typename std::decay_t<Finish>::Loaded loaded{};
    const auto ask = [&] {
        stores = own.row < height;
        if (!stores) return;
        if constexpr (Finish::kPaired) {
            factor = part.factor[own.row / 8 * kTileRows + own.row % 8];
            up_factor = part.factor[own.row / 8 * kTileRows + own.row % 8 + 8];
        } else {
            if constexpr (K != Kind::bf16) factor = part.factor[own.row];
            finish.early(loaded, own.row, own.n);
        }
    };
    const auto fetch = [&] {
        if constexpr (!Finish::kPaired)
            if (stores) finish.load(loaded, own.row, own.n);
    };
    const auto prepare = [&] {
        together = min(most, quotient(groups - at + blocks - 1, blocks));
        all = (together << log_group) * kOut * rows;
        thread = (threadIdx.x - 128 * round) & (kThreads - 1);
        own = thread < all ? result(thread) : Result{0, 0, height};
        ask();
    };
    prepare();
    wait_for_predecessor();
    prologue.ask();
    fetch();
    prologue(h, stride);
    __syncthreads();
    prologue.late();

    uint32_t x[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
        x[nt] = operand_address(h + min(8 * nt + (lane & 7), rows - 1) * stride, lane);
#pragma unroll 1
    for (;;) {
        float* now = sums + (round & 1) * group_sums(K, kDeep, rows);
#pragma unroll 1
        for (int j = 0; j < together; ++j) {
            float sum[NT][4] = {};
#pragma unroll 1
            for (int i = 0; i < steps; ++i) {
                const uint8_t* piece = ring.wait();
                const int c = (mine + i * split) * kPieceChunks<K>;
#pragma unroll
                for (int k = 0; k < kPieceChunks<K>; ++k)
                    if (c + k < chunks)
                        multiply_chunk<K, false>(piece + k * chunk_bytes(K), x, (c + k) * kChunkCols, lane,
                                                 sum);
                ring.release(source, lane);
            }
            store_row_sums(now + (j * kWarps + warp) * 16 * rows, sum, rows, lane);
        }
        __syncthreads();
#pragma unroll 1
        for (int i = thread;;) {
            if (stores) {
                const float* from =
                    now + (own.tile * split * rows + own.n) * 16 + i % kOut;  // of the tile's first warp
                const float total = scaled(add_splits(split, from, 16 * rows), factor);
                if constexpr (Finish::kPaired)
                    finish.store(own.row, own.n, total,
                                 scaled(add_splits(split, from + 8, 16 * rows), up_factor));
                else
                    finish.store(own.row, own.n, loaded, total);
            }
            i += kThreads;
            if (i >= all) break;
            own = result(i);
            ask();
            fetch();
        }
        at += most * blocks;
        if (at >= groups) break;
        ++round;
        prepare();
        fetch();
    }
}

}  // namespace quern::cuda::linear
