// Router logits of 9 to 64 answer rows: the sums of route_work.cuh, with one block for 16 logits of 8 rows.
//
//   columns of h   | 16 | 16 | 16 | ... | 16 | 16 ...
//   warp             0    1    2   ...   15    0
//
// Warp w makes a product for each of columns 16 w, 16 (w + 16), ..., rounds it to fixed point and adds in 64 bits; the
// warps' sums meet in shared memory (16 KB).
//
// Traffic: the router once for each 8 rows, h once for each 16 logits, all from L2; a warp's first weights are loaded
// before the wait. Bound: latency: 7 us with 16 rows, 8 with 64 (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/route_logits.h"
#include "ggml-like/cuda/moe/route_work.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

constexpr int kAhead = 8;  // products of a warp whose operands are loaded at once

__global__ void __launch_bounds__(kThreads)
    route_logits_kernel(RouteWork w, const bf16* h, int rows, int columns) {
    __shared__ long long sums[kWarps][4][32];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.y * kRouteRows, n = min(first + g, rows - 1);
    const bf16* x = h + static_cast<int64_t>(n) * columns + 2 * t;
    const int tiles = columns / kTileRows;
    uint4 weights[kAhead];
    const auto load_weights = [&](int base) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            weights[i] = load16(router_tile(w, blockIdx.x, min(base + i * kWarps, tiles - 1)));
    };
    load_weights(warp);
    wait_for_predecessor();
    long long own[4] = {};
#pragma unroll 1
    for (int base = warp; base < tiles; base += kWarps * kAhead) {
        if (base != warp) load_weights(base);
        uint32_t low[kAhead], high[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int tile = min(base + i * kWarps, tiles - 1);
            low[i] = __ldcg(reinterpret_cast<const uint32_t*>(x + tile * kTileRows));
            high[i] = __ldcg(reinterpret_cast<const uint32_t*>(x + tile * kTileRows + 8));
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (base + i * kWarps >= tiles) break;
            float sum[4] = {};
            const uint32_t a[4] = {weights[i].x, weights[i].y, weights[i].z, weights[i].w};
            mma(sum, a, low[i], high[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) own[j] += fixed_point(sum[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[warp][j][lane] = own[j];
    __syncthreads();
    if (threadIdx.x >= 128) return;
    const int j = threadIdx.x / 32, logit = blockIdx.x * kTileRows + g + j / 2 * 8,
              row = first + 2 * t + j % 2;
    long long total = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) total += sums[i][j][lane];
    if (row < rows && logit < w.logits) w.sums[static_cast<int64_t>(row) * w.pitch + logit] = total;
}

}  // namespace

void route_logits(Context& c, const Packed& router, const void* h, int rows, int64_t* sums, int pitch) {
    if (router.parts != 1 || router.part[0].kind != Kind::bf16)
        unsupported("linear_add", "a router that is not BF16");
    const RouteWork work{router.part[0], router.chunks, router.rows, sums, pitch};
    launch(c, "route_logits", route_logits_kernel,
           dim3(work.router.tiles, (rows + kRouteRows - 1) / kRouteRows), kThreads, 0, work,
           static_cast<const bf16*>(h), rows, router.cols);
}

}  // namespace quern::cuda::moe
