#include "ggml-like/kv_format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "ggml-like/nvfp4.h"

namespace quern::kv {
namespace {

float rounded_bf16(float x) { return bf16_to_float(float_to_bf16(x)); }

float read_bf16(const std::byte* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return bf16_to_float(bits);
}
void write_bf16(std::byte* to, float x) {
    const uint16_t bits = float_to_bf16(x);
    std::memcpy(to, &bits, sizeof bits);
}

float largest_of(const float* x, int count) {
    float most = 0;
    for (int i = 0; i < count; ++i) most = std::max(most, std::fabs(x[i]));
    return most;
}

/// s of fp8 and nvfp4.
float row_scale(const float* x, int count, float given, float largest) {
    if (given > 0) return rounded_bf16(given);
    return std::ldexp(1.0f, scale_exponent(largest_of(x, count), largest));
}

/// The parts of one row of a block.
struct Row {
    std::byte *codes, *blocks, *scales;

    Row(Packing packing, std::byte* block, int place, int head_dim) {
        const Layout l = layout_of(packing, DType::BF16, head_dim);
        codes = block + place * l.codes;
        blocks = block + l.blocks_at() + place * l.blocks;
        scales = block + l.scales_at() + place * l.scales;
    }
};

void put_code(std::byte* codes, int i, unsigned code) {
    std::byte& both = codes[i / 2];
    both = i % 2 == 0 ? static_cast<std::byte>(code) : both | static_cast<std::byte>(code << 4);
}

void pack_fp8(const float* x, int d, float given, const Row& row) {
    const float s = row_scale(x, d, given, 448.0f);
    for (int i = 0; i < d; ++i) row.codes[i] = static_cast<std::byte>(nvfp4::float_to_e4m3(x[i] / s));
    write_bf16(row.scales, s);
}

void pack_nvfp4(const float* x, int d, float given, const Row& row) {
    const float s = row_scale(x, d, given, nvfp4::kMaxCode * nvfp4::kMaxScale);
    for (int b = 0; b < d; b += kBlock) {
        const uint8_t block = nvfp4::float_to_e4m3(largest_of(x + b, kBlock) / nvfp4::kMaxCode / s);
        const float step = nvfp4::e4m3_to_float(block) * s;
        row.blocks[b / kBlock] = static_cast<std::byte>(block);
        for (int i = b; i < b + kBlock; ++i)
            put_code(row.codes, i, block == 0 ? 0u : nvfp4::float_to_e2m1(x[i] / step));
    }
    write_bf16(row.scales, s);
}

/// The nearest centroid of x >= 0, the smaller of two.
unsigned nearest_centroid(float x) {
    unsigned code = 0;
    while (code < 7 && x > (kCentroids[code] + kCentroids[code + 1]) / 2) ++code;
    return code;
}

void pack_centroids(const float* x, int d, const Row& row) {
    const float amax = largest_of(x, d);
    float squares = 0, of_centroids = 0;  // of x / amax, whose squares are no infinities
    if (amax > 0)
        for (int i = 0; i < d; ++i) squares += (x[i] / amax) * (x[i] / amax);
    const float length = std::sqrt(squares);
    const float to_unit = amax > 0 ? std::sqrt(static_cast<float>(d)) / length : 0.0f;
    for (int i = 0; i < d; ++i) {
        const float u = amax > 0 ? x[i] / amax * to_unit : 0.0f;
        const unsigned code = nearest_centroid(std::fabs(u));
        of_centroids += kCentroids[code] * kCentroids[code];
        put_code(row.codes, i, code | (u < 0 ? 8u : 0u));
    }
    write_bf16(row.scales, amax * (length / std::sqrt(of_centroids)));
}

void pack_steps(const float* x, int d, const Row& row) {
    const auto [least, most] = std::minmax_element(x, x + d);
    const float s = rounded_bf16(*most / 15 - *least / 15), m = rounded_bf16(*most / 2 + *least / 2);
    for (int i = 0; i < d; ++i) {
        const float t = s > 0 ? (x[i] - m) / s : 0.0f;
        const auto step = static_cast<unsigned>(std::min(7.0f, std::fabs(t)));
        put_code(row.codes, i, step | (t < 0 ? 8u : 0u));
    }
    write_bf16(row.scales, s);
    write_bf16(row.scales + 2, m);
}

/// A row of NaN.
void pack_nothing(Packing packing, int d, const Row& row) {
    const Layout l = layout_of(packing, DType::BF16, d);
    std::fill_n(row.codes, l.codes, std::byte{});
    std::fill_n(row.blocks, l.blocks, std::byte{});
    for (int at = 0; at < l.scales; at += 2)
        write_bf16(row.scales + at, std::numeric_limits<float>::quiet_NaN());
}

std::array<float, 16> with_signs(const float (&magnitudes)[8]) {
    std::array<float, 16> table;
    for (size_t i = 0; i < 8; ++i) table[i] = magnitudes[i], table[i + 8] = -magnitudes[i];
    return table;
}

/// Codes of 4 bits, begin .. end-1.
void read_codes(const std::byte* codes, int begin, int end, const std::array<float, 16>& table, float s,
                float m, float* out) {
    for (int i = begin; i < end; i += 2) {
        const auto both = static_cast<unsigned>(codes[i / 2]);
        out[i] = table[both & 15u] * s + m;
        out[i + 1] = table[both >> 4] * s + m;
    }
}

void unpack_fp8(const Row& row, int d, float* out) {
    static const std::array<float, 256> table = [] {
        std::array<float, 256> t;
        for (size_t i = 0; i < t.size(); ++i) t[i] = nvfp4::e4m3_to_float(static_cast<uint8_t>(i));
        return t;
    }();
    const float s = read_bf16(row.scales);
    for (int i = 0; i < d; ++i) out[i] = table[static_cast<size_t>(row.codes[i])] * s;
}

void unpack_nvfp4(const Row& row, int d, float* out) {
    static const std::array<float, 16> table = with_signs(kFloats);
    const float s = read_bf16(row.scales);
    for (int b = 0; b < d; b += kBlock) {
        const float step = nvfp4::e4m3_to_float(static_cast<uint8_t>(row.blocks[b / kBlock])) * s;
        read_codes(row.codes, b, b + kBlock, table, step, 0, out);
    }
}

}  // namespace

bool fits(Packing packing, int head_dim) {
    switch (packing) {
        case Packing::nvfp4:
            return head_dim % kBlock == 0;
        case Packing::centroids:
            return head_dim > 1 && std::has_single_bit(static_cast<unsigned>(head_dim));
        case Packing::steps:
            return head_dim % 2 == 0;
        case Packing::plain:
        case Packing::fp8:
            break;
    }
    return true;
}

int scale_exponent(float amax, float largest) {
    if (amax == 0) return 0;
    int e = 0, of_largest = 0;
    const float m = std::frexp(amax, &e), m_largest = std::frexp(largest, &of_largest);
    return std::clamp(e - of_largest + (m > m_largest ? 1 : 0), kLeastExponent, kMostExponent);
}

void hadamard(float* x, int64_t count) {
    for (int64_t half = 1; half < count; half *= 2)
        for (int64_t i = 0; i < count; i += 2 * half)
            for (int64_t j = i; j < i + half; ++j) {
                const float a = x[j], b = x[j + half];
                x[j] = a + b, x[j + half] = a - b;
            }
    const float scale = 1.0f / std::sqrt(static_cast<float>(count));
    for (int64_t i = 0; i < count; ++i) x[i] *= scale;
}

void pack_row(Packing packing, const float* x, int head_dim, float scale, std::byte* block, int place) {
    const Row row(packing, block, place, head_dim);
    if (!std::all_of(x, x + head_dim, [](float v) { return std::isfinite(v); }))
        return pack_nothing(packing, head_dim, row);
    switch (packing) {
        case Packing::fp8:
            return pack_fp8(x, head_dim, scale, row);
        case Packing::nvfp4:
            return pack_nvfp4(x, head_dim, scale, row);
        case Packing::centroids:
            return pack_centroids(x, head_dim, row);
        case Packing::steps:
            return pack_steps(x, head_dim, row);
        case Packing::plain:
            break;
    }
}

void unpack_row(Packing packing, const std::byte* block, int place, int head_dim, float* out) {
    static const std::array<float, 16> centroids = with_signs(kCentroids), steps = with_signs(kSteps);
    const Row row(packing, const_cast<std::byte*>(block), place, head_dim);
    switch (packing) {
        case Packing::fp8:
            return unpack_fp8(row, head_dim, out);
        case Packing::nvfp4:
            return unpack_nvfp4(row, head_dim, out);
        case Packing::centroids:
            return read_codes(row.codes, 0, head_dim, centroids, read_bf16(row.scales), 0, out);
        case Packing::steps:
            return read_codes(row.codes, 0, head_dim, steps, read_bf16(row.scales), read_bf16(row.scales + 2),
                              out);
        case Packing::plain:
            break;
    }
}

}  // namespace quern::kv
