// Rows of h in the order of groups, once for each pair, so that the copy engine brings a tile's rows by boxes (expert_tour.cuh). Copies of
// 16 bytes a lane from rows that lie apart would keep products from shared memory for longer than this takes.
//
//   block   a row, a thread 8 columns at a time, which go to the places of all its pairs
//
// Traffic: h once, and each pair's row to memory. Bound: bytes.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/gemm_experts.h"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::moe {

using namespace ptx;

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    group_rows_kernel(const uint4* h, const int* places, int used, int eights, uint4* grouped) {
    // Only after its own wait, so that groups are there before the products begin, and before moe_down does (moe.h).
    wait_for_predecessor();
    allow_successor();
    const int64_t row = blockIdx.x;
    places += row * used;
    for (int k = static_cast<int>(threadIdx.x); k < eights; k += kThreads) {
        const uint4 v = __ldcg(h + row * eights + k);
#pragma unroll 8
        for (int j = 0; j < used; ++j) __stcg(grouped + int64_t{__ldcg(places + j)} * eights + k, v);
    }
}

}  // namespace

void group_rows(Context& context, const bf16* h, int columns, int rows, int used, const int* places,
                bf16* grouped) {
    launch(context, "moe_gate_up group rows", group_rows_kernel, rows, kThreads, 0,
           reinterpret_cast<const uint4*>(h), places, used, columns / 8, reinterpret_cast<uint4*>(grouped));
}

}  // namespace quern::cuda::moe
