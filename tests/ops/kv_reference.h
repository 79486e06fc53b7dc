// Rows of packed KV caches, packed and unpacked in double precision by other means than kv_format.cpp's: layouts are written
// out, codes are found by trying all, scales by trying exponents.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "ggml-like/tensor.h"

namespace quern::test::kv_reference {

inline double e4m3(int code) {
    const int e = code >> 3 & 15, m = code & 7;
    const double magnitude = e == 0 ? std::ldexp(m, -9) : std::ldexp(8 + m, e - 10);
    return code & 128 ? -magnitude : magnitude;
}
inline double four_bits(const double (&magnitudes)[8], int code) {
    return code & 8 ? -magnitudes[code & 7] : magnitudes[code & 7];
}
inline constexpr double kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
inline constexpr double kUniform[8] = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5};
/// Lloyd and Max's 16 levels for a normal distribution, in BF16.
inline constexpr double kLloyd[8] = {0.12890625, 0.388671875, 0.65625, 0.94140625,
                                     1.2578125,  1.6171875,   2.0625,  2.734375};

inline double bf16(double x) { return bf16_to_float(float_to_bf16(static_cast<float>(x))); }
inline double read_bf16(const uint8_t* at) {
    return bf16_to_float(static_cast<uint16_t>(at[0] | at[1] << 8));
}
inline void write_bf16(uint8_t* at, double x) {
    const uint16_t bits = float_to_bf16(static_cast<float>(x));
    at[0] = static_cast<uint8_t>(bits), at[1] = static_cast<uint8_t>(bits >> 8);
}

enum class Kind { fp8, nvfp4, keys4, values4 };
inline Kind kind_of(DType dtype, bool values) {
    if (dtype == DType::F8_E4M3) return Kind::fp8;
    if (dtype == DType::NVFP4) return Kind::nvfp4;
    return values ? Kind::values4 : Kind::keys4;
}
inline size_t row_bytes(Kind kind, size_t d) {
    switch (kind) {
        case Kind::fp8:
            return d + 2;
        case Kind::nvfp4:
            return d / 2 + d / 16 + 2;
        case Kind::keys4:
            return d / 2 + 2;
        case Kind::values4:
            break;
    }
    return d / 2 + 4;
}

inline std::vector<double> unpack(Kind kind, const uint8_t* block, size_t place, size_t d) {
    std::vector<double> x;
    const uint8_t* nibbles = block + place * (d / 2);
    const auto nibble = [&](size_t i) { return nibbles[i / 2] >> (i % 2 * 4) & 15; };
    for (size_t i = 0; i < d; ++i) switch (kind) {
            case Kind::fp8:
                x.push_back(e4m3(block[place * d + i]) * read_bf16(block + 64 * d + 2 * place));
                break;
            case Kind::nvfp4:
                x.push_back(four_bits(kE2m1, nibble(i)) *
                            e4m3(block[64 * d / 2 + place * (d / 16) + i / 16]) *
                            read_bf16(block + 64 * (d / 2 + d / 16) + 2 * place));
                break;
            case Kind::keys4:
                x.push_back(four_bits(kLloyd, nibble(i)) * read_bf16(block + 64 * d / 2 + 2 * place));
                break;
            case Kind::values4:
                x.push_back(four_bits(kUniform, nibble(i)) * read_bf16(block + 64 * d / 2 + 4 * place) +
                            read_bf16(block + 64 * d / 2 + 4 * place + 2));
        }
    return x;
}

/// The code in 0 .. count-1 whose value is nearest; of two the even one.
template <typename F>
int nearest(double x, int count, const F& value) {
    int best = 0;
    for (int code = 1; code < count; ++code) {
        const double d = std::fabs(x - value(code)), least = std::fabs(x - value(best));
        if (d < least || (d == least && code % 2 == 0 && best % 2 == 1)) best = code;
    }
    return best;
}

inline double power_of_two_scale(double amax, double largest) {
    if (amax == 0) return 1;
    int k = -100;
    while (k < 7 && amax > largest * std::ldexp(1, k)) ++k;
    return std::ldexp(1, k);
}

/// Row `place` of a block; `given`: a checkpoint's scale, or 0. Keys of 4 bits have been multiplied by the Hadamard matrix.
inline void pack(Kind kind, const std::vector<double>& x, double given, uint8_t* block, size_t place) {
    const size_t d = x.size();
    double amax = 0, least = x[0], most = x[0], squares = 0;
    for (const double v : x) {
        amax = std::fmax(amax, std::fabs(v)), least = std::fmin(least, v), most = std::fmax(most, v);
        squares += v * v;
    }
    uint8_t* nibbles = block + place * (d / 2);
    const auto put = [&](size_t i, int code) {
        const int shift = static_cast<int>(i % 2 * 4);
        nibbles[i / 2] = static_cast<uint8_t>((nibbles[i / 2] & (0xf0 >> shift)) | code << shift);
    };
    const auto finite = [](int code) { return (code & 127) == 127 ? INFINITY : e4m3(code); };
    switch (kind) {
        case Kind::fp8: {
            const double s = given > 0 ? bf16(given) : power_of_two_scale(amax, 448);
            for (size_t i = 0; i < d; ++i)
                block[place * d + i] = static_cast<uint8_t>(nearest(x[i] / s, 256, finite));
            return write_bf16(block + 64 * d + 2 * place, s);
        }
        case Kind::nvfp4: {
            const double s = given > 0 ? bf16(given) : power_of_two_scale(amax, 2688);
            for (size_t b = 0; b < d / 16; ++b) {
                double largest = 0;
                for (size_t i = 16 * b; i < 16 * b + 16; ++i) largest = std::fmax(largest, std::fabs(x[i]));
                const int scale = nearest(largest / 6 / s, 127, finite);
                block[64 * d / 2 + place * (d / 16) + b] = static_cast<uint8_t>(scale);
                for (size_t i = 16 * b; i < 16 * b + 16; ++i)
                    put(i, scale == 0 ? 0 : nearest(x[i] / (e4m3(scale) * s), 16, [](int code) {
                            return four_bits(kE2m1, code);
                        }));
            }
            return write_bf16(block + 64 * (d / 2 + d / 16) + 2 * place, s);
        }
        case Kind::keys4: {
            const double rms = std::sqrt(squares / static_cast<double>(d));
            double sum = 0;
            for (size_t i = 0; i < d; ++i) {
                const double u = rms > 0 ? x[i] / rms : 0;
                int code = nearest(std::fabs(u), 8, [](int c) { return kLloyd[c]; });
                sum += kLloyd[code] * kLloyd[code];
                put(i, code | (u < 0 ? 8 : 0));
            }
            return write_bf16(block + 64 * d / 2 + 2 * place, std::sqrt(squares / sum));
        }
        case Kind::values4: {
            const double s = bf16((most - least) / 15), m = bf16((most + least) / 2);
            for (size_t i = 0; i < d; ++i)
                put(i, s > 0 ? nearest((x[i] - m) / s, 16, [](int c) { return four_bits(kUniform, c); }) : 0);
            write_bf16(block + 64 * d / 2 + 4 * place, s);
            write_bf16(block + 64 * d / 2 + 4 * place + 2, m);
        }
    }
}

/// H x by its definition: the sign of (i, j) is that of the number of common bits.
inline std::vector<double> hadamard(const std::vector<double>& x) {
    std::vector<double> y;
    for (size_t i = 0; i < x.size(); ++i) {
        double sum = 0;
        for (size_t j = 0; j < x.size(); ++j) sum += __builtin_parityll(i & j) ? -x[j] : x[j];
        y.push_back(sum / std::sqrt(static_cast<double>(x.size())));
    }
    return y;
}

}  // namespace quern::test::kv_reference
