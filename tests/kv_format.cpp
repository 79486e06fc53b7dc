// Packed rows of a KV cache: bytes against a reference in double precision, random and awkward rows, their errors.
#include "ggml-like/kv_format.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "ggml-like/error.h"
#include "ops/kv_reference.h"
#include "tools/engine/kv_types.h"

namespace quern {
namespace {

namespace ref = test::kv_reference;

struct Format {
    DType dtype;
    bool values;

    kv::Packing packing() const { return kv::packing_of(dtype, values); }
    ref::Kind kind() const { return ref::kind_of(dtype, values); }
};
constexpr Format kFormats[] = {
    {DType::F8_E4M3, false}, {DType::NVFP4, false}, {kv::kTq4, false}, {kv::kTq4, true}};

std::vector<float> random_row(int d, unsigned seed, float scale = 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, scale);
    std::vector<float> x(static_cast<size_t>(d));
    for (float& v : x) v = normal(random);
    return x;
}

std::vector<std::vector<float>> awkward_rows(int d) {
    std::vector<std::vector<float>> rows = {
        std::vector<float>(static_cast<size_t>(d), 0.0f), std::vector<float>(static_cast<size_t>(d), -0.0f),
        std::vector<float>(static_cast<size_t>(d), 3.0f), std::vector<float>(static_cast<size_t>(d), 1e-40f)};
    for (const float huge : {448.0f, 449.0f, 5e4f, -5e4f, 1e30f}) {
        auto row = random_row(d, 3);
        row[static_cast<size_t>(d / 3)] = huge;
        rows.push_back(row);
        std::fill(row.begin(), row.end(), 0.0f);
        row.back() = huge;
        rows.push_back(row);
    }
    for (const float scale : {1e-42f, 1e-30f, 1e-6f, 1e3f}) rows.push_back(random_row(d, 4, scale));
    auto offset = random_row(d, 5, 0.01f);  // far from zero
    for (float& v : offset) v += 100;
    rows.push_back(offset);
    return rows;
}

std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

double rms(const std::vector<double>& x) {
    double sum = 0;
    for (const double v : x) sum += v * v;
    return std::sqrt(sum / static_cast<double>(x.size()));
}

/// One row, packed by both; how many codes differ. They may where a value lies halfway but for rounding in FP32.
size_t compare_row(const Format& f, const std::vector<float>& x, float given, int place) {
    const size_t d = x.size(), bytes = 64 * ref::row_bytes(f.kind(), d);
    CHECK(static_cast<size_t>(kv::layout_of(f.dtype, f.values, static_cast<int>(d)).head()) == bytes);
    std::vector<std::byte> own(bytes, std::byte{0xa5});
    std::vector<uint8_t> expected(bytes, 0xa5);
    kv::pack_row(f.packing(), x.data(), static_cast<int>(d), given, own.data(), place);
    ref::pack(f.kind(), doubles(x), given, expected.data(), static_cast<size_t>(place));
    const auto* raw = reinterpret_cast<const uint8_t*>(own.data());
    const auto mine = ref::unpack(f.kind(), raw, static_cast<size_t>(place), d),
               theirs = ref::unpack(f.kind(), expected.data(), static_cast<size_t>(place), d);
    std::vector<float> unpacked(d);
    kv::unpack_row(f.packing(), own.data(), place, static_cast<int>(d), unpacked.data());
    size_t differing = 0, untouched = 0;
    double error = 0, least = 0;
    for (size_t i = 0; i < d; ++i) {
        CHECK(std::isfinite(unpacked[i]));
        CHECK(unpacked[i] == doctest::Approx(mine[i]).epsilon(1e-6));
        differing += std::fabs(mine[i] - theirs[i]) > 0.01 * std::fabs(theirs[i]) + 1e-300;
        error += (mine[i] - x[i]) * (mine[i] - x[i]), least += (theirs[i] - x[i]) * (theirs[i] - x[i]);
    }
    CHECK(error <= least * 1.02 + 1e-60);  // no worse than the reference's codes
    for (size_t i = 0; i < bytes; ++i) untouched += raw[i] == 0xa5;
    CHECK(untouched + ref::row_bytes(f.kind(), d) + d / 8 + 2 >= bytes);  // the other 63 rows
    return differing;
}

TEST_SUITE("cpu") {
    TEST_CASE("KV formats: the bytes of a row against double precision, at every place of a page") {
        for (const Format& f : kFormats)
            for (const int d : {16, 32, 64, 256}) {
                CAPTURE(static_cast<int>(f.packing()));
                CAPTURE(d);
                size_t differing = 0;
                for (int place = 0; place < 64; ++place)
                    differing += compare_row(f, random_row(d, static_cast<unsigned>(100 + place)), 0, place);
                CHECK(differing <= static_cast<size_t>(64 * d / 500));
                if (f.dtype == kv::kTq4) continue;
                for (const float given : {0.01f, 0.3f}) compare_row(f, random_row(d, 7), given, 9);
            }
    }

    TEST_CASE("KV formats: zeros, a huge value, denormals, values far from zero") {
        for (const Format& f : kFormats)
            for (const auto& row : awkward_rows(256)) {
                CAPTURE(static_cast<int>(f.packing()));
                CAPTURE(row[0]);
                CAPTURE(row[85]);
                compare_row(f, row, 0, 63);
            }
    }

    TEST_CASE("KV formats: a row with an infinity or a NaN is NaN, and its neighbours are what they were") {
        for (const Format& f : kFormats)
            for (const float bad : {INFINITY, -INFINITY, NAN}) {
                CAPTURE(static_cast<int>(f.packing()));
                CAPTURE(bad);
                std::vector<std::byte> block(
                    static_cast<size_t>(kv::layout_of(f.dtype, f.values, 256).head()));
                auto x = random_row(256, 8);
                std::vector<float> y(256);
                kv::pack_row(f.packing(), x.data(), 256, 0, block.data(), 4);
                kv::unpack_row(f.packing(), block.data(), 4, 256, y.data());
                x[77] = bad;
                kv::pack_row(f.packing(), x.data(), 256, 0, block.data(), 5);
                std::vector<float> after(256), broken(256);
                kv::unpack_row(f.packing(), block.data(), 4, 256, after.data());
                kv::unpack_row(f.packing(), block.data(), 5, 256, broken.data());
                CHECK(after == y);
                CHECK(std::all_of(broken.begin(), broken.end(), [](float v) { return std::isnan(v); }));
            }
    }

    TEST_CASE("KV formats: the error of normal values, and lengths that tq4 keeps") {
        const auto error = [](const Format& f) {
            std::vector<std::byte> block(static_cast<size_t>(kv::layout_of(f.dtype, f.values, 256).head()));
            double sum = 0;
            for (unsigned seed = 0; seed < 50; ++seed) {
                const auto x = random_row(256, seed);
                std::vector<float> y(256);
                kv::pack_row(f.packing(), x.data(), 256, 0, block.data(), 5);
                kv::unpack_row(f.packing(), block.data(), 5, 256, y.data());
                auto difference = doubles(x);
                for (size_t i = 0; i < y.size(); ++i) difference[i] -= y[i];
                sum += rms(difference) / rms(doubles(x)) / 50;
                if (f.packing() == kv::Packing::centroids)
                    CHECK(rms(doubles(y)) == doctest::Approx(rms(doubles(x))).epsilon(0.004));
            }
            return sum;
        };
        CHECK(error(kFormats[0]) == doctest::Approx(0.027).epsilon(0.1));
        CHECK(error(kFormats[1]) == doctest::Approx(0.095).epsilon(0.1));
        CHECK(error(kFormats[2]) == doctest::Approx(0.097).epsilon(0.1));
        CHECK(error(kFormats[3]) == doctest::Approx(0.11).epsilon(0.15));
    }

    TEST_CASE("KV formats: the centroids are Lloyd and Max's, the rotation is its own inverse") {
        // Centroids of a normal distribution between midpoints, until they stay.
        std::vector<double> c;
        for (int i = 0; i < 8; ++i) c.push_back(0.2 + 0.35 * i);
        for (int round = 0; round < 3000; ++round)
            for (size_t i = 0; i < 8; ++i) {
                const double low = i == 0 ? 0 : (c[i - 1] + c[i]) / 2,
                             high = i == 7 ? 12 : (c[i] + c[i + 1]) / 2;
                const auto density = [](double x) { return std::exp(-x * x / 2) / std::sqrt(2 * M_PI); };
                const auto below = [](double x) { return std::erf(x / std::sqrt(2.0)) / 2; };
                c[i] = (density(low) - density(high)) / (below(high) - below(low));
            }
        for (size_t i = 0; i < 8; ++i)
            CHECK(static_cast<double>(kv::kCentroids[i]) == doctest::Approx(c[i]).epsilon(0.005));
        auto x = random_row(64, 1);
        const auto before = x;
        const auto expected = ref::hadamard(doubles(x));
        kv::hadamard(x.data(), 64);
        for (size_t i = 0; i < x.size(); ++i) CHECK(x[i] == doctest::Approx(expected[i]).epsilon(1e-5));
        kv::hadamard(x.data(), 64);
        for (size_t i = 0; i < x.size(); ++i) CHECK(x[i] == doctest::Approx(before[i]).epsilon(1e-5));
    }

    TEST_CASE("KV formats: names, bytes of a token, and what does not fit") {
        const auto token = [](const char* k, const char* v) {
            const KvTypes t = parse_kv_types(k, v, DType::BF16);
            return 10 * (kv::page_bytes(t.k, false, 2, 256) + kv::page_bytes(t.v, true, 2, 256)) / 64;
        };
        CHECK(token("auto", "") == 20480);
        CHECK(token("fp8", "") == 10320);
        CHECK(token("q8", "bf16") == 15400);
        CHECK(token("nvfp4", "") == 5840);
        CHECK(token("turboquant_k8v4", "") == 7800);
        CHECK(token("tq4", "") == 5240);
        CHECK(token("fp8", "nvfp4") == 8080);
        CHECK(kv_name(parse_kv_types("k8v4", "", DType::BF16)) == "k8v4");
        CHECK(kv_name(parse_kv_types("fp8", "nvfp4", DType::BF16)) == "fp8/nvfp4");
        CHECK_THROWS_AS(parse_kv_types("q4_0", "", DType::BF16), Error);
        CHECK(!kv::fits(kv::Packing::nvfp4, 24));
        CHECK(!kv::fits(kv::Packing::centroids, 24));
        CHECK(kv::fits(kv::Packing::steps, 24));
        CHECK(kv::fits(kv::Packing::fp8, 33));
    }
}

}  // namespace
}  // namespace quern
