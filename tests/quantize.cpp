// The quantizers against the formats' definitions: tables searched in double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "ggml-like/cpu/encode.h"
#include "ggml-like/error.h"
#include "ggml-like/nvfp4.h"
#include "ggml-like/quantize.h"

using namespace quern;

namespace {

std::vector<float> random_values(size_t count, uint32_t seed, bool heavy) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.02f);
    std::student_t_distribution<float> student(3);
    std::vector<float> out(count);
    for (float& v : out) v = heavy ? 0.02f * student(random) : normal(random);
    return out;
}

struct Encoded {
    Encoded(const std::vector<float>& values, const Nvfp4Global& g, ScaleChoice choice)
        : global(g), codes(values.size() / 2), scales(values.size() / 16) {
        encode_nvfp4(values, global, choice, codes.data(), scales.data());
    }
    uint8_t code(size_t i) const { return (codes[i / 2] >> (i % 2 * 4)) & 15; }
    double value(size_t i) const {
        const double scale = nvfp4::e4m3_to_float(scales[i / 16]);
        const double stored = global.stored;
        return nvfp4::kCodeValue[code(i)] *
               (global.form == GlobalForm::divisor ? scale / stored : scale * stored);
    }
    double squared_error(const std::vector<float>& values, size_t begin, size_t end) const {
        double sum = 0;
        for (size_t i = begin; i < end; ++i) sum += (value(i) - values[i]) * (value(i) - values[i]);
        return sum;
    }
    Nvfp4Global global;
    std::vector<uint8_t> codes, scales;
};

/// The nearest entry of an ascending table, of two equally near ones the even; in double precision.
int nearest(double x, const std::vector<double>& table) {
    int best = 0;
    for (int i = 1; i < static_cast<int>(table.size()); ++i) {
        const double now = std::fabs(table[static_cast<size_t>(i)] - x);
        const double before = std::fabs(table[static_cast<size_t>(best)] - x);
        if (now < before || (now == before && i % 2 == 0)) best = i;
    }
    return best;
}

std::vector<double> e4m3_table() {
    std::vector<double> out;
    for (int i = 0; i < 0x7f; ++i) out.push_back(nvfp4::e4m3_to_float(static_cast<uint8_t>(i)));
    return out;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("quantize: NVFP4 codes are the nearest, ties to even, saturated") {
        const std::vector<double> table(nvfp4::kCodeValue, nvfp4::kCodeValue + 8);
        std::vector<float> values;
        for (int i = 0; i <= 64 * 7; ++i)
            for (const float tiny : {-1e-6f, 0.0f, 1e-6f})
                values.push_back(static_cast<float>(i) / 64 + tiny);
        for (size_t i = 0; i < values.size(); i += 15) {
            std::vector<float> block(16, 0.0f);
            block[0] = 6;  // makes the block's scale 1
            for (size_t k = 0; k < 15 && i + k < values.size(); ++k)
                block[k + 1] = std::min(values[i + k], 6.0f) * (k % 2 ? -1 : 1);
            const Encoded out(block, {1, GlobalForm::multiplier}, ScaleChoice::amax);
            REQUIRE(out.scales[0] == 0x38);
            for (size_t k = 0; k < 16; ++k) {
                CAPTURE(block[k]);
                CHECK((out.code(k) & 7) == nearest(std::fabs(block[k]), table));
                CHECK(out.code(k) == nvfp4::float_to_e2m1(block[k]));
            }
        }
    }

    TEST_CASE("quantize: the formats' worked example, in both forms") {
        std::vector<float> w(32, 0.0f);
        const float g = 2688 / 0.32f;
        const float fours[] = {0.5f, 1, -6, 6};
        for (size_t i = 0; i < 4; ++i) w[i] = fours[i] * 128 / g;
        w[16] = 0.32f;
        for (const GlobalForm form : {GlobalForm::divisor, GlobalForm::multiplier}) {
            const auto global = Nvfp4Global::of(largest_magnitude(w), form);
            CHECK(global.stored == doctest::Approx(form == GlobalForm::divisor ? 8400 : 1.1904762e-4));
            const Encoded out(w, global, ScaleChoice::amax);
            CHECK(out.codes[0] == 0x21);
            CHECK(out.codes[1] == 0x7f);
            CHECK(out.scales == std::vector<uint8_t>{0x70, 0x7e});
        }
    }

    TEST_CASE("quantize: the same bytes on every processor, from any number of blocks") {
        const cpu::Encoders &best = cpu::encoders(), &any = cpu::any_encoders();
        MESSAGE("this processor: " << std::string(best.name));
        constexpr size_t kBlocks = 301;
        std::vector<float> w = random_values(16 * kBlocks, 11, true);
        for (size_t i = 0; i < 16; ++i) w[i] = 0;                          // a block of zeros
        for (size_t i = 16; i < 32; ++i) w[i] = i % 2 ? -0.0f : 1e-41f;    // beside denormals
        for (size_t i = 32; i < 48; ++i) w[i] = i == 40 ? -3e38f : 1e-9f;  // one huge value
        for (const float stored : {1.0f, 1e-4f, 3e35f, 1e-38f})
            for (const int form : {0, 1, 2, 3}) {
                CAPTURE(stored);
                CAPTURE(form);
                const auto encode = [&](const cpu::Encoders& set, size_t blocks) {
                    std::vector<uint8_t> codes(blocks * 8), scales(blocks);
                    set.nvfp4(w.data(), static_cast<int64_t>(blocks), {stored, form % 2 == 1}, form >= 2,
                              codes.data(), scales.data());
                    return std::pair(codes, scales);
                };
                const auto all = encode(best, kBlocks);
                CHECK(all == encode(any, kBlocks));
                // The first of all are encoded alike if none comes after them.
                for (size_t blocks = 0; blocks <= 40; ++blocks) {
                    CAPTURE(blocks);
                    for (const cpu::Encoders* set : {&best, &any}) {
                        const auto [codes, scales] = encode(*set, blocks);
                        CHECK(std::equal(codes.begin(), codes.end(), all.first.begin()));
                        CHECK(std::equal(scales.begin(), scales.end(), all.second.begin()));
                    }
                }
            }
        for (const int64_t n : {0, 1, 15, 31, 4800}) {
            CHECK(best.largest_magnitude(w.data(), n) == any.largest_magnitude(w.data(), n));
            for (const float scale : {1.0f, 1e-4f, 1e36f}) {
                std::vector<uint8_t> a(w.size()), b(w.size());
                best.fp8(w.data(), n, scale, a.data());
                any.fp8(w.data(), n, scale, b.data());
                CHECK(a == b);
            }
        }
    }

    // Written before there were loops for vectors.
    TEST_CASE("quantize: the bytes that earlier versions wrote") {
        std::vector<float> w(16 * 20);
        uint32_t random = 1;
        for (size_t i = 0; i < w.size(); ++i) {
            random = random * 1664525u + 1013904223u;
            const float u = static_cast<float>(static_cast<int32_t>(random) >> 8) * 0x1p-23f;
            w[i] = u * u * u * (i / 16 % 5 == 4 ? 1e-3f : 1.0f);
        }
        const auto hash = [](const std::vector<uint8_t>& bytes) {  // FNV-1a
            uint32_t h = 2166136261u;
            for (const uint8_t b : bytes) h = (h ^ b) * 16777619u;
            return h;
        };
        for (const GlobalForm form : {GlobalForm::divisor, GlobalForm::multiplier})
            for (const ScaleChoice choice : {ScaleChoice::amax, ScaleChoice::mse}) {
                Encoded out(w, Nvfp4Global::of(largest_magnitude(w), form), choice);
                out.codes.insert(out.codes.end(), out.scales.begin(), out.scales.end());
                CHECK(hash(out.codes) == (choice == ScaleChoice::amax ? 0x1496a06cu : 0xfb28282cu));
            }
        std::vector<uint8_t> bytes(w.size());
        encode_fp8(w, fp8_scale(largest_magnitude(w)), bytes.data());
        CHECK(hash(bytes) == 0x3dd2eb24u);
    }

    TEST_CASE("quantize: amax scales are the formulas, rounded to the nearest E4M3") {
        const std::vector<double> table = e4m3_table();
        for (const bool heavy : {false, true}) {
            const std::vector<float> w = random_values(1 << 14, 3, heavy);
            const double amax = largest_magnitude(w);
            for (const GlobalForm form : {GlobalForm::divisor, GlobalForm::multiplier}) {
                const Encoded out(w, Nvfp4Global::of(static_cast<float>(amax), form), ScaleChoice::amax);
                int64_t other = 0;  // by one: FP32 may round a value at the border of two scales
                for (size_t b = 0; b < out.scales.size(); ++b) {
                    double largest = 0;
                    for (size_t i = 0; i < 16; ++i)
                        largest = std::max(largest, std::fabs(static_cast<double>(w[16 * b + i])));
                    const int expected = nearest(2688 / amax * largest / 6, table);
                    CHECK(std::abs(out.scales[b] - expected) <= 1);
                    other += out.scales[b] != expected;
                }
                CHECK(other <= 2);
            }
        }
    }

    TEST_CASE("quantize: the searched scale is the best of all scales") {
        for (const bool heavy : {false, true}) {
            CAPTURE(heavy);
            const std::vector<float> w = random_values(1 << 12, 5, heavy);
            const auto global = Nvfp4Global::of(largest_magnitude(w), GlobalForm::divisor);
            const Encoded amax(w, global, ScaleChoice::amax), mse(w, global, ScaleChoice::mse);
            const std::vector<double> table(nvfp4::kCodeValue, nvfp4::kCodeValue + 8);
            double sum_amax = 0, sum_mse = 0;
            for (size_t b = 0; b < mse.scales.size(); ++b) {
                double least = std::numeric_limits<double>::infinity();
                for (int s = 1; s <= 0x7e; ++s) {
                    const double step = static_cast<double>(nvfp4::e4m3_to_float(static_cast<uint8_t>(s))) /
                                        static_cast<double>(global.stored);
                    double error = 0;
                    for (size_t i = 16 * b; i < 16 * b + 16; ++i) {
                        const double a = std::fabs(static_cast<double>(w[i]));
                        const double d = table[static_cast<size_t>(nearest(a / step, table))] * step - a;
                        error += d * d;
                    }
                    least = std::min(least, error);
                }
                const double found = mse.squared_error(w, 16 * b, 16 * b + 16);
                CHECK(found <= least * (1 + 1e-5));
                sum_mse += found;
                sum_amax += amax.squared_error(w, 16 * b, 16 * b + 16);
            }
            CHECK(sum_mse < 0.88 * sum_amax);  // measured: 0.73 normal, 0.85 heavy tails
        }
    }

    TEST_CASE("quantize: zeros, a matrix of zeros, tiny and huge matrices") {
        const std::vector<float> zeros(16, 0.0f);
        for (const ScaleChoice choice : {ScaleChoice::amax, ScaleChoice::mse}) {
            const Encoded ct(zeros, Nvfp4Global::of(0, GlobalForm::divisor), choice);
            CHECK(ct.global.stored == 1);
            CHECK(ct.scales[0] == nvfp4::float_to_e4m3(0.125f));
            const Encoded mo(zeros, Nvfp4Global::of(0, GlobalForm::multiplier), choice);
            CHECK(mo.global.stored == 1);
            CHECK(mo.scales[0] == 0x38);
            for (size_t i = 0; i < 16; ++i) CHECK((ct.code(i) | mo.code(i)) == 0);
        }
        for (const float size : {1e-44f, 1e-30f, 1e-5f, 1e5f, 3e38f}) {
            CAPTURE(size);
            std::vector<float> w(32, size);
            w[3] = -size;
            for (size_t i = 16; i < 32; ++i) w[i] = size * 1e-9f;  // below the smallest scale
            for (const GlobalForm form : {GlobalForm::divisor, GlobalForm::multiplier}) {
                const Encoded out(w, Nvfp4Global::of(size, form), ScaleChoice::mse);
                CHECK(std::isnormal(out.global.stored));
                CHECK(out.scales[0] <= 0x7e);
                CHECK(out.scales[1] >= 1);
                if (size > 1e-35f && size < 1e38f)
                    CHECK(out.value(3) == doctest::Approx(-static_cast<double>(size)).epsilon(1e-6));
            }
        }
        CHECK_THROWS_AS(encode_nvfp4(std::vector<float>(8), {}, ScaleChoice::amax, nullptr, nullptr), Error);
        const std::vector<float> nan = {1, NAN, 2};
        CHECK(std::isnan(largest_magnitude(nan)));
        CHECK_THROWS_AS(Nvfp4Global::of(NAN, GlobalForm::divisor), Error);
    }

    TEST_CASE("quantize: FP8 is the nearest E4M3 of value over scale") {
        const std::vector<double> table = e4m3_table();
        const std::vector<float> w = random_values(4096, 9, true);
        const float scale = fp8_scale(largest_magnitude(w));
        std::vector<uint8_t> out(w.size());
        encode_fp8(w, scale, out.data());
        for (size_t i = 0; i < w.size(); ++i) {
            const double x = static_cast<double>(w[i] / scale);
            CHECK((out[i] & 0x7f) == nearest(std::fabs(x), table));
            CHECK((out[i] >> 7) == std::signbit(w[i]));
        }
        CHECK(fp8_scale(0) == 1);
        std::vector<float> borders = {0.0f, -0.0f, NAN, -NAN, INFINITY, -INFINITY, 1e-40f, 3.4e38f};
        for (const double t : table)
            for (const double at :
                 {t, t + 0x1p-11, t * (1 + 0x1p-5), t * (1 + 0x1p-4), t * (1 + 0x1p-4 + 0x1p-20)})
                for (const double sign : {1.0, -1.0}) borders.push_back(static_cast<float>(sign * at));
        out.resize(borders.size());
        encode_fp8(borders, 1.0f, out.data());
        for (size_t i = 0; i < borders.size(); ++i) CHECK(out[i] == nvfp4::float_to_e4m3(borders[i]));
        CHECK_THROWS_AS(fp8_scale(std::numeric_limits<float>::infinity()), Error);
    }
}
