// What the NVFP4 kernels of moe_down share: their tiles, the rows that they read, the end of those that add terms.
#pragma once

#include "ggml-like/cuda/comm/tile_sums.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// The block's tile of an expert; -1: of the shared one.
struct DownTile {
    const uint8_t* data;
    const float* factor;

    __device__ __forceinline__ DownTile(const Down& a, int expert) {
        const int tile = blockIdx.x;
        data = expert < 0 ? a.shared.data + static_cast<int64_t>(tile) * a.shared_chunks * kFp4Chunk
                          : a.experts.data + expert * a.experts.expert_bytes +
                                static_cast<int64_t>(tile) * a.experts.chunks * kFp4Chunk;
        factor = expert < 0
                     ? a.shared.factor + tile * kTileRows
                     : a.experts.factor + (static_cast<int64_t>(expert) * a.experts.tiles + tile) * kTileRows;
    }
};

/// Where 16 numbers of routed or shared_in come from and go to: block b, counted through all rows in shared memory.
struct RowBlock {
    const bf16* from = nullptr;  // null: zeros
    uint8_t* row = nullptr;      // null: there is no such block
    int block = 0;

    __device__ __forceinline__ RowBlock(const Down& a, int b, uint8_t* routed, int routed_bytes,
                                        uint8_t* shared, int shared_bytes) {
        const int blocks = a.experts.chunks * 4, routed_blocks = a.rows * a.used * blocks;
        const int shared_blocks = a.shared_chunks * 4;
        if (b >= routed_blocks + a.rows * shared_blocks) return;
        const bool is_shared = b >= routed_blocks;
        const int at = is_shared ? b - routed_blocks : b, each = is_shared ? shared_blocks : blocks;
        const int n = quotient(at, each), width = is_shared ? a.shared_width : a.width;
        block = at - n * each;
        row = is_shared ? shared + n * shared_bytes : routed + n * routed_bytes;
        if (block * 16 < width)
            from = (is_shared ? a.shared_in : a.routed) + static_cast<int64_t>(n) * width + block * 16;
    }
    __device__ __forceinline__ void load(Fp4Block& numbers) const {
        if (from != nullptr) numbers.load(from);
    }
    __device__ __forceinline__ void store(const Fp4Block& numbers) const {
        if (row != nullptr) numbers.store(row, block);
    }
    __device__ __forceinline__ void copy() const {
        Fp4Block numbers;
        load(numbers), store(numbers);
    }
};

/// All threads of the block: rows of routed and shared_in into shared memory, from block of numbers `first` on.
/// kTogether: loads of a thread that are under way at the same time.
template <int kTogether>
__device__ __forceinline__ void load_rows(const Down& a, int first, uint8_t* routed, int routed_bytes,
                                          uint8_t* shared, int shared_bytes) {
    const int all = a.rows * 4 * (a.used * a.experts.chunks + a.shared_chunks);
#pragma unroll 1
    for (int begin = first; begin < all; begin += kTogether * kThreads) {
        const auto block = [&](int i) {
            return RowBlock(a, begin + static_cast<int>(threadIdx.x) + i * kThreads, routed, routed_bytes,
                            shared, shared_bytes);
        };
        Fp4Block numbers[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) block(i).load(numbers[i]);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) block(i).store(numbers[i]);
    }
}

/// What add_terms needs for row n of the step and row r of the tile, loaded early.
struct Before {
    float residual = 0, norm = 0;

    __device__ __forceinline__ void load(const Down& a, int n, int r) {
        const int row = blockIdx.x * kTileRows + r;
        if (row >= a.experts.rows) return;
        residual = __ldcg(a.residual + n * a.ld + row);
        norm = a.next.norm[row];
    }
};
/// Row r of the tile for row n of the step: y from its terms [used + 1][16], and what the next norm needs. By 16
/// neighbouring lanes.
__device__ __forceinline__ void add_terms(const Down& a, const float* terms, int n, int r,
                                          const Before& before) {
    const int row = blockIdx.x * kTileRows + r;
    if (row >= a.experts.rows) return;
    float sum = before.residual;
#pragma unroll 9
    for (int j = 0; j <= a.used; ++j) sum += terms[j * kTileRows + r];
    a.y[n * a.ld + row] = sum;
    defer_column(a.next, n, row, sum, before.norm);
}

/// How a kernel that has all terms of its tile ends, and what it is given for that: with add_terms.
struct AddTerms {
    struct Parameter {};

    __device__ explicit AddTerms(const Parameter&) {}
    __device__ __forceinline__ void begin(bool, int, int) const {}
    __device__ __forceinline__ void add(const Down& a, const float* terms, int n, int r,
                                        const Before& before) const {
        add_terms(a, terms, n, r, before);
    }
};
/// The same of the sums over ranks.
struct AddTermsOverRanks {
    using Parameter = comm::Peers;
    comm::TileSums sums;
    comm::LinePart line;

    __device__ explicit AddTermsOverRanks(const comm::Peers& peers) : sums(peers) {}
    /// adds: this thread will, row r of the tile for row n of the step. Between wait_for_predecessor and a barrier before `add`.
    __device__ __forceinline__ void begin(bool adds, int n, int r) {
        if (adds) line = sums.part(blockIdx.x, n, r);
    }
    __device__ __forceinline__ void add(const Down& a, const float* terms, int n, int r,
                                        const Before& before) const {
        const int row = blockIdx.x * kTileRows + r;
        if (row >= a.experts.rows) return;
        float part = 0;
#pragma unroll 9
        for (int j = 0; j <= a.used; ++j) part += terms[j * kTileRows + r];
        const float x = add_residual(before.residual, sums.sum(line, part));
        a.y[n * a.ld + row] = x;
        defer_column(a.next, n, row, x, before.norm);
    }
};

/// Waits until groups, ids and weights are complete: for the flag, or, without one, for the predecessor.
__device__ __forceinline__ void wait_for_choice(const Down& a) {
    if (a.ready == nullptr) return wait_for_predecessor();
    if (threadIdx.x == 0) published(a.ready), __threadfence();
    __syncthreads();
}

/// The launches. peers: the sums are over ranks; or null.
void launch_down_one(Context& c, const Down& a, const comm::Peers* peers);
void launch_down_few(Context& c, const Down& a, const comm::Peers* peers);
void launch_down_stream(Context& c, const Down& a, const comm::Peers* peers);

}  // namespace quern::cuda::moe
