// Raw checkpoint rows in device memory -> packed chunks (packed.h).
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::pack {

enum class RawType : int { f32, f16, bf16, fp8, nvfp4 };

/// Rows [row0, row0 + rows) of one segment. Row r of them goes to packed row: stacked: place + row0 + r;
/// paired: tile (row0 + r) / 8, row (row0 + r) % 8 + 8 * half.
struct RawRows {
    RawType type;
    const void* values;          // of row0 on, row-major [rows, columns]; nvfp4 [rows, columns / 2]
    const uint8_t* nvfp4_scale;  // of row0 on, [rows, columns / 16]
    const float* scale;  // fp8: null, or per row (of row0 on), or blocks of 128 x 128 of the whole segment
    bool scale_blocks;
    float global_scale;
    int64_t rows, columns, row0;
    bool paired;
    int half;
    int64_t place;
};

/// Rows and where they go. `data` and `factor` must be zero before the first rows of a matrix come. nvfp4 and
/// bf16 take rows at any place; fp8 segments begin at a multiple of 8.
struct PackTask {
    RawRows raw;
    uint8_t* data;
    float* factor;
    int chunks;
    int first_block;  // of the launch
};

/// Blocks of a launch that a task takes.
int pack_blocks(const RawRows& raw, int chunks);

/// All tasks in one launch of `blocks` blocks. task_of: of each block, in device memory as the tasks are.
void pack_rows(cudaStream_t stream, const PackTask* tasks, const int* task_of, int blocks);

/// Synthetic weights for measurements: random codes and scales of sensible size. `seed` picks the stream.
void fill_random(cudaStream_t stream, Kind kind, uint8_t* data, float* factor, int64_t tiles, int chunks,
                 float deviation, uint64_t seed);

}  // namespace quern::cuda::pack
