// Packing: checkpoint rows in device memory become packed chunks (packed.h). BF16 stays as it is, F32 and F16 are
// rounded to BF16; FP8 and NVFP4 keep their codes and scales, but NVFP4 codes under a scale of zero become zeros.
#pragma once

#include "ggml-like/cuda/context.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::pack {

enum class RawType : int { f32, f16, bf16, fp8, nvfp4 };

/// Rows [row0, row0 + rows) of one segment. Row r of these goes
///   stacked   to packed row place + row0 + r
///   paired    to row (row0 + r) % 8 + 8 * half of tile (row0 + r) / 8
struct RawRows {
    RawType type;
    const void* values;          // of row0 on, row-major [rows, columns]; nvfp4 [rows, columns / 2]
    const uint8_t* nvfp4_scale;  // of row0 on, [rows, columns / 16]
    const float*
        scale;  // fp8: null, or one a row (of row0 on), or one a block of 128 x 128 of the whole segment
    bool scale_blocks;
    float global_scale;
    int64_t rows, columns, row0;
    bool paired;
    int half;
    int64_t place;  // stacked: the packed row of the segment's first row
};

/// Rows, and the packed matrix that they go to. `data` and `factor` must be zero before the first rows of a matrix
/// come. fp8 segments begin at a multiple of 8 packed rows, others anywhere.
struct PackTask {
    RawRows raw;
    uint8_t* data;
    float* factor;
    int chunks;
    int first_block;  // of the task, in the launch
};

/// Blocks of a launch that a task takes.
int pack_blocks(const RawRows& raw, int chunks);

/// All tasks in one launch of `blocks` blocks. task_of: each block's task. Both lists are in device memory.
void pack_rows(cudaStream_t stream, const PackTask* tasks, const int* task_of, int blocks);

/// Synthetic weights for measurements: random codes, and scales that give values of about N(0, deviation). The same
/// seed gives the same weights.
void fill_random(cudaStream_t stream, Kind kind, uint8_t* data, float* factor, int64_t tiles, int chunks,
                 float deviation, uint64_t seed);

}  // namespace quern::cuda::pack
