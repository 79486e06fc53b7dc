#include "ggml-like/cpu/weight_rows.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"

namespace quern::cpu {
namespace {

constexpr int64_t kScaleRows = 128;    // rows that share scales in ScaleKind::block128
constexpr int64_t kTokensAtOnce = 64;  // output pointers kept on the stack

int64_t segment_row_bytes(const WeightSegment& s) { return dtype_bytes(s.dtype, s.cols); }

const uint8_t* scale_bytes(const WeightSegment& s) { return static_cast<const uint8_t*>(s.scale); }

RowBlock row_block(const WeightSegment& s, int64_t begin, int64_t end) {
    RowBlock block;
    block.row_bytes = segment_row_bytes(s);
    block.data = static_cast<const uint8_t*>(s.data) + begin * block.row_bytes;
    block.rows = end - begin;
    if (s.scale_kind == ScaleKind::nvfp4) {
        block.scale_row_bytes = s.cols / nvfp4::kBlock;
        block.scale = scale_bytes(s) + begin * block.scale_row_bytes;
    } else if (s.scale_kind == ScaleKind::block128) {  // the same for all these rows
        block.scale = scale_bytes(s) + begin / kScaleRows * ((s.cols + 127) / 128) * 4;
    }
    return block;
}

RowKernel kernel(const DotKernels& dot, const WeightSegment& s) {
    switch (s.dtype) {
        case DType::F32:
            return dot.f32;
        case DType::BF16:
            return dot.bf16;
        case DType::F16:
            return dot.f16;
        case DType::F8_E4M3:
            return s.scale_kind == ScaleKind::block128 ? dot.f8_e4m3_block : dot.f8_e4m3;
        case DType::NVFP4:
            return dot.nvfp4;
        default:
            FAIL(runtime, "[weight] {}: {} is not a weight type", s.name, dtype_name(s.dtype));
    }
}

/// Scales that stay outside the sum: per tensor, per row.
void apply_outer_scale(const WeightSegment& s, int64_t begin, int64_t rows, float* y) {
    if (s.scale_kind == ScaleKind::nvfp4 || s.scale_kind == ScaleKind::per_tensor) {
        for (int64_t r = 0; r < rows; ++r) y[r] *= s.global_scale;
    } else if (s.scale_kind == ScaleKind::per_row) {
        for (int64_t r = 0; r < rows; ++r) {
            float scale;
            std::memcpy(&scale, scale_bytes(s) + (begin + r) * 4, sizeof scale);
            y[r] *= scale;
        }
    }
}

/// Rows [begin, end) of one segment; y[t] + offset is where row `begin` goes.
void segment_rows(const DotKernels& dot, const WeightSegment& s, int64_t begin, int64_t end,
                  const ActivationRows& x, float* const* y, int64_t offset) {
    const RowKernel run = kernel(dot, s);
    const auto& rows = s.dtype == DType::NVFP4 ? x.packed : x.natural;
    const RowBlock block = row_block(s, begin, end);
    for (int64_t t = 0; t < x.count(); t += kTokensAtOnce) {
        const int64_t tokens = std::min(kTokensAtOnce, x.count() - t);
        std::array<float*, kTokensAtOnce> to;
        for (int64_t i = 0; i < tokens; ++i) to[static_cast<size_t>(i)] = y[t + i] + offset;
        run(block, s.cols, rows.data() + t, to.data(), tokens);
        for (int64_t i = 0; i < tokens; ++i)
            apply_outer_scale(s, begin, end - begin, to[static_cast<size_t>(i)]);
    }
}

/// To a cache line: vector loads that straddle two lines cost double.
float* aligned_buffer(Context& context, int which, int64_t floats) {
    constexpr uintptr_t kLine = 64;
    const auto address = reinterpret_cast<uintptr_t>(context.buffer(which, floats + 16));
    return reinterpret_cast<float*>((address + kLine - 1) / kLine * kLine);
}

bool fits(DType dtype, ScaleKind kind) {
    switch (dtype) {
        case DType::F32:
        case DType::BF16:
        case DType::F16:
            return kind == ScaleKind::none;
        case DType::F8_E4M3:
            return kind == ScaleKind::per_tensor || kind == ScaleKind::per_row || kind == ScaleKind::block128;
        case DType::NVFP4:
            return kind == ScaleKind::nvfp4;
        default:
            return false;
    }
}

}  // namespace

ActivationRows ActivationRows::choose(const std::vector<int64_t>& rows) const {
    ActivationRows chosen;
    for (const int64_t r : rows) {
        chosen.natural.push_back(natural[static_cast<size_t>(r)]);
        if (!packed.empty()) chosen.packed.push_back(packed[static_cast<size_t>(r)]);
    }
    return chosen;
}

ActivationRows activation_rows(const Tensor& x, int64_t count, int64_t width, int64_t stride, bool pack,
                               Context& context, int first_buffer) {
    const bool convert = x.dtype != DType::F32;
    float* converted = convert ? aligned_buffer(context, first_buffer, count * width) : nullptr;
    float* arranged = pack ? aligned_buffer(context, first_buffer + 1, count * width) : nullptr;
    ActivationRows rows;
    for (int64_t t = 0; t < count; ++t) {
        rows.natural.push_back(convert ? converted + t * width : x.as<float>() + t * stride);
        if (pack) rows.packed.push_back(arranged + t * width);
    }
    if (!convert && !pack) return rows;
    const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(width, 1));
    context.pool.parallel_for(count, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            if (convert) load_floats(x, t * stride, width, converted + t * width);
            if (pack)
                context.dot.pack_nvfp4(rows.natural[static_cast<size_t>(t)], width, arranged + t * width);
        }
    });
    return rows;
}

bool has_nvfp4(const Weight& w) {
    return std::any_of(w.segments.begin(), w.segments.end(),
                       [](const WeightSegment& s) { return s.dtype == DType::NVFP4; });
}

void weight_rows(const DotKernels& dot, const Weight& w, int64_t begin, int64_t end, const ActivationRows& x,
                 float* const* y) {
    int64_t first = 0;  // of the segment, in the stacked matrix
    for (const WeightSegment& s : w.segments) {
        const int64_t stop = std::min(end, first + s.rows) - first;
        int64_t row = std::max(begin, first) - first;
        while (row < stop) {
            int64_t next = stop;
            if (s.scale_kind == ScaleKind::block128)
                next = std::min(next, (row / kScaleRows + 1) * kScaleRows);
            segment_rows(dot, s, row, next, x, y, first + row - begin);
            row = next;
        }
        first += s.rows;
    }
}

int64_t rows_per_chunk(int64_t rows, int64_t bytes_per_row, int64_t products_per_row, int threads) {
    constexpr int64_t kBytes = 128 << 10;
    constexpr int64_t kProducts = 32 << 10;
    const int64_t fair = rows / (static_cast<int64_t>(threads) * 4) + 1;
    const int64_t cached = kBytes / std::max<int64_t>(bytes_per_row, 1);
    const int64_t worthwhile = kProducts / std::max<int64_t>(products_per_row, 1);
    const int64_t chunk = std::max(std::min(fair, cached), worthwhile);
    return std::max<int64_t>(4, (chunk + 3) / 4 * 4);  // whole tiles of the kernels
}

void check_weight(const char* op, std::string_view name, const Weight& w) {
    for (const WeightSegment& s : w.segments) {
        CHECK(fits(s.dtype, s.scale_kind),
              "[{}] {}: segment {} is {} with scale kind {}, which no kernel knows", op, name, s.name,
              dtype_name(s.dtype), static_cast<int>(s.scale_kind));
        CHECK(s.dtype != DType::NVFP4 || s.cols % nvfp4::kBlock == 0,
              "[{}] {}: NVFP4 segment {} has {} columns, expected a multiple of {}", op, name, s.name, s.cols,
              nvfp4::kBlock);
    }
}

void check_experts(const char* op, std::string_view name, const ExpertWeights& experts) {
    if (experts.placed != nullptr) return;
    for (const Weight& w : experts.expert) {
        CHECK(w.rows == experts.rows && w.cols == experts.cols,
              "[{}] {}: expert {} is [{}, {}], expected [{}, {}]", op, name, w.name, w.rows, w.cols,
              experts.rows, experts.cols);
        check_weight(op, name, w);
    }
}

}  // namespace quern::cpu
