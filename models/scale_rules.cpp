#include "models/scale_rules.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/tensor.h"

namespace quern {
namespace {

// A trained matrix has its largest weight somewhere near 0.01 .. 10. An inverted scale misses this by 10^3 or
// more.
constexpr float kSmallestAmax = 1e-3f;
constexpr float kLargestAmax = 1e3f;
constexpr float kNvfp4Range = nvfp4::kMaxCode * nvfp4::kMaxScale;  // 2688

bool plausible(float amax) { return amax > kSmallestAmax && amax < kLargestAmax; }

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

std::string expected_found(const std::string& expected, const SafeTensor& t, const char* cause) {
    return fmt::format("expected {}, found {}{}{}", expected, describe(t), *cause ? "; " : "", cause);
}

std::string text2(int64_t a, int64_t b) {
    const int64_t shape[] = {a, b};
    return shape_text(shape);
}

/// True when the FP8 values that share scale number `i` of the segment are all +0 or -0.
bool fp8_values_are_zero(const WeightSegment& s, int64_t i) {
    int64_t row = 0, rows = s.rows, col = 0, cols = s.cols;
    if (s.scale_kind == ScaleKind::per_row) {
        row = i;
        rows = 1;
    } else if (s.scale_kind == ScaleKind::block128) {
        const int64_t across = (s.cols + 127) / 128;
        row = i / across * 128;
        col = i % across * 128;
        rows = std::min<int64_t>(128, s.rows - row);
        cols = std::min<int64_t>(128, s.cols - col);
    }
    const auto* data = static_cast<const uint8_t*>(s.data);
    for (int64_t r = row; r < row + rows; ++r) {
        for (int64_t c = col; c < col + cols; ++c) {
            if ((data[r * s.cols + c] & 0x7f) != 0) return false;
        }
    }
    return true;
}

}  // namespace

bool plain_dtype(SafeDType from, DType& to) {
    switch (from) {
        case SafeDType::BF16:
            to = DType::BF16;
            return true;
        case SafeDType::F16:
            to = DType::F16;
            return true;
        case SafeDType::F32:
            to = DType::F32;
            return true;
        default:
            return false;
    }
}

void to_floats(const SafeTensor& t, float* out) {
    const auto count = static_cast<size_t>(t.elements());
    if (t.dtype == SafeDType::F32) {
        if (count > 0) memcpy(out, t.data, count * sizeof(float));
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        uint16_t bits;
        memcpy(&bits, t.data + 2 * i, sizeof bits);
        out[i] = t.dtype == SafeDType::BF16 ? bf16_to_float(bits) : f16_to_float(bits);
    }
}

std::string explain_codes(const SafeTensor& t, int64_t rows, int64_t cols) {
    const char* cause = "";
    if (cols % nvfp4::kBlock != 0)
        cause = "NVFP4 needs a multiple of 16 columns";
    else if (t.dtype == SafeDType::I8)
        cause = "the codes were saved as signed bytes: re-export them as U8";
    else if (t.dtype == SafeDType::I32)
        cause = "an INT4 pack-quantized or GPTQ checkpoint, which quern does not read";
    else if (t.dtype != SafeDType::U8)
        cause = "these are not packed FP4 codes";
    else if (t.has_shape({cols / 2, rows}))
        cause = "it is transposed";
    else if (t.has_shape({rows, cols}))
        cause = "one code a byte: it was not packed";
    else if (t.rank == 3)
        cause = "several matrices stacked in one tensor?";
    else
        cause = "does config.json belong to these weights?";
    return expected_found(text2(rows, cols / 2) + " U8 (two codes a byte)", t, cause);
}

std::string explain_block_scale(const SafeTensor& t, int64_t rows, int64_t cols) {
    const int64_t blocks = cols / nvfp4::kBlock;
    const char* cause = "is this another block size?";
    if (t.dtype == SafeDType::F8_E8M0 || t.elements() == rows * (cols / 32))
        cause = "one scale for 32 values: this is MXFP4, which quern does not read";
    else if (t.dtype == SafeDType::U8)
        cause = "the scales lost their dtype in the export";
    else if (t.dtype != SafeDType::F8_E4M3)
        cause = "the scales were decoded: re-export them as F8_E4M3";
    else if (t.has_shape({blocks, rows}))
        cause = "it is transposed";
    else if (t.has_shape({round_up(rows, 128), round_up(blocks, 4)})) {
        cause = "it is padded, and perhaps swizzled, for tensor cores: export the linear layout";
    } else if (t.elements() == round_up(rows, 128) * round_up(blocks, 4)) {
        cause = "it is swizzled for tensor cores: export the linear layout";
    }
    return expected_found(text2(rows, blocks) + " F8_E4M3 (one scale for 16 values)", t, cause);
}

std::optional<Fp8Scales> fp8_scales(const SafeTensor& t, int64_t count, int64_t rows, int64_t cols) {
    const int64_t down = (rows + 127) / 128, across = (cols + 127) / 128;
    if (t.elements() == 1 && t.rank <= 2) return Fp8Scales{ScaleKind::per_tensor, 0};
    if (count > 1 && (t.has_shape({count}) || t.has_shape({count, 1}) || t.has_shape({count, 1, 1})))
        return Fp8Scales{ScaleKind::per_tensor, 1};
    if (t.has_shape({count * rows}) || t.has_shape({count * rows, 1}) ||
        (count > 1 && (t.has_shape({count, rows}) || t.has_shape({count, rows, 1}))))
        return Fp8Scales{ScaleKind::per_row, rows};
    if (t.has_shape({count * down, across}) || (count == 1 && t.has_shape({down, 1, across, 1})) ||
        (count > 1 && t.has_shape({count, down, across})))
        return Fp8Scales{ScaleKind::block128, down * across};
    return std::nullopt;
}

std::string explain_fp8_scale(const SafeTensor& t, int64_t rows, int64_t cols) {
    const int64_t down = (rows + 127) / 128, across = (cols + 127) / 128;
    const char* cause = "is this another block size?";
    DType dtype;
    if (t.dtype == SafeDType::F8_E8M0 || (t.dtype == SafeDType::U8 && t.has_shape({rows, cols / 32})))
        cause = "one scale of eight bits for 32 values: this is MXFP8, which quern does not read";
    else if (!plain_dtype(t.dtype, dtype))
        cause = "scales are floats: F32, BF16 or F16";
    else if (t.has_shape({across, down}))
        cause = "it is transposed";
    else if (t.has_shape({cols}) || t.has_shape({1, cols}))
        cause = "one scale a column is no format quern reads";
    else if (t.elements() == down * across)
        cause = "it was reshaped";
    else if (t.elements() == 3 || t.elements() == 2)
        cause = "one scale for each fused projection? split them";
    return expected_found(fmt::format("one scale, {} or {}", text2(rows, 1), text2(down, across)), t, cause);
}

std::string explain_shape(const SafeTensor& t, std::span<const int64_t> expected) {
    const auto d = t.dims();
    const char* cause = "does config.json belong to these weights?";
    if (d.size() == expected.size() && std::equal(d.begin(), d.end(), expected.rbegin())) {
        cause = "it is transposed";
    } else if (d.size() == expected.size() && std::is_permutation(d.begin(), d.end(), expected.begin())) {
        cause = "its dimensions are in another order: a converted (MLX?) checkpoint";
    } else if (d.size() == expected.size() + 1) {
        cause = "several matrices stacked in one tensor?";
    } else if (d.size() == 2 && expected.size() == 2 && d[1] == expected[1] && d[0] > expected[0]) {
        cause = "more rows than config.json says: padded, or several projections fused?";
    }
    return expected_found(shape_text(expected), t, cause);
}

std::string read_global_scale(float stored, std::span<const std::byte> codes, GlobalForm form, float& scale) {
    if (!std::isnormal(stored) || stored < 0) {
        return fmt::format("expected a positive number, found {}; the file is damaged or the export failed",
                           stored);
    }
    scale = form == GlobalForm::divisor ? 1.0f / stored : stored;
    const float amax = kNvfp4Range * scale;
    if (plausible(amax)) return "";
    if (stored == 1.0f && codes_are_zero(codes)) return "";
    const bool other_way = plausible(kNvfp4Range / scale);
    return fmt::format("{} as a {} means weights up to {:.3g}, expected between {} and {}; {}", stored,
                       form == GlobalForm::divisor ? "divisor (compressed-tensors)" : "multiplier (ModelOpt)",
                       amax, kSmallestAmax, kLargestAmax,
                       other_way       ? "it looks inverted: the exporter mixed up the two conventions"
                       : stored == 1.f ? "it looks never calibrated, yet the codes are not all zero"
                                       : "the file is damaged or the export failed");
}

std::string check_fp8_scales(const WeightSegment& segment, std::span<const float> scales) {
    float largest = 0;
    for (size_t i = 0; i < scales.size(); ++i) {
        const float s = scales[i];
        const bool zero_is_fine = s == 0 && fp8_values_are_zero(segment, static_cast<int64_t>(i));
        if ((!std::isnormal(s) || s < 0) && !zero_is_fine) {
            return fmt::format(
                "expected positive numbers, found {} at element {}; the file is damaged or the export "
                "failed",
                s, i);
        }
        largest = std::max(largest, s);
    }
    const float amax = nvfp4::kMaxScale * largest;
    if (plausible(amax) || largest == 0) return "";
    const bool other_way = plausible(nvfp4::kMaxScale / largest);
    return fmt::format(
        "the largest scale {} means weights up to {:.3g}, expected between {} and {}; {}", largest, amax,
        kSmallestAmax, kLargestAmax,
        other_way ? "it looks inverted: expected multipliers" : "the file is damaged or the export failed");
}

bool codes_are_zero(std::span<const std::byte> codes) {
    return std::all_of(codes.begin(), codes.end(),
                       [](std::byte pair) { return (pair & std::byte{0x77}) == std::byte{0}; });
}

}  // namespace quern
