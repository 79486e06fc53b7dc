// y = W h for one row of h: dense_rows.cuh with less around it, and the same bits. Warps meet once in
// kOneRounds tiles a block, and what the end needs is loaded before.
//
//   block b owns tiles b, b + grid, ...; of each, warp w takes pieces w, w + 16, ...
#pragma once

#include "ggml-like/cuda/linear/dense_rows.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

/// What a launch is compiled for, and how it divides the part. kHolds: a warp has one piece of every tile, and its columns of
/// x in registers.
template <Kind K, bool kAhead, Extent E, bool kHolds>
struct OneShape {
    static constexpr bool kHeld = kHolds;
    static constexpr int kRing = one_pieces(K, kAhead);
    static constexpr bool kRefills =
        E == Extent::many || !kHolds;  // else a block's tiles are all under way at first
    int chunks, rounds, steps;         // as in OneLaunch
    bool whole;

    explicit OneShape(const OneLaunch& one)
        : chunks(one.chunks), rounds(one.rounds), steps(one.steps), whole(one.whole) {}
};

/// What one row brings to the pieces of a warp.
template <Kind K, bool kHeld>
struct OneRow {
    uint32_t first;  // operand_address

    __device__ __forceinline__ explicit OneRow(const bf16* h) : first(operand_address(h, threadIdx.x % 32)) {}
    /// chunks: of the piece that exist.
    __device__ __forceinline__ void multiply(const uint8_t* piece, int step, int chunks, int lane,
                                             float (&acc)[1][4]) const {
        const int column = step * kWarps * kPieceChunks<K> * kChunkCols;
        const uint32_t x[1] = {first};
#pragma unroll
        for (int k = 0; k < kPieceChunks<K>; ++k)
            if (k < chunks)
                multiply_chunk<K, true>(piece + k * chunk_bytes(K), x, column + k * kChunkCols, lane, acc);
    }
};
/// NVFP4, one piece of every tile: always the same columns.
template <>
struct OneRow<Kind::nvfp4, true> {
    uint4 x[kPieceChunks<Kind::nvfp4>][2];

    __device__ __forceinline__ explicit OneRow(const bf16* first) {
#pragma unroll
        for (int k = 0; k < kPieceChunks<Kind::nvfp4>; ++k)
#pragma unroll
            for (int j = 0; j < 2; ++j)
                x[k][j] = operands_of(operand_address(first, threadIdx.x % 32), k * kChunkCols + 32 * j);
    }
    __device__ __forceinline__ void multiply(const uint8_t* piece, int, int, int lane,
                                             float (&acc)[1][4]) const {
#pragma unroll
        for (int k = 0; k < kPieceChunks<Kind::nvfp4>; ++k)
            multiply_fp4<true, 1>(
                piece + k * kFp4Chunk, [&](int, int j) { return x[k][j]; }, lane, acc);
    }
};

// ---- prologues: how the row comes into shared memory, as it is, with or without the factor of its norm ----

/// A row of x in memory.
struct RowOfX {
    const bf16* x;
    int columns;
};

/// h = x, by all threads of the block. What a thread loads first is known before the wait.
template <Kind K>
struct SingleRow {
    RowOfX of;
    const bf16* from = nullptr;  // the thread's first eight columns
    uint4 first{};

    __device__ __forceinline__ explicit SingleRow(const RowOfX& row) : of(row) {}
    __device__ __forceinline__ static constexpr int rows() { return 1; }
    __device__ __forceinline__ void early(bf16* h, int) {
        zero_padding(h, 0, 1, of.columns);
        from = of.x + column();
        pin(from);
    }
    __device__ __forceinline__ void ask() {
        if (column() < of.columns) first = __ldcg(reinterpret_cast<const uint4*>(from));
    }
    __device__ __forceinline__ void operator()(bf16* h, int) const {
        if (column() < of.columns) store_eight<K>(h + column(), first);
#pragma unroll 1
        for (int k = column() + 8 * kThreads; k < of.columns; k += 8 * kThreads)
            store_eight<K>(h + k, __ldcg(reinterpret_cast<const uint4*>(of.x + k)));
    }
    __device__ __forceinline__ void late() const {}

  private:
    __device__ __forceinline__ static int column() { return 8 * static_cast<int>(threadIdx.x); }
};
template <Kind K>
using ScaledRow = Scaled<SingleRow<K>, 12>;

/// prologue and finish as in dense_rows. kWhole: s.whole is known to be true.
template <bool kWhole, Kind K, bool kAhead, Extent E, bool kHolds, typename Prologue, typename Finish>
__device__ __forceinline__ void dense_one(const Part& part, const OneShape<K, kAhead, E, kHolds>& s,
                                          Prologue&& prologue, const Finish& finish) {
    extern __shared__ __align__(128) uint8_t shared[];
    using Shape = OneShape<K, kAhead, E, kHolds>;
    constexpr int kRing = Shape::kRing, kBytes = kPieceBytes<K>, kRounds = one_rounds(E);
    constexpr int kSums = kRounds * kWarps * kTileRows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint8_t* ring = shared + warp * kRing * kBytes;
    bf16* h = reinterpret_cast<bf16*>(shared + kWarps * kRing * kBytes);
    float* sums =
        reinterpret_cast<float*>(h + s.chunks * kChunkCols);  // [round][warp][16]; many: two of them

    allow_successor();
    // Chunks of a piece. Unless kWhole the last steps of some warps have no piece, and the last piece may be short.
    const auto chunks_of = [&](int at) {
        constexpr int kStep = kWarps * kPieceChunks<K>;
        return kWhole ? kPieceChunks<K>
                      : min(kPieceChunks<K>, s.chunks - warp * kPieceChunks<K> - at * kStep);
    };
    const int64_t tile_bytes = static_cast<int64_t>(s.chunks) * chunk_bytes(K);
    const uint8_t* from = part.data + blockIdx.x * tile_bytes + warp * kBytes + 16 * lane;
    const int64_t jump = gridDim.x * tile_bytes - (s.steps - 1) * (kWarps * kBytes);
    int tile = blockIdx.x, step = 0;  // of the next piece
    const auto request = [&](uint8_t* to) {
        if (tile < part.tiles) {
            const int bytes = chunks_of(step) * chunk_bytes(K);
#pragma unroll
            for (int i = 0; i < kBytes; i += 512)
                if ((kWhole && i + 512 <= kBytes) || i + 16 * lane < bytes)
                    copy_async16(to + i + 16 * lane, from + i);
        }
        commit_copies();
        from += kWarps * kBytes;
        if (Shape::kHeld || ++step == s.steps) step = 0, tile += gridDim.x, from += jump - kWarps * kBytes;
    };
#pragma unroll
    for (int i = 0; i < kRing; ++i) request(ring + i * kBytes);
    prologue.early(h, 0);
    // The end: thread = row r of a round's tile; of every other batch of rounds by the other half of the warps.
    const int r = threadIdx.x % kTileRows;
    constexpr bool kPaired = std::decay_t<Finish>::kPaired;
    constexpr int kOut = kPaired ? kTileRows / 2 : kTileRows;  // rows of y that a tile has
    int round_of, row;
    bool adds;
    float factor = 1, up_factor = 1;
    typename std::decay_t<Finish>::Loaded loaded{};
    const auto prepare = [&](int batch) {
        round_of = threadIdx.x / kTileRows;
        if (E == Extent::many) round_of = (round_of + batch * kRounds) % (2 * kRounds);
        const int own_tile = blockIdx.x + (batch * kRounds + round_of) * gridDim.x;
        row = own_tile * kOut + r;
        adds = r < kOut && round_of < (E == Extent::many ? kRounds : s.rounds) &&
               row < (kPaired ? part.rows / 2 : part.rows);
        if (!adds) return;
        if constexpr (K != Kind::bf16 || kPaired) factor = part.factor[own_tile * kTileRows + r];
        if constexpr (kPaired) up_factor = part.factor[own_tile * kTileRows + r + kOut];
        if constexpr (!kPaired) finish.early(loaded, row, 0);
    };
    static_assert(2 * one_rounds(Extent::many) * kTileRows == kThreads);
    prepare(0);
    wait_for_predecessor();
    const auto load = [&] {
        if constexpr (!kPaired)
            if (adds) finish.load(loaded, row, 0);
    };
    prologue.ask();
    load();
    prologue(h, 0);
    __syncthreads();
    prologue.late();

    uint8_t* piece = ring;
    const OneRow<K, Shape::kHeld> x{h + warp * kPieceChunks<K> * kChunkCols};
    const int steps = Shape::kHeld ? 1 : s.steps;
    int at = blockIdx.x;
#pragma unroll 1
    for (int batch = 0;; ++batch) {
        float* now = sums + (E == Extent::many ? batch % 2 * kSums : 0);
        float* to = now + warp * kTileRows + (lane >> 2);
#pragma unroll 1
        for (int i = 0; at < part.tiles && (E == Extent::few || i < kRounds);
             ++i, at += gridDim.x, to += kWarps * kTileRows) {
            float acc[1][4] = {};
#pragma unroll 1
            for (int j = 0; j < steps; ++j) {
                wait_copies<kRing - 1>();
                if constexpr (K != Kind::bf16) __syncwarp();  // parts were copied by other lanes
                x.multiply(piece, j, chunks_of(j), lane, acc);
                if constexpr (Shape::kRefills) {
                    if constexpr (K != Kind::bf16) __syncwarp();
                    request(piece);
                    piece = piece == ring + (kRing - 1) * kBytes ? ring : piece + kBytes;
                } else {
                    commit_copies();
                    piece += kBytes;
                }
            }
            if ((lane & 3) == 0) {
                to[0] = acc[0][0];
                to[8] = acc[0][2];
            }
        }
        __syncthreads();
        if (adds) {
            const float* from = now + round_of * kWarps * kTileRows + r;
            const float sum = scaled(add_splits(kWarps, from, kTileRows), factor);
            if constexpr (kPaired)
                finish.store(row, 0, sum, scaled(add_splits(kWarps, from + kOut, kTileRows), up_factor));
            else
                finish.store(row, 0, loaded, sum);
        }
        if (E == Extent::few || at >= part.tiles) break;
        prepare(batch + 1);
        load();
    }
}

}  // namespace quern::cuda::linear
