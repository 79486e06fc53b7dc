// What the router of a mixture of experts needs from x, made by the linear_add that makes x: few rows. A
// block that has 16 columns of x also multiplies them with their 16 columns of the router, and adds the
// products of all experts to the sums of the other blocks (route_sums.cuh). So no kernel has to wait for x,
// norm it and multiply it again. x * norm is rounded to BF16 without the norm's factor.
//
// Traffic: the router once, x * norm once; 8 bytes a logit and block, in L2.
#pragma once

#include "ggml-like/cuda/dense_rows.cuh"
#include "ggml-like/cuda/left_norm.cuh"
#include "ggml-like/cuda/moe.h"
#include "ggml-like/cuda/route_sums.cuh"

namespace quern::cuda {

inline constexpr int kOwnTiles = 2;  // tiles of y, and of the router for a warp

/// x * norm of a block's tiles.
struct OwnRows {
    bf16 h[kOwnTiles][kLeftRows][kTileRows];
};

/// finish of dense_one and dense_rows: as AddResidual, and what the router needs of y.
struct AddForRoute {
    static constexpr bool kPaired = false;
    struct Loaded {
        float residual, norm;
    };
    AddResidual add;
    const RouteWork& work;
    OwnRows& own;

    __device__ __forceinline__ Loaded load(int row, int n) const {
        return {add.load(row, n), work.x.norm[row]};
    }
    /// By 16 neighbouring lanes for the 16 rows of a tile.
    __device__ __forceinline__ void store(int row, int n, const Loaded& before, float sum) const {
        const int tile = row / kTileRows, at = row % kTileRows;
        const float y = before.residual + sum;
        add.store(row, n, before.residual, sum);
        own.h[tile == static_cast<int>(blockIdx.x) ? 0 : 1][n][at] =
            leave_column(work.x, n, row, y, before.norm);
    }
};

/// The registers of one product: tile `tile` of the router, columns of tile `column` of y.
__device__ __forceinline__ const uint8_t* router_tile(const RouteWork& w, int tile, int column) {
    constexpr int kColumnTiles = kChunkCols / kTileRows;
    const int64_t chunk = tile * w.chunks + column / kColumnTiles;
    return w.router.data + chunk * chunk_bytes(Kind::bf16) + column % kColumnTiles * 512 +
           16 * (threadIdx.x % 32);
}

/// The router's columns that meet a block's first tile, in shared memory of `bytes`; of its tiles a warp has
/// number warp, and warp + 16.
class RouterTiles {
  public:
    static int bytes(const RouteWork& w) { return w.router.tiles * 512; }

    /// Before the wait, and before the first group of copies is closed.
    __device__ __forceinline__ RouterTiles(const RouteWork& work, uint8_t* memory)
        : w_(work), tiles_(memory) {
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i)
            if (tile(i) < w_.router.tiles) copy_async16(place(i), router_tile(w_, tile(i), blockIdx.x));
    }
    /// When `own` is complete: products to the sums.
    __device__ __forceinline__ void add(const OwnRows& own, int rows) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) <= w_.used) w_.chosen[threadIdx.x] = 0;
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
            if (tile(i) >= w_.router.tiles) break;
            float sum[4] = {};
            multiply(sum, place(i), own.h[0][g] + 2 * t);
            const int second = blockIdx.x + gridDim.x;
            if (second < w_.x.columns / kTileRows)
                multiply(sum, router_tile(w_, tile(i), second), own.h[1][g] + 2 * t);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int n = 2 * t + j % 2, logit = tile(i) * kTileRows + g + j / 2 * 8;
                if (n < rows && logit < w_.logits)
                    add_to_sum(&w_.x.sums->logits[w_.x.first + n][logit], sum[j]);
            }
        }
    }

  private:
    const RouteWork& w_;
    uint8_t* tiles_;

    __device__ __forceinline__ static int tile(int i) { return threadIdx.x / 32 + i * kWarps; }
    __device__ __forceinline__ uint8_t* place(int i) const {
        return tiles_ + tile(i) * 512 + 16 * (threadIdx.x % 32);
    }
    __device__ __forceinline__ static void multiply(float (&sum)[4], const uint8_t* weights, const bf16* x) {
        const uint4 w = load16(weights);
        const uint32_t a[4] = {w.x, w.y, w.z, w.w};
        mma(sum, a, *reinterpret_cast<const uint32_t*>(x), *reinterpret_cast<const uint32_t*>(x + 8));
    }
};

}  // namespace quern::cuda
