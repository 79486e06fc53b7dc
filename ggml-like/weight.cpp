#include "ggml-like/weight.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

constexpr int64_t kFp8Block = 128;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t scale_bytes(const WeightSegment& s) {
    switch (s.scale_kind) {
        case ScaleKind::none:
            return 0;
        case ScaleKind::per_tensor:
            return 4;
        case ScaleKind::per_row:
            return 4 * s.rows;
        case ScaleKind::block128:
            return 4 * ceil_div(s.rows, 128) * ceil_div(s.cols, 128);
        case ScaleKind::nvfp4:
            return s.rows * (s.cols / nvfp4::kBlock) + 4;
    }
    return 0;
}

template <typename T>
T load_unaligned(const void* data, int64_t index) {
    T value;
    std::memcpy(&value, static_cast<const char*>(data) + index * static_cast<int64_t>(sizeof(T)),
                sizeof value);
    return value;
}

void load_values(const WeightSegment& s, int64_t row, float* out) {
    const int64_t at = row * s.cols;
    switch (s.dtype) {
        case DType::F32:
            for (int64_t i = 0; i < s.cols; ++i) out[i] = load_unaligned<float>(s.data, at + i);
            return;
        case DType::BF16:
            for (int64_t i = 0; i < s.cols; ++i)
                out[i] = bf16_to_float(load_unaligned<uint16_t>(s.data, at + i));
            return;
        case DType::F16:
            for (int64_t i = 0; i < s.cols; ++i)
                out[i] = f16_to_float(load_unaligned<uint16_t>(s.data, at + i));
            return;
        case DType::F8_E4M3:
            for (int64_t i = 0; i < s.cols; ++i)
                out[i] = nvfp4::e4m3_to_float(load_unaligned<uint8_t>(s.data, at + i));
            return;
        case DType::NVFP4:
            for (int64_t i = 0; i < s.cols; i += 2) {
                const auto pair = load_unaligned<uint8_t>(s.data, (at + i) / 2);
                out[i] = nvfp4::kCodeValue[pair & 15];
                out[i + 1] = nvfp4::kCodeValue[pair >> 4];
            }
            return;
        default:
            FAIL(runtime, "[weight] {}: {} is not a weight type", s.name, dtype_name(s.dtype));
    }
}

/// Multiplies runs of `run` columns by scale(index of the run).
template <typename F>
void scale_runs(float* values, int64_t cols, int64_t run, F&& scale) {
    for (int64_t begin = 0; begin < cols; begin += run) {
        const float factor = scale(begin / run);
        for (int64_t i = begin; i < std::min(begin + run, cols); ++i) values[i] *= factor;
    }
}

/// Bytes of a row's values, and of the scales of a row, or of the 128 rows that share them.
struct RowBytes {
    int64_t values, scales;
};

RowBytes row_bytes(const WeightSegment& s, int64_t cols) {
    const int64_t values = dtype_bytes(s.dtype, cols);
    if (s.scale_kind == ScaleKind::nvfp4) return {values, cols / nvfp4::kBlock};
    return {values, s.scale_kind == ScaleKind::block128 ? 4 * ceil_div(cols, kFp8Block) : 0};
}

/// Such runs of scales; 0: scales are not those of blocks.
int64_t scale_rows(const WeightSegment& s) {
    if (s.scale_kind == ScaleKind::nvfp4) return s.rows;
    return s.scale_kind == ScaleKind::block128 ? ceil_div(s.rows, kFp8Block) : 0;
}

const std::byte* bytes_at(const void* data, int64_t offset) {
    return data != nullptr ? static_cast<const std::byte*>(data) + offset : nullptr;
}

void gather(const void* from, int64_t rows, int64_t bytes, int64_t stored_bytes, std::byte* to) {
    for (int64_t r = 0; r < rows; ++r, to += bytes)
        std::memcpy(to, bytes_at(from, r * stored_bytes), static_cast<size_t>(bytes));
}

}  // namespace

WeightSegment slice_rows(const WeightSegment& s, int64_t begin, int64_t rows, const std::string& name) {
    CHECK(begin >= 0 && rows > 0 && begin + rows <= s.rows, "[slice_rows] {}: rows {} + {} of {}", s.name,
          begin, rows, s.rows);
    if (s.scale_kind == ScaleKind::block128 && begin % kFp8Block != 0)
        FAIL(model, "{}: a scale stands for 128 rows, and a matrix of its own begins at row {}", s.name,
             begin);
    const RowBytes row = row_bytes(s, s.stored_cols > 0 ? s.stored_cols : s.cols);
    WeightSegment out = s;
    out.name = name;
    out.rows = rows;
    out.data = bytes_at(s.data, begin * row.values);
    if (s.scale_kind == ScaleKind::per_row) out.scale = bytes_at(s.scale, begin * 4);
    if (s.scale_kind == ScaleKind::block128) out.scale = bytes_at(s.scale, begin / kFp8Block * row.scales);
    if (s.scale_kind == ScaleKind::nvfp4) out.scale = bytes_at(s.scale, begin * row.scales);
    return out;
}

Weight first_rows(const Weight& w, int64_t rows) {
    CHECK(rows > 0 && rows <= w.rows, "[first_rows] {}: {} rows of {}", w.name, rows, w.rows);
    std::vector<WeightSegment> parts;
    for (const WeightSegment& s : w.segments) {
        if (rows == 0) break;
        parts.push_back(slice_rows(s, 0, std::min(rows, s.rows), s.name));
        rows -= parts.back().rows;
    }
    return Weight(w.name, std::move(parts));
}

WeightSegment slice_columns(const WeightSegment& s, int64_t begin, int64_t cols, const std::string& name) {
    CHECK(s.stored_cols == 0 && begin >= 0 && cols > 0 && begin + cols <= s.cols,
          "[slice_columns] {}: columns {} + {} of {}", s.name, begin, cols, s.cols);
    const int64_t block = s.scale_kind == ScaleKind::nvfp4      ? nvfp4::kBlock
                          : s.scale_kind == ScaleKind::block128 ? kFp8Block
                                                                : 2;
    CHECK(begin % block == 0 && (cols % block == 0 || begin + cols == s.cols),
          "[slice_columns] {}: columns {} + {} cut a block of {}", s.name, begin, cols, block);
    const RowBytes before = row_bytes(s, begin);
    WeightSegment out = s;
    out.name = name;
    out.cols = cols;
    if (s.data == nullptr) return out;
    out.stored_cols = s.cols;
    out.data = bytes_at(s.data, before.values);
    if (scale_rows(s) > 0) out.scale = bytes_at(s.scale, before.scales);
    return out;
}

int64_t gathered_bytes(const WeightSegment& s) {
    const RowBytes own = row_bytes(s, s.cols);
    return ceil_div(s.rows * own.values, 4) * 4 + scale_rows(s) * own.scales;
}

void gather_columns(WeightSegment& s, std::byte* to) {
    if (s.stored_cols == 0) return;
    const RowBytes own = row_bytes(s, s.cols), stored = row_bytes(s, s.stored_cols);
    gather(s.data, s.rows, own.values, stored.values, to);
    s.data = to;
    to += ceil_div(s.rows * own.values, 4) * 4;  // scales may be floats
    if (scale_rows(s) > 0) {
        gather(s.scale, scale_rows(s), own.scales, stored.scales, to);
        s.scale = to;
    }
    s.stored_cols = 0;
}

int64_t WeightSegment::bytes() const { return dtype_bytes(dtype, rows * cols) + scale_bytes(*this); }

Weight::Weight(std::string weight_name, std::vector<WeightSegment> parts)
    : name(std::move(weight_name)), segments(std::move(parts)) {
    CHECK(!segments.empty(), "[weight] {} has no segments", name);
    cols = segments[0].cols;
    for (const WeightSegment& s : segments) {
        CHECK(s.cols == cols, "[weight] {}: {} has {} columns, {} has {}", name, s.name, s.cols,
              segments[0].name, cols);
        rows += s.rows;
    }
}

int64_t Weight::bytes() const {
    int64_t total = 0;
    for (const WeightSegment& s : segments) total += s.bytes();
    return total;
}

int64_t ExpertWeights::bytes() const {
    int64_t total = 0;
    for (const Weight& w : expert) total += w.bytes();
    return total;
}

void dequantize_row(const WeightSegment& s, int64_t row, float* out) {
    CHECK(row >= 0 && row < s.rows, "[weight] {} has {} rows, not row {}", s.name, s.rows, row);
    load_values(s, row, out);
    switch (s.scale_kind) {
        case ScaleKind::none:
            return;
        case ScaleKind::per_tensor:
            return scale_runs(out, s.cols, s.cols, [&](int64_t) { return s.global_scale; });
        case ScaleKind::per_row:
            return scale_runs(out, s.cols, s.cols,
                              [&](int64_t) { return load_unaligned<float>(s.scale, row); });
        case ScaleKind::block128:
            return scale_runs(out, s.cols, 128, [&](int64_t block) {
                return load_unaligned<float>(s.scale, row / 128 * ceil_div(s.cols, 128) + block);
            });
        case ScaleKind::nvfp4:
            return scale_runs(out, s.cols, nvfp4::kBlock, [&](int64_t block) {
                const int64_t i = row * (s.cols / nvfp4::kBlock) + block;
                return nvfp4::e4m3_to_float(load_unaligned<uint8_t>(s.scale, i)) * s.global_scale;
            });
    }
}

void dequantize_row(const Weight& w, int64_t row, float* out) {
    CHECK(row >= 0 && row < w.rows, "[weight] {} has {} rows, not row {}", w.name, w.rows, row);
    const WeightSegment* s = w.segments.data();
    while (row >= s->rows) row -= (s++)->rows;
    dequantize_row(*s, row, out);
}

}  // namespace quern
