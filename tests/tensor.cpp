// Tensor: shapes, names, and the conversions of 16-bit floats against arithmetic in double.
#include "ggml-like/tensor.h"

#include <doctest/doctest.h>
#include "ggml-like/error.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

using namespace quern;

namespace {

double decode(uint16_t bits, int mantissa_bits) {
    const int exponent_bits = 15 - mantissa_bits;
    const int mask = (1 << exponent_bits) - 1;
    const int exponent = (bits >> mantissa_bits) & mask;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int bias = mask / 2;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    if (exponent == mask) return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

using ToFloat = float (*)(uint16_t);
using FromFloat = uint16_t (*)(float);

/// For two neighbours of the format: their middle goes to the even one, floats beside it to the nearer one.
void check_between(uint16_t lower, int mantissa_bits, FromFloat from, ToFloat to) {
    const uint16_t upper = static_cast<uint16_t>(lower + 1);
    const double a = decode(lower, mantissa_bits);
    double b = decode(upper, mantissa_bits);
    if (std::isinf(b)) b = a + (a - decode(static_cast<uint16_t>(lower - 1), mantissa_bits));
    const float middle = static_cast<float>((a + b) / 2);
    const uint16_t even = lower & 1 ? upper : lower;
    const float infinity = std::numeric_limits<float>::infinity();
    const bool good = to(lower) == static_cast<float>(a) && from(static_cast<float>(a)) == lower &&
                      from(middle) == even && from(std::nextafterf(middle, 0)) == lower &&
                      from(std::nextafterf(middle, infinity)) == upper &&
                      from(-middle) == static_cast<uint16_t>(even | 0x8000);
    if (!good) FAIL_CHECK("bits ", lower, " middle ", middle);
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("tensor: every BF16 and F16 value and every middle between two rounds to nearest even") {
        for (uint16_t bits = 0; bits < 0x7f80; ++bits) {
            // the middle of two BF16 subnormals at the very bottom is still a float
            check_between(bits, 7, float_to_bf16, bf16_to_float);
        }
        for (uint16_t bits = 0; bits < 0x7c00; ++bits) check_between(bits, 10, float_to_f16, f16_to_float);
    }

    TEST_CASE("tensor: NaN stays NaN, infinity stays infinity, large halves overflow") {
        const float infinity = std::numeric_limits<float>::infinity();
        for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xff800001u, 0xffffffffu, 0x7f80ffffu}) {
            float nan;
            std::memcpy(&nan, &bits, 4);
            CHECK(std::isnan(bf16_to_float(float_to_bf16(nan))));
            CHECK(std::isnan(f16_to_float(float_to_f16(nan))));
        }
        for (int i = 0; i < 65536; ++i) {
            const uint16_t bits = static_cast<uint16_t>(i);
            CHECK(std::isnan(bf16_to_float(bits)) == std::isnan(decode(bits, 7)));
            CHECK(std::isnan(f16_to_float(bits)) == std::isnan(decode(bits, 10)));
        }
        CHECK(bf16_to_float(float_to_bf16(infinity)) == infinity);
        CHECK(f16_to_float(float_to_f16(-infinity)) == -infinity);
        CHECK(f16_to_float(float_to_f16(65519.0f)) == 65504.0f);
        CHECK(f16_to_float(float_to_f16(65520.0f)) == infinity);
        CHECK(f16_to_float(float_to_f16(1e30f)) == infinity);
        CHECK(float_to_bf16(std::numeric_limits<float>::max()) == 0x7f80);
        CHECK(float_to_f16(0x1p-25f) == 0);
        CHECK(float_to_f16(0x1.8p-25f) == 1);
        CHECK(float_to_f16(-0.0f) == 0x8000);
    }

    TEST_CASE("tensor: shapes, strides, bytes") {
        const Tensor t = make_tensor("h", DType::BF16, Place::scratch, {33, 2048});
        CHECK(describe(t) == "h [33, 2048] BF16");
        CHECK(t.rank == 2);
        CHECK(t.stride[0] == 2048);
        CHECK(t.stride[1] == 1);
        CHECK(t.elements() == 33 * 2048);
        CHECK(t.bytes() == 33 * 2048 * 2);
        CHECK(t.contiguous());

        Tensor view = t;  // columns 0..63
        view.shape[1] = 64;
        CHECK_FALSE(view.contiguous());
        CHECK(view.bytes() == (32 * 2048 + 64) * 2);
        view.shape[0] = 1;
        CHECK(view.contiguous());

        CHECK(make_tensor("e", DType::F32, Place::input, {0, 7}).bytes() == 0);
        CHECK(make_tensor("w", DType::NVFP4, Place::weight, {3, 16}).bytes() == 24);
        CHECK(make_tensor("i", DType::I32, Place::input, {2, 3, 4, 5}).bytes() == 480);
        CHECK(dtype_bytes(DType::F8_E4M3, 5) == 5);
        CHECK(std::string(dtype_name(DType::NVFP4)) == "NVFP4");
        const std::string long_name(100, 'x');
        CHECK(describe(make_tensor(long_name, DType::U8, Place::state, {1})) ==
              std::string(47, 'x') + " [1] U8");
    }

    TEST_CASE("tensor: impossible shapes are errors") {
        const int64_t big = int64_t{1} << 40;
        CHECK_THROWS_AS(make_tensor("a", DType::F32, Place::scratch, {}), Error);
        CHECK_THROWS_AS(make_tensor("a", DType::F32, Place::scratch, {1, 1, 1, 1, 1}), Error);
        CHECK_THROWS_AS(make_tensor("a", DType::F32, Place::scratch, {3, -1}), Error);
        CHECK_THROWS_AS(make_tensor("a", DType::F32, Place::scratch, {big, big}), Error);
        CHECK_THROWS_AS(make_tensor("a", DType::F32, Place::scratch, {big, int64_t{1} << 22}), Error);
    }

    TEST_CASE("tensor: load and store floats") {
        std::vector<float> in = {1.0f, -2.5f, 3.0e-5f, 65504.0f, 1.00390625f};
        for (const DType dtype : {DType::F32, DType::BF16, DType::F16}) {
            CAPTURE(std::string(dtype_name(dtype)));
            Tensor t = make_tensor("t", dtype, Place::scratch, {8});
            std::vector<uint8_t> memory(static_cast<size_t>(t.bytes()), 0xcd);
            t.data = memory.data();
            store_floats(t, 2, 5, in.data());
            std::vector<float> out(5);
            load_floats(t, 2, 5, out.data());
            for (size_t i = 0; i < 5; ++i) {
                const float expected = dtype == DType::F32    ? in[i]
                                       : dtype == DType::BF16 ? bf16_to_float(float_to_bf16(in[i]))
                                                              : f16_to_float(float_to_f16(in[i]));
                CHECK(out[i] == expected);
            }
            const size_t width = memory.size() / 8;
            for (size_t i = 0; i < 2 * width; ++i) CHECK(memory[i] == 0xcd);
            for (size_t i = 7 * width; i < memory.size(); ++i) CHECK(memory[i] == 0xcd);
        }
        Tensor codes = make_tensor("c", DType::U8, Place::scratch, {8});
        float value = 0;
        CHECK_THROWS_AS(load_floats(codes, 0, 1, &value), Error);
        CHECK_THROWS_AS(store_floats(codes, 0, 1, &value), Error);
    }
}
