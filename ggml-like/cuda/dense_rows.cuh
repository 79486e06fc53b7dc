// y = h W^T for few rows, W one part of a packed weight: the main loop that norm_linear, norm_gate_up, linear_add and
// gated_norm_linear_add share. They differ in how h comes into shared memory and in what happens to a sum, or in paired
// order to the sums of gate and up.
//
//   block b owns tile groups b, b + grid, ...; a group is 16 / S tiles, S warps a tile (few_rows.cuh)
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/few_rows.cuh"

namespace quern::cuda {

/// The chunks of one warp, tile group after tile group.
struct DenseSource {
    const uint8_t* data;
    int tiles, chunks, bytes;
    int split, part, steps;  // warps a tile, this warp's place among them, steps a tile
    int tile, stride, step = 0;

    __device__ DenseSource(const Part& p, int chunk_count, int warp)
        : data(p.data), tiles(p.tiles), chunks(chunk_count), bytes(chunk_bytes(p.kind)) {
        split = warps_per_tile(chunks);
        part = warp & (split - 1);
        steps = (chunks + split - 1) / split;
        const int group = kWarps / split;
        tile = blockIdx.x * group + warp / split;
        stride = gridDim.x * group;
    }
    __device__ __forceinline__ const uint8_t* next() {
        const int chunk = part + step * split;
        const uint8_t* from = tile < tiles && chunk < chunks
                                  ? data + (static_cast<int64_t>(tile) * chunks + chunk) * bytes
                                  : nullptr;
        if (++step == steps) {
            step = 0;
            tile += stride;
        }
        return from;
    }
};

template <Kind K, int NT>
int dense_shared_bytes(int rows, int chunks) {
    return ring_bytes<K, NT>() + rows * activation_stride(chunks) * 2 + sums_bytes<NT>();
}

inline constexpr int kDenseStatic = 1024;  // shared memory of prologues

template <Kind K, int NT>
bool dense_fits(const Context& c, int rows, int chunks) {
    return dense_shared_bytes<K, NT>(rows, chunks) + kDenseStatic <= c.shared_bytes;
}

/// Rows of one launch: all, or of a wide matrix as many as fit. Each launch then reads the weights again.
template <Kind K>
int dense_rows_at_once(const Context& c, int rows, int chunks) {
    while (rows > 1 && !(rows <= 8 ? dense_fits<K, 1>(c, rows, chunks) : dense_fits<K, 2>(c, rows, chunks))) --rows;
    return rows;
}

/// Whether a step of `rows` goes through dense_rows. 1 to 8 rows always do, so that a row's bits do not depend on the
/// others; more only if one launch does it, otherwise tiles (gemm.h) read less.
inline bool dense_takes(const Context& c, const Packed& w, int rows) {
    const auto fits = [&](Kind kind) {
        return kind == Kind::bf16  ? dense_fits<Kind::bf16, 2>(c, rows, w.chunks)
               : kind == Kind::fp8 ? dense_fits<Kind::fp8, 2>(c, rows, w.chunks)
                                   : dense_fits<Kind::nvfp4, 2>(c, rows, w.chunks);
    };
    if (rows <= 8) return true;
    for (int i = 0; i < w.parts; ++i)
        if (rows > kFewRows || !fits(w.part[i].kind)) return false;
    return true;
}

/// Everything from the first weight to the last sum. prologue.early() may read weights, prologue(h, stride) writes
/// `rows` rows of activations after the wait for the predecessor, both by all threads. finish.load(row of the part,
/// column n) comes before the sums are made, finish.store(row, n, loaded value, sum) after; each once for each sum. With
/// Finish::kPaired the part is in paired order, a row one of gate and up, and finish.store(row, n, gate sum, up sum).
template <Kind K, int NT, typename Prologue, typename Finish>
__device__ __forceinline__ void dense_rows(const Part& part, int chunks, int rows, Prologue&& prologue,
                                           const Finish& finish) {
    extern __shared__ __align__(16) uint8_t shared[];
    bf16* h = reinterpret_cast<bf16*>(shared + ring_bytes<K, NT>());
    float* sums = reinterpret_cast<float*>(shared + ring_bytes<K, NT>() + rows * activation_stride(chunks) * 2);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int stride = activation_stride(chunks);

    allow_successor();
    DenseSource source(part, chunks, warp);
    const int split = source.split, mine = source.part, steps = source.steps, group = kWarps / split;
    Ring<K, NT> ring(shared, warp);
    ring.fill(source, lane);
    prologue.early();
    wait_for_predecessor();
    prologue(h, stride);
    __syncthreads();

    const bf16* x[NT];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) x[nt] = h + min(8 * nt + (lane >> 2), rows - 1) * stride;
    constexpr int kOut = Finish::kPaired ? 8 : 16;  // rows of y that a tile has
    const int height = Finish::kPaired ? part.rows / 2 : part.rows;
    const int groups = tile_groups(part.tiles, chunks);
    int turn = 0;
    for (int at = blockIdx.x; at < groups; at += gridDim.x, ++turn) {
        // Another warp finishes each turn, so that none falls behind. What it needs from memory is asked for now.
        const int thread = (threadIdx.x - 32 * turn) & (kThreads - 1);
        const auto row_of = [&](int i) { return (at * group + i / (kOut * rows)) * kOut + i % kOut; };
        const auto valid = [&](int i) { return i < group * kOut * rows && row_of(i) < height; };
        float factor = 1, loaded = 0;  // paired: of gate and of up
        const auto load = [&](int i) {
            const int row = row_of(i);
            if constexpr (Finish::kPaired) {
                factor = part.factor[row / 8 * kTileRows + row % 8];
                loaded = part.factor[row / 8 * kTileRows + row % 8 + 8];
            } else {
                if constexpr (K != Kind::bf16) factor = part.factor[row];
                loaded = finish.load(row, i / kOut % rows);
            }
        };
        if (valid(thread)) load(thread);
        float sum[NT][4] = {};
        for (int i = 0; i < steps; ++i) {
            const uint8_t* chunk = ring.wait();
            const int c = mine + i * split;
            if (c < chunks) multiply_chunk<K, NT>(chunk, x, c * kChunkCols, lane, sum);
            ring.release(source, lane);
        }
        float* now = sums + (turn & 1) * kWarps * 128 * NT;
        store_sums<NT>(now + warp * 128 * NT, sum, lane);
        __syncthreads();
        for (int i = thread; valid(i); i += kThreads) {
            const int row = row_of(i), n = i / kOut % rows;
            if (i != thread) load(i);
            const float* from = now + i / (kOut * rows) * split * 128 * NT + n * 16 + i % kOut;
            const float total = add_parts(split, [&](int p) { return from[p * 128 * NT]; });
            if constexpr (Finish::kPaired)
                finish.store(row, n, total * factor, add_parts(split, [&](int p) { return from[p * 128 * NT + 8]; }) * loaded);
            else
                finish.store(row, n, loaded, total * factor);
        }
    }
}

/// y[n][row] = residual[n][row] + sum, F32.
struct AddResidual {
    static constexpr bool kPaired = false;
    const float* residual;
    float* y;
    int64_t ld;

    __device__ __forceinline__ float load(int row, int n) const { return __ldcg(residual + n * ld + row); }
    __device__ __forceinline__ void store(int row, int n, float before, float sum) const { y[n * ld + row] = before + sum; }
};

}  // namespace quern::cuda
