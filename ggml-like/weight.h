// Weight: one checkpoint matrix, or several stacked along their rows, in the format it was stored in.
//
// y = x W^T with W [rows, cols] row-major, cols contiguous. A fused projection keeps its original matrices as
// segments, each with its own format and scales: merging q/k/v or gate/up never rescales anything.
// Memory belongs to the checkpoint (a read-only mapping, possibly unaligned) or to the model.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "ggml-like/tensor.h"

namespace quern {

/// How stored values become weights; every form is a multiplication.
enum class ScaleKind : uint8_t {
    none,        // F32, BF16, F16 as they are
    per_tensor,  // F8_E4M3: w = value * global_scale
    per_row,     // F8_E4M3: w = value * scale[row], scale F32 [rows]
    block128,  // F8_E4M3: w = value * scale[row / 128][col / 128], scale F32 [ceil(rows/128), ceil(cols/128)]
    nvfp4,     // NVFP4: w = e2m1 * e4m3(scale[row][col / 16]) * global_scale, scale E4M3 [rows, cols/16]
};

/// How an op reads the rows of a weight, for backends that repack.
enum class RowOrder {
    stacked,  // segment after segment
    paired,   // two segments {gate, up} of the same height, read side by side
};

struct WeightSegment {
    std::string name;  // the checkpoint's module, for messages
    DType dtype = DType::BF16;
    int64_t rows = 0;
    int64_t cols = 0;
    const void* data = nullptr;  // NVFP4: codes [rows, cols/2]
    ScaleKind scale_kind = ScaleKind::none;
    const void* scale = nullptr;
    float global_scale = 1.0f;  // multiplier form, whatever the checkpoint stores
    /// Columns of the stored matrix of which these are some, until gather_columns has copied them; 0: these are all.
    int64_t stored_cols = 0;

    /// Bytes a full read touches: values and scales.
    int64_t bytes() const;
};

struct Weight {
    std::string name;  // "L12.gdn.in_proj"
    int64_t rows = 0;  // sum over the segments
    int64_t cols = 0;
    std::vector<WeightSegment> segments;
    const void* placed = nullptr;  // the backend's own form (Backend::place_weight); null: use the segments

    Weight() = default;
    Weight(std::string weight_name, std::vector<WeightSegment> parts);
    explicit operator bool() const { return !segments.empty(); }
    int64_t bytes() const;
};

/// One Weight an expert, all of the same shape. gate_up: segments {gate [F, D], up [F, D]}; down: {[D, F]}.
struct ExpertWeights {
    std::string name;
    int64_t rows = 0;
    int64_t cols = 0;
    std::vector<Weight> expert;
    const void* placed = nullptr;  // as in Weight, for all experts together

    int64_t count() const { return static_cast<int64_t>(expert.size()); }
    int64_t bytes() const;
};

/// Rows [begin, begin + rows) of a segment, as a segment of its own. With scales a block, `begin` must be a multiple of 128.
WeightSegment slice_rows(const WeightSegment& s, int64_t begin, int64_t rows, const std::string& name);
/// The first rows of a stacked matrix; not placed.
Weight first_rows(const Weight& w, int64_t rows);
/// Columns [begin, begin + cols), to be copied by gather_columns. `begin` must be a multiple of the columns of a block of
/// scales (16 or 128) or, in BF16, F16 and F32, of 2.
WeightSegment slice_columns(const WeightSegment& s, int64_t begin, int64_t cols, const std::string& name);
/// Bytes of a copy, which gather_columns makes at `to` and `s` then points into.
int64_t gathered_bytes(const WeightSegment& s);
void gather_columns(WeightSegment& s, std::byte* to);

/// Row `row` as floats, all scales applied in FP32: out[cols]. The plain definition of every format.
void dequantize_row(const WeightSegment& s, int64_t row, float* out);
/// The same for a stacked matrix.
void dequantize_row(const Weight& w, int64_t row, float* out);

}  // namespace quern
