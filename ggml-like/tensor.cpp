#include "ggml-like/tensor.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr uint32_t kSignBit = 0x80000000u;
constexpr uint32_t kFloatInfinity = 0x7f800000u;

int64_t checked_product(int64_t a, int64_t b, const char* what) {
    int64_t product = 0;
    CHECK(!__builtin_mul_overflow(a, b, &product), "[tensor] {}: the size does not fit 64 bits", what);
    return product;
}

/// Half precision magnitude below the smallest normal (2^-14), in steps of 2^-24. `magnitude` are float bits.
uint16_t subnormal_half(uint32_t magnitude) {
    if (magnitude < 0x33000000u) return 0;  // below 2^-25, half a step
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126u - (magnitude >> 23);  // 14 .. 24
    const uint32_t kept = mantissa >> shift;
    const uint32_t rest = mantissa & ((1u << shift) - 1u);
    const uint32_t half = 1u << (shift - 1u);
    const bool up = rest > half || (rest == half && (kept & 1u));
    return static_cast<uint16_t>(kept + (up ? 1u : 0u));
}

}  // namespace

const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::F32:
            return "F32";
        case DType::BF16:
            return "BF16";
        case DType::F16:
            return "F16";
        case DType::F8_E4M3:
            return "F8_E4M3";
        case DType::NVFP4:
            return "NVFP4";
        case DType::I32:
            return "I32";
        case DType::I64:
            return "I64";
        case DType::U8:
            return "U8";
    }
    return "unknown";
}

int64_t dtype_bytes(DType dtype, int64_t elements) {
    switch (dtype) {
        case DType::F32:
        case DType::I32:
            return checked_product(elements, 4, dtype_name(dtype));
        case DType::I64:
            return checked_product(elements, 8, dtype_name(dtype));
        case DType::BF16:
        case DType::F16:
            return checked_product(elements, 2, dtype_name(dtype));
        case DType::F8_E4M3:
        case DType::U8:
            return elements;
        case DType::NVFP4:
            return elements / 2 + elements % 2;
    }
    FAIL(runtime, "[tensor] dtype {} is not one of ours", static_cast<int>(dtype));
}

int64_t Tensor::bytes() const {
    int64_t last = 0;
    for (int i = 0; i < kMaxRank; ++i) {
        if (shape[i] == 0) return 0;
        last += (shape[i] - 1) * stride[i];
    }
    return dtype_bytes(dtype, last + 1);
}

bool Tensor::contiguous() const {
    int64_t expected = 1;
    for (int i = kMaxRank - 1; i >= 0; --i) {
        if (shape[i] == 0) return true;
        if (shape[i] != 1 && stride[i] != expected) return false;
        expected *= shape[i];
    }
    return true;
}

Tensor make_tensor(std::string_view name, DType dtype, Place place, std::initializer_list<int64_t> shape) {
    CHECK(shape.size() >= 1 && shape.size() <= kMaxRank, "[tensor] {}: rank {}, expected 1 to {}", name,
          shape.size(), kMaxRank);
    Tensor t;
    const size_t length = std::min(name.size(), sizeof t.name - 1);
    std::memcpy(t.name, name.data(), length);
    t.dtype = dtype;
    t.place = place;
    t.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    int64_t step = 1;
    for (int i = kMaxRank - 1; i >= 0; --i) {
        const bool used = i < t.rank;
        t.stride[i] = used ? step : 1;
        if (!used) continue;
        CHECK(t.shape[i] >= 0, "[tensor] {}: dimension {} is {}", name, i, t.shape[i]);
        step = checked_product(step, std::max<int64_t>(t.shape[i], 1), t.name);
    }
    dtype_bytes(dtype, step);  // throws when the bytes overflow
    return t;
}

std::string describe(const Tensor& t) {
    std::string text = fmt::format("{} [", t.name);
    for (int i = 0; i < t.rank; ++i) text += fmt::format("{}{}", i == 0 ? "" : ", ", t.shape[i]);
    return text + fmt::format("] {}", dtype_name(t.dtype));
}

uint16_t float_to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & ~kSignBit) > kFloatInfinity) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

uint16_t float_to_f16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t magnitude = bits & ~kSignBit;
    if (magnitude > kFloatInfinity) return static_cast<uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and above
    if (magnitude < 0x38800000u) return static_cast<uint16_t>(sign | subnormal_half(magnitude));
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

float f16_to_float(uint16_t x) {
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
    const uint32_t exponent = (x >> 10) & 0x1fu;
    const uint32_t mantissa = x & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | kFloatInfinity | (mantissa << 13));
    if (exponent == 0) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
    }
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

void load_floats(const Tensor& t, int64_t offset, int64_t count, float* out) {
    const size_t n = static_cast<size_t>(std::max<int64_t>(count, 0));
    if (n == 0) return;
    switch (t.dtype) {
        case DType::F32:
            std::memcpy(out, t.as<float>() + offset, n * sizeof(float));
            return;
        case DType::BF16:
            for (size_t i = 0; i < n; ++i) out[i] = bf16_to_float((t.as<uint16_t>() + offset)[i]);
            return;
        case DType::F16:
            for (size_t i = 0; i < n; ++i) out[i] = f16_to_float((t.as<uint16_t>() + offset)[i]);
            return;
        default:
            FAIL(runtime, "[tensor] {}: expected F32, BF16 or F16 to read as float", describe(t));
    }
}

void store_floats(const Tensor& t, int64_t offset, int64_t count, const float* in) {
    const size_t n = static_cast<size_t>(std::max<int64_t>(count, 0));
    if (n == 0) return;
    switch (t.dtype) {
        case DType::F32:
            std::memcpy(t.as<float>() + offset, in, n * sizeof(float));
            return;
        case DType::BF16:
            for (size_t i = 0; i < n; ++i) (t.as<uint16_t>() + offset)[i] = float_to_bf16(in[i]);
            return;
        case DType::F16:
            for (size_t i = 0; i < n; ++i) (t.as<uint16_t>() + offset)[i] = float_to_f16(in[i]);
            return;
        default:
            FAIL(runtime, "[tensor] {}: expected F32, BF16 or F16 to write from float", describe(t));
    }
}

}  // namespace quern
