#include "tools/inspect/segment_stats.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "ggml-like/nvfp4.h"

namespace quern {
namespace {

constexpr uint64_t kOnes = 0x1111111111111111ull;
constexpr uint64_t kMagnitudes = 0x7777777777777777ull;
constexpr int kSubnormal = 8;  // E4M3 codes below are subnormal
constexpr float kOutlier = 16;
// Use of the magnitudes 0 .5 1 1.5 2 3 4 6 by normal values whose largest of 16 is scaled to 6: of 40,000
// random blocks.
constexpr double kNormalUse[8] = {0.0684, 0.1331, 0.1271, 0.1168, 0.1518, 0.1527, 0.1388, 0.1112};

uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return hash ^ (hash >> 29);
}

void read_codes(const WeightSegment& s, SegmentStats& out) {
    const auto* codes = static_cast<const uint8_t*>(s.data);
    const auto* scales = static_cast<const uint8_t*>(s.scale);
    // Four tables: the same byte twice in a row must not wait for itself.
    auto counts = std::make_unique<std::array<std::array<uint32_t, 256>, 4>>();
    for (int64_t b = 0; b < out.blocks; ++b) {
        uint64_t word;
        std::memcpy(&word, codes + 8 * b, sizeof word);
        out.hash = mix(out.hash, word);
        const bool has_large = (word & (word >> 1) & (kOnes << 1)) != 0;  // both high magnitude bits: 4 or 6
        out.unfilled += !has_large && scales[b] >= kSubnormal && (word & kMagnitudes) != 0;
        out.erased += scales[b] == 0 && (word & kMagnitudes) != 0;
        for (size_t i = 0; i < 8; ++i) ++(*counts)[i % 4][(word >> (8 * i)) & 0xff];
    }
    for (const auto& table : *counts)
        for (size_t byte = 0; byte < 256; ++byte) {
            out.codes[byte & 15] += table[byte];
            out.codes[byte >> 4] += table[byte];
        }
    out.zeros = out.codes[0] + out.codes[8];
}

void read_scales(const WeightSegment& s, SegmentStats& out) {
    const auto* scales = static_cast<const uint8_t*>(s.scale);
    std::array<int64_t, 256> count{};
    for (int64_t b = 0; b < out.blocks; ++b) ++count[scales[b]];
    for (int64_t b = 0; b + 8 <= out.blocks; b += 8) {
        uint64_t word;
        std::memcpy(&word, scales + b, sizeof word);
        out.hash = mix(out.hash, word);
    }
    out.zero_scales = count[0];
    out.saturated = count[0x7e];
    for (size_t v = 1; v < kSubnormal; ++v) out.subnormal += count[v];
    for (size_t v = nvfp4::kScaleNan; v < 256; ++v) out.bad_scales += count[v];
    int64_t positive = 0, seen = 0;
    for (size_t v = 1; v < nvfp4::kScaleNan; ++v) positive += count[v];
    for (size_t v = 1; v < nvfp4::kScaleNan; ++v) {
        if (count[v] == 0) continue;
        const float scale = nvfp4::e4m3_to_float(static_cast<uint8_t>(v));
        if (2 * seen <= positive) out.median_scale = scale;
        seen += count[v];
        out.largest_scale = scale;
        if (scale > kOutlier * out.median_scale) out.outliers += count[v];
    }
}

void read_nvfp4(const WeightSegment& s, SegmentStats& out) {
    out.blocks = s.rows * (s.cols / nvfp4::kBlock);
    read_codes(s, out);
    read_scales(s, out);
}

void read_fp8(const WeightSegment& s, SegmentStats& out) {
    const auto* values = static_cast<const uint8_t*>(s.data);
    uint8_t largest = 0;
    for (int64_t i = 0; i < out.values; ++i) {
        const uint8_t magnitude = values[i] & 0x7f;
        out.zeros += magnitude == 0;
        out.bad_values += magnitude == nvfp4::kScaleNan;
        largest = std::max<uint8_t>(largest, magnitude == nvfp4::kScaleNan ? 0 : magnitude);
        out.hash = out.hash * 0x9e3779b97f4a7c15ull + values[i];
    }
    out.largest_value = nvfp4::e4m3_to_float(largest);
}

/// `infinity`: bits of Inf without a sign; those above are NaN.
template <typename T, typename F>
void read_plain(const WeightSegment& s, T infinity, F&& to_float, SegmentStats& out) {
    const auto* bytes = static_cast<const std::byte*>(s.data);
    const T sign = static_cast<T>(T{1} << (8 * sizeof(T) - 1));
    T largest = 0;
    for (int64_t i = 0; i < out.values; ++i) {
        T bits;
        std::memcpy(&bits, bytes + i * static_cast<int64_t>(sizeof bits), sizeof bits);
        bits = static_cast<T>(bits & ~sign);
        out.zeros += bits == 0;
        out.bad_values += bits >= infinity;
        largest = std::max<T>(largest, bits >= infinity ? T{0} : bits);
    }
    out.largest_value = to_float(largest);
}

}  // namespace

double SegmentStats::code_distance() const {
    double distance = 0;
    const auto n = static_cast<double>(std::max<int64_t>(values, 1));
    for (size_t m = 0; m < 8; ++m)
        distance += std::abs(static_cast<double>(codes[m] + codes[m + 8]) / n - kNormalUse[m]);
    return distance / 2;
}

double SegmentStats::sign_bias() const {
    int64_t positive = 0, negative = 0;
    for (size_t m = 1; m < 8; ++m) {
        positive += codes[m];
        negative += codes[m + 8];
    }
    const auto all = static_cast<double>(std::max<int64_t>(positive + negative, 1));
    return std::abs(static_cast<double>(positive - negative)) / all;
}

SegmentStats measure_segment(const WeightSegment& s) {
    SegmentStats out;
    out.values = s.rows * s.cols;
    switch (s.dtype) {
        case DType::NVFP4:
            read_nvfp4(s, out);
            break;
        case DType::F8_E4M3:
            read_fp8(s, out);
            break;
        case DType::BF16:
            read_plain<uint16_t>(
                s, 0x7f80, [](uint16_t b) { return bf16_to_float(b); }, out);
            break;
        case DType::F16:
            read_plain<uint16_t>(
                s, 0x7c00, [](uint16_t b) { return f16_to_float(b); }, out);
            break;
        default:
            read_plain<uint32_t>(
                s, 0x7f800000u, [](uint32_t b) { return nvfp4::from_bits(b); }, out);
    }
    return out;
}

}  // namespace quern
