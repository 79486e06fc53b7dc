// The column with the highest logit of a row, and the token that it stands for (ops/best_token.h).
#pragma once

#include "ggml-like/cuda/ptx/ordered_bits.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"
#include "ggml-like/ops/best_token.h"

namespace quern::cuda::linear {

using namespace ptx;

struct BestColumns {
    int first, start, vocab;   // as in TokenColumns
    int* ids;                  // [rows]
    unsigned long long* work;  // [rows, kBestBlocks]
    unsigned* counters;        // one a row

    __device__ int token(int column) const { return column < first ? start + column : column - first; }
    /// Larger for a higher logit, then for a lower column; 0 where the column may not win.
    __device__ unsigned long long key(float logit, int column) const {
        if (logit != logit || token(column) >= vocab) return 0;
        return static_cast<unsigned long long>(ordered_bits(logit + 0.0f)) << 32 |
               ~static_cast<uint32_t>(column);
    }
    /// Called by all threads of the `blocks` blocks of a row, each of kWarps warps: the best of their keys becomes the row's token.
    template <int kWarps>
    __device__ void choose(int row, int blocks, unsigned long long own) const {
        own = largest<kWarps>(own);
        unsigned long long* of_row = work + static_cast<int64_t>(row) * kBestBlocks;
        if (threadIdx.x == 0) __stcg(of_row + blockIdx.x, own);
        if (!last_block(counters + row, static_cast<unsigned>(blocks))) return;
        own = static_cast<int>(threadIdx.x) < blocks ? __ldcg(of_row + threadIdx.x) : 0;
        own = largest<kWarps>(own);
        if (threadIdx.x == 0) ids[row] = own == 0 ? 0 : token(static_cast<int>(~static_cast<uint32_t>(own)));
    }

  private:
    /// All threads get the largest of the block.
    template <int kWarps>
    __device__ static unsigned long long largest(unsigned long long own) {
        __shared__ unsigned long long of_warp[kWarps];
#pragma unroll
        for (int d = 16; d > 0; d /= 2) own = max(own, __shfl_xor_sync(0xffffffffu, own, d));
        __syncthreads();
        if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = own;
        __syncthreads();
        for (const unsigned long long other : of_warp) own = max(own, other);
        return own;
    }
};

/// ids and work: of best_token's outputs.
inline BestColumns best_columns(const TokenColumns& t, const Tensor& ids, const Tensor& work, Context& c) {
    return {static_cast<int>(t.first),     static_cast<int>(t.start),
            static_cast<int>(t.vocab),     ids.as<int>(),
            work.as<unsigned long long>(), c.counters};
}

}  // namespace quern::cuda::linear
