#include "ggml-like/weight.h"

#include <algorithm>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

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

float stored_value(const WeightSegment& s, int64_t row, int64_t col) {
    const int64_t i = row * s.cols + col;
    switch (s.dtype) {
        case DType::F32:
            return load_unaligned<float>(s.data, i);
        case DType::BF16:
            return bf16_to_float(load_unaligned<uint16_t>(s.data, i));
        case DType::F16:
            return f16_to_float(load_unaligned<uint16_t>(s.data, i));
        case DType::F8_E4M3:
            return nvfp4::e4m3_to_float(load_unaligned<uint8_t>(s.data, i));
        case DType::NVFP4: {
            const uint8_t pair = load_unaligned<uint8_t>(s.data, row * (s.cols / 2) + col / 2);
            return nvfp4::kCodeValue[col % 2 == 0 ? pair & 15 : pair >> 4];
        }
        default:
            FAIL(runtime, "[weight] {}: {} is not a weight type", s.name, dtype_name(s.dtype));
    }
}

float scale_of(const WeightSegment& s, int64_t row, int64_t col) {
    switch (s.scale_kind) {
        case ScaleKind::none:
            return 1.0f;
        case ScaleKind::per_tensor:
            return s.global_scale;
        case ScaleKind::per_row:
            return load_unaligned<float>(s.scale, row);
        case ScaleKind::block128:
            return load_unaligned<float>(s.scale, row / 128 * ceil_div(s.cols, 128) + col / 128);
        case ScaleKind::nvfp4: {
            const int64_t i = row * (s.cols / nvfp4::kBlock) + col / nvfp4::kBlock;
            return nvfp4::e4m3_to_float(load_unaligned<uint8_t>(s.scale, i)) * s.global_scale;
        }
    }
    return 1.0f;
}

}  // namespace

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

void dequantize_row(const Weight& w, int64_t row, float* out) {
    CHECK(row >= 0 && row < w.rows, "[weight] {} has {} rows, not row {}", w.name, w.rows, row);
    const WeightSegment* s = w.segments.data();
    while (row >= s->rows) row -= (s++)->rows;
    for (int64_t col = 0; col < s->cols; ++col)
        out[col] = stored_value(*s, row, col) * scale_of(*s, row, col);
}

}  // namespace quern
