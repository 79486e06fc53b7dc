// The router's logits in answer steps. For each 16 columns of h, the products of all experts are rounded to 64-bit
// fixed point and added up, so that any order of adding gives the same bits. Logits lack the norm's factor
// (epilogue.cuh).
//
//   up to 8 rows   a block of linear_add that has made 16 columns of h multiplies them with the router's same columns,
//                  and adds to sums in memory: no kernel has to wait for h and read it again
//   more rows      a kernel of its own (route_logits.cu)
//
// Fixed point: 2^-32 units; a product of 16 columns is clamped to +-2^21.
//
// Traffic: the router once, h once; 8 bytes a logit and block, in L2. Adding to the sums takes 1.0 us a layer with one
// row; with this 640 tokens a second, with a kernel for the router 630 (H200, 2026-11).
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/few_rows.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// The router, and the sums of its logits: I64 [rows, pitch], zeros before the run.
struct RouteWork {
    Part router;
    int chunks;  // of the router
    int logits;  // E + 1
    int64_t* sums;
    int pitch;
};

inline constexpr float kSumsOne = 0x1p32f, kMaxSum = 0x1p21f;  // 1 in fixed point; the clamp

__device__ __forceinline__ int64_t fixed_point(float v) {
    return __float2ll_rn(fminf(fmaxf(v, -kMaxSum), kMaxSum) * kSumsOne);
}
__device__ __forceinline__ float sum_of(long long fixed) { return __ll2float_rn(fixed) * (1 / kSumsOne); }
__device__ __forceinline__ float read_sum(const int64_t* sum) {
    return sum_of(__ldcg(reinterpret_cast<const long long*>(sum)));
}
inline constexpr int kRouteRows = 8;

/// h of a block's tiles of columns, for the rows of a step.
struct OwnRows {
    bf16 h[kOwnTiles][kRouteRows][kTileRows];
};

/// Where the lane's A registers of one product lie: tile `tile` of the router, its columns 16 column .. 16 column + 15.
__device__ __forceinline__ const uint8_t* router_tile(const RouteWork& w, int tile, int column) {
    constexpr int kColumnTiles = kChunkCols / kTileRows;
    const int64_t chunk = tile * w.chunks + column / kColumnTiles;
    return w.router.data + chunk * chunk_bytes(Kind::bf16) + column % kColumnTiles * 512 +
           16 * (threadIdx.x % 32);
}
/// sum = 16 logits' weights times 16 columns of h; x: the lane's row of h, from column 2t of these on.
__device__ __forceinline__ void route_product(const uint8_t* weights, const bf16* x, float (&sum)[4]) {
    const uint4 w = load16(weights);
    const uint32_t a[4] = {w.x, w.y, w.z, w.w};
    sum[0] = sum[1] = sum[2] = sum[3] = 0;
    mma(sum, a, *reinterpret_cast<const uint32_t*>(x), *reinterpret_cast<const uint32_t*>(x + 8));
}

/// The router's columns that meet a block's first tile of columns, in `bytes` of shared memory. Warp w has the router's
/// tiles w and w + 16.
class RouterTiles {
  public:
    static int bytes(const RouteWork& w) { return w.router.tiles * kRouterTileBytes; }

    /// Starts the copies, if they are wanted; before the wait, and before the first group of copies is closed.
    __device__ __forceinline__ RouterTiles(const RouteWork& work, uint8_t* memory, bool wanted)
        : w_(work), tiles_(memory) {
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i)
            if (wanted && tile(i) < w_.router.tiles)
                copy_async16(place(i), router_tile(w_, tile(i), blockIdx.x));
    }
    /// When `own` is complete: adds the products to the sums. `columns`: of h.
    __device__ __forceinline__ void add(const OwnRows& own, int rows, int columns) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, second = blockIdx.x + gridDim.x;
#pragma unroll
        for (int i = 0; i < kOwnTiles; ++i) {
            if (tile(i) >= w_.router.tiles) break;
            add_product(i, place(i), own.h[0][g] + 2 * t, rows);
            if (second < columns / kTileRows)
                add_product(i, router_tile(w_, tile(i), second), own.h[1][g] + 2 * t, rows);
        }
    }

  private:
    const RouteWork& w_;
    uint8_t* tiles_;

    __device__ __forceinline__ static int tile(int i) { return threadIdx.x / 32 + i * kWarps; }
    __device__ __forceinline__ uint8_t* place(int i) const {
        return tiles_ + tile(i) * 512 + 16 * (threadIdx.x % 32);
    }
    __device__ __forceinline__ void add_product(int i, const uint8_t* weights, const bf16* x,
                                                int rows) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        float sum[4];
        route_product(weights, x, sum);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int n = 2 * t + j % 2, logit = tile(i) * kTileRows + g + j / 2 * 8;
            if (n < rows && logit < w_.logits)
                asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(w_.sums + n * w_.pitch + logit),
                             "l"(fixed_point(sum[j]))
                             : "memory");
        }
    }
};

}  // namespace quern::cuda::moe
