// Random weights in every stored form for the op tests; their values are decoded here, not by the library.
#pragma once

#include <cmath>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "ggml-like/weight.h"

namespace quern::test {

enum class Form { f32, bf16, f16, f8_tensor, f8_row, f8_block, nvfp4 };
inline constexpr Form kForms[] = {Form::f32,    Form::bf16,     Form::f16,  Form::f8_tensor,
                                  Form::f8_row, Form::f8_block, Form::nvfp4};

inline const char* form_name(Form form) {
    constexpr const char* kNames[] = {"f32", "bf16", "f16", "f8_tensor", "f8_row", "f8_block", "nvfp4"};
    return kNames[static_cast<int>(form)];
}

/// Owns the bytes of weights, all at odd addresses, as a mapped file may have them. With odd seeds NVFP4's scales of 16 are of all of
/// E4M3 (448 the largest, as in files), with even ones up to 2.
class WeightStore {
  public:
    explicit WeightStore(unsigned seed) : random_(seed), all_scales_(seed % 2 == 1) {}

    /// A segment [rows, cols] with random contents; appends its rows * cols decoded weights to `values`.
    WeightSegment segment(const std::string& name, Form form, int64_t rows, int64_t cols,
                          std::vector<double>& values) {
        WeightSegment s;
        s.name = name;
        s.rows = rows;
        s.cols = cols;
        const auto count = static_cast<size_t>(rows * cols);
        std::vector<uint8_t> data, scale;
        std::vector<double> own(count);
        for (double& v : own) v = stored(form, data);
        if (form == Form::nvfp4) make_codes(own, data);
        s.dtype = form == Form::f32     ? DType::F32
                  : form == Form::bf16  ? DType::BF16
                  : form == Form::f16   ? DType::F16
                  : form == Form::nvfp4 ? DType::NVFP4
                                        : DType::F8_E4M3;
        if (form == Form::f8_tensor || form == Form::nvfp4) s.global_scale = positive();
        if (form == Form::nvfp4 && all_scales_)
            s.global_scale /= 224;  // so that values are as large as with the others
        for (double& v : own) v *= s.global_scale;
        const int64_t high = form == Form::f8_block ? 128 : 1;
        const int64_t wide = form == Form::f8_block ? 128 : form == Form::nvfp4 ? 16 : cols;
        if (form == Form::f8_row || form == Form::f8_block || form == Form::nvfp4) {
            for (int64_t r = 0; r < rows; r += high) {
                for (int64_t c = 0; c < cols; c += wide) {
                    const double factor = put_scale(form, scale);
                    for (int64_t i = r; i < std::min(rows, r + high); ++i)
                        for (int64_t j = c; j < std::min(cols, c + wide); ++j)
                            own[static_cast<size_t>(i * cols + j)] *= factor;
                }
            }
        }
        s.scale_kind = form == Form::f8_tensor  ? ScaleKind::per_tensor
                       : form == Form::f8_row   ? ScaleKind::per_row
                       : form == Form::f8_block ? ScaleKind::block128
                       : form == Form::nvfp4    ? ScaleKind::nvfp4
                                                : ScaleKind::none;
        s.data = keep(data);
        s.scale = keep(scale);
        values.insert(values.end(), own.begin(), own.end());
        return s;
    }

    float normal() { return normal_(random_); }
    uint32_t below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }

  private:
    float positive() { return 0.5f + static_cast<float>(below(1000)) / 1000.0f; }

    const void* keep(const std::vector<uint8_t>& bytes) {
        kept_.emplace_back(bytes.size() + 1);
        if (!bytes.empty()) std::memcpy(kept_.back().data() + 1, bytes.data(), bytes.size());
        return kept_.back().data() + 1;
    }

    static double e4m3(uint32_t v) {
        const int exponent = static_cast<int>(v >> 3) & 15, mantissa = static_cast<int>(v) & 7;
        const double m = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
        return v & 0x80 ? -m : m;
    }

    /// Appends one value; for NVFP4 only its code, 0..15.
    double stored(Form form, std::vector<uint8_t>& data) {
        if (form == Form::nvfp4) return below(16);
        if (form == Form::f32 || form == Form::bf16) {
            float v = normal();
            uint32_t bits;
            std::memcpy(&bits, &v, 4);
            if (form == Form::bf16) bits &= 0xffff0000u;
            for (int i = form == Form::bf16 ? 2 : 0; i < 4; ++i)
                data.push_back(static_cast<uint8_t>(bits >> (8 * i)));
            std::memcpy(&v, &bits, 4);
            return v;
        }
        if (form == Form::f16) {  // sign, exponents 12..16, any mantissa
            const uint32_t mantissa = below(1024), exponent = 12 + below(5), sign = below(2);
            const uint32_t bits = sign << 15 | exponent << 10 | mantissa;
            data.push_back(static_cast<uint8_t>(bits));
            data.push_back(static_cast<uint8_t>(bits >> 8));
            return (sign ? -1 : 1) * std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25);
        }
        const uint32_t bits = below(2) << 7 | below(0x48);
        data.push_back(static_cast<uint8_t>(bits));
        return e4m3(bits);
    }

    static void make_codes(std::vector<double>& numbers, std::vector<uint8_t>& data) {
        constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        for (size_t i = 0; i < numbers.size(); ++i) {
            const auto code = static_cast<uint32_t>(numbers[i]);
            if (i % 2 == 0) data.push_back(0);
            data.back() = static_cast<uint8_t>(data.back() | code << (i % 2 * 4));
            numbers[i] = (code & 8 ? -1 : 1) * kValues[code & 7];
        }
    }

    double put_scale(Form form, std::vector<uint8_t>& scale) {
        if (form == Form::nvfp4) {
            const uint32_t bits = below(all_scales_ ? 0x7f : 0x41);  // zero, subnormal, and normal
            scale.push_back(static_cast<uint8_t>(bits));
            return e4m3(bits);
        }
        const float v = positive();
        uint8_t bytes[4];
        std::memcpy(bytes, &v, 4);
        scale.insert(scale.end(), bytes, bytes + 4);
        return v;
    }

    std::mt19937 random_;
    bool all_scales_;
    std::normal_distribution<float> normal_;
    std::deque<std::vector<uint8_t>> kept_;
};

/// A sum of products in double, and the sum of their magnitudes for error bounds.
struct Sum {
    double value = 0, magnitude = 0;
    void add(double a, double b) {
        value += a * b;
        magnitude += std::fabs(a * b);
    }
};

/// The largest error of a sum of k products in FP32, in any order that a kernel with 8 lanes or more may use, and of a
/// few scales after it.
inline double sum_bound(const Sum& sum, int64_t k) {
    return sum.magnitude * std::ldexp(static_cast<double>(k) / 8 + 16, -24) + 1e-30;
}

}  // namespace quern::test
