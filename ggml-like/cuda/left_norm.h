// A norm that is done in two places, few rows: who makes x also writes x * norm, rounded to BF16, and the
// squares of its columns, tile by tile; who reads it multiplies its sums with the factor, 1 / rms, one number
// a row. So nobody waits for x, sums up squares and norms again.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/ptx.cuh"

namespace quern::cuda {

/// The part of who makes x.
struct NormWork {
    const float* norm = nullptr;  // null: there is nothing to do
    bf16* h = nullptr;            // [rows, columns]
    int columns = 0;
    RowSums* sums = nullptr;
    int first = 0;  // row of `sums` that row 0 is

    NormWork from_row(int row) const {
        NormWork work = *this;
        work.first += row;
        work.h += static_cast<int64_t>(row) * columns;
        return work;
    }
};

/// Whether columns are tiles that `sums` has room for.
inline bool leaves_tiles(int64_t columns) { return columns % 16 == 0 && columns <= kLeftTiles * 16; }

/// Whether whoever makes `x`, up to kLeftRows rows of it, may do this for the norm_linear after it, which
/// knows from then on. The same for any number of rows.
bool leave_norm(Context& context, const Tensor& x, NormWork& work);

}  // namespace quern::cuda
