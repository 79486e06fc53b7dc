// Dot kernels: every set that this CPU runs, against sums in double over values decoded here.
#include "ggml-like/cpu/dot.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace quern::cpu;

namespace {

/// Memory that ends exactly where an unreadable page begins: reading past it crashes.
class Guarded {
  public:
    explicit Guarded(size_t bytes) : bytes_(bytes) {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        mapped_ = (bytes + page - 1) / page * page + page;
        base_ = static_cast<uint8_t*>(
            mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        REQUIRE(base_ != MAP_FAILED);
        REQUIRE(mprotect(base_ + mapped_ - page, page, PROT_NONE) == 0);
        data_ = base_ + mapped_ - page - bytes;
    }
    ~Guarded() { munmap(base_, mapped_); }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;

    uint8_t* data() { return data_; }
    float* floats() { return reinterpret_cast<float*>(data_); }
    size_t size() const { return bytes_; }

  private:
    size_t bytes_ = 0;
    size_t mapped_ = 0;
    uint8_t* base_ = nullptr;
    uint8_t* data_ = nullptr;
};

constexpr double kCodes[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};

/// sign | exponent | mantissa with the given widths, IEEE-like.
double decode_float(uint32_t bits, int exponent_bits, int mantissa_bits, bool infinities) {
    const int exponent_mask = (1 << exponent_bits) - 1;
    const int bias = exponent_mask / 2;
    const int exponent = static_cast<int>(bits >> mantissa_bits) & exponent_mask;
    const int mantissa = static_cast<int>(bits) & ((1 << mantissa_bits) - 1);
    const double sign = (bits >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
    if (infinities && exponent == exponent_mask)
        return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    if (!infinities && exponent == exponent_mask && mantissa == (1 << mantissa_bits) - 1) return std::nan("");
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

double e4m3(uint8_t v) { return decode_float(v, 4, 3, false); }

enum class Format { f32, bf16, f16, f8, f8_block, nvfp4 };
constexpr Format kFormats[] = {Format::f32, Format::bf16,     Format::f16,
                               Format::f8,  Format::f8_block, Format::nvfp4};
const char* name_of(Format f) {
    constexpr const char* kNames[] = {"f32", "bf16", "f16", "f8", "f8_block", "nvfp4"};
    return kNames[static_cast<int>(f)];
}
int64_t row_bytes(Format f, int64_t k) {
    if (f == Format::f32) return 4 * k;
    if (f == Format::bf16 || f == Format::f16) return 2 * k;
    return f == Format::nvfp4 ? k / 2 : k;
}
int64_t scale_bytes(Format f, int64_t k) {
    if (f == Format::nvfp4) return k / 16;
    return f == Format::f8_block ? (k + 127) / 128 * 4 : 0;
}
RowKernel kernel(const DotKernels& set, Format f) {
    const RowKernel all[] = {set.f32, set.bf16, set.f16, set.f8_e4m3, set.f8_e4m3_block, set.nvfp4};
    return all[static_cast<int>(f)];
}

/// A matrix in guarded memory, one odd byte past the natural place.
struct Matrix {
    Format format;
    int64_t rows, k;
    Guarded data, scale;

    Matrix(Format f, int64_t row_count, int64_t columns)
        : format(f),
          rows(row_count),
          k(columns),
          data(static_cast<size_t>(row_count * (row_bytes(f, columns) + 1))),
          scale(static_cast<size_t>(row_count * (scale_bytes(f, columns) + 1))) {}

    int64_t stride() const { return row_bytes(format, k) + 1; }  // rows at odd addresses
    int64_t scale_stride() const { return scale_bytes(format, k) + 1; }
    uint8_t* row(int64_t r) { return data.data() + r * stride() + 1; }
    uint8_t* scales(int64_t r) { return scale.data() + r * scale_stride() + 1; }
    RowBlock block() { return {row(0), stride(), rows, scales(0), scale_stride()}; }

    double value(int64_t r, int64_t i) {
        const uint8_t* p = row(r);
        if (format == Format::f32) {
            float v;
            std::memcpy(&v, p + 4 * i, 4);
            return v;
        }
        if (format == Format::bf16 || format == Format::f16) {
            const uint32_t bits = p[2 * i] | static_cast<uint32_t>(p[2 * i + 1]) << 8;
            return format == Format::bf16 ? decode_float(bits, 8, 7, true) : decode_float(bits, 5, 10, true);
        }
        if (format == Format::f8) return e4m3(p[i]);
        if (format == Format::f8_block) {
            float s;
            std::memcpy(&s, scales(r) + i / 128 * 4, 4);
            return e4m3(p[i]) * s;
        }
        return kCodes[(p[i / 2] >> (i % 2 * 4)) & 15] * e4m3(scales(r)[i / 16]);
    }
};

void put16(uint8_t* p, uint32_t bits) {
    p[0] = static_cast<uint8_t>(bits);
    p[1] = static_cast<uint8_t>(bits >> 8);
}

void fill(Matrix& m, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < m.rows; ++r) {
        for (int64_t i = 0; i < row_bytes(m.format, m.k); ++i) {
            uint8_t byte = static_cast<uint8_t>(random());
            const bool f8 = m.format == Format::f8 || m.format == Format::f8_block;
            if (f8 && (byte & 0x7f) == 0x7f) byte ^= 1;
            m.row(r)[i] = byte;
        }
        for (int64_t i = 0; i < m.k; ++i) {
            const float v = normal(random);
            uint32_t bits;
            std::memcpy(&bits, &v, 4);
            if (m.format == Format::f32) std::memcpy(m.row(r) + 4 * i, &v, 4);
            if (m.format == Format::bf16) put16(m.row(r) + 2 * i, bits >> 16);
            // any finite half: sign, exponent 8..19, all mantissas
            if (m.format == Format::f16)
                put16(m.row(r) + 2 * i, (random() & 0x83ffu) | (8u + random() % 12u) << 10);
        }
        for (int64_t i = 0; i < scale_bytes(m.format, m.k); ++i)
            m.scales(r)[i] = static_cast<uint8_t>(random() % 0x7f);
        for (int64_t i = 0; m.format == Format::f8_block && i < (m.k + 127) / 128; ++i) {
            const float v = std::exp(normal(random));
            std::memcpy(m.scales(r) + 4 * i, &v, 4);
        }
    }
}

/// Activations of some tokens, each row in guarded memory, and the packed rows of a kernel set.
struct Activations {
    std::vector<std::unique_ptr<Guarded>> rows, packed;
    std::vector<const float*> natural, arranged;

    Activations(int64_t tokens, int64_t k) {
        for (int64_t t = 0; t < tokens; ++t) {
            rows.push_back(std::make_unique<Guarded>(static_cast<size_t>(4 * k)));
            packed.push_back(std::make_unique<Guarded>(static_cast<size_t>(4 * k)));
            natural.push_back(rows.back()->floats());
            arranged.push_back(packed.back()->floats());
        }
    }
    float* row(int64_t t) { return rows[static_cast<size_t>(t)]->floats(); }
    const float* const* pointers(const DotKernels& set, Format f, int64_t k) {
        if (f != Format::nvfp4) return natural.data();
        for (size_t t = 0; t < rows.size(); ++t) set.pack_nvfp4(natural[t], k, packed[t]->floats());
        return arranged.data();
    }
};

constexpr float kSentinel = -12345.678f;

/// y[t][r] for tokens [first, first + count) in one call; checks the sentinels around each token's outputs.
std::vector<std::vector<float>> run(const DotKernels& set, Matrix& m, const float* const* x, int64_t first,
                                    int64_t count) {
    std::vector<std::vector<float>> y(static_cast<size_t>(count),
                                      std::vector<float>(static_cast<size_t>(m.rows) + 2, kSentinel));
    std::vector<float*> to;
    for (auto& row : y) to.push_back(row.data() + 1);
    kernel(set, m.format)(m.block(), m.k, x + first, to.data(), count);
    for (auto& row : y) {
        CHECK(row.front() == kSentinel);
        CHECK(row.back() == kSentinel);
        row.erase(row.begin());
        row.pop_back();
    }
    return y;
}

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0; }

void check_values(Matrix& m, Activations& x, const std::vector<std::vector<float>>& y) {
    for (size_t t = 0; t < y.size(); ++t) {
        for (int64_t r = 0; r < m.rows; ++r) {
            double sum = 0, magnitude = 0;
            for (int64_t i = 0; i < m.k; ++i) {
                const double term = m.value(r, i) * x.row(static_cast<int64_t>(t))[i];
                sum += term;
                magnitude += std::fabs(term);
            }
            // rounding of at most k/8 + 8 sums one after the other
            const double bound = magnitude * std::ldexp(static_cast<double>(m.k) / 8 + 8, -24);
            const double error = std::fabs(y[t][static_cast<size_t>(r)] - sum);
            if (!(error <= bound))
                FAIL_CHECK("token ", t, " row ", r, ": ", y[t][static_cast<size_t>(r)], " != ", sum);
        }
    }
}

std::vector<int64_t> columns(Format f) {
    if (f == Format::nvfp4) return {16, 32, 48, 112, 128, 144, 240, 256, 272, 384, 400, 512, 528, 2048};
    return {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 255, 257, 300, 512, 2048};
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("dot: every set and format equals the sum in double, alone and in a batch") {
        for (const DotKernels* set : available_dot_kernels()) {
            for (const Format f : kFormats) {
                for (const int64_t k : columns(f)) {
                    CAPTURE(std::string(set->name));
                    CAPTURE(std::string(name_of(f)));
                    CAPTURE(k);
                    std::mt19937 random(static_cast<unsigned>(k));
                    Matrix m(f, 7, k);
                    fill(m, random);
                    Activations x(9, k);
                    std::normal_distribution<float> normal;
                    for (int64_t t = 0; t < 9; ++t)
                        for (int64_t i = 0; i < k; ++i) x.row(t)[i] = normal(random);
                    const float* const* pointers = x.pointers(*set, f, k);
                    const auto batch = run(*set, m, pointers, 0, 9);
                    check_values(m, x, batch);
                    for (int64_t t = 0; t < 9; ++t) {
                        const auto alone = run(*set, m, pointers, t, 1);
                        for (size_t r = 0; r < 7; ++r)
                            CHECK(same_bits(alone[0][r], batch[static_cast<size_t>(t)][r]));
                    }
                }
            }
        }
    }

    TEST_CASE("dot: bits do not depend on the number of tokens or on the row's place") {
        constexpr int64_t kColumns = 400;
        for (const DotKernels* set : available_dot_kernels()) {
            for (const Format f : kFormats) {
                CAPTURE(std::string(set->name));
                CAPTURE(std::string(name_of(f)));
                std::mt19937 random(5);
                Matrix m(f, 6, kColumns);
                fill(m, random);
                for (int64_t r = 1; r < m.rows; ++r) {  // all rows alike
                    std::memcpy(m.row(r), m.row(0), static_cast<size_t>(row_bytes(f, kColumns)));
                    std::memcpy(m.scales(r), m.scales(0), static_cast<size_t>(scale_bytes(f, kColumns)));
                }
                Activations x(33, kColumns);
                for (int64_t i = 0; i < kColumns; ++i) {
                    const float v = std::sin(static_cast<float>(i * i));
                    for (int64_t t = 0; t < 33; ++t) x.row(t)[i] = v;  // and all tokens
                }
                const float* const* pointers = x.pointers(*set, f, kColumns);
                const float expected = run(*set, m, pointers, 0, 1)[0][0];
                for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 33}) {
                    CAPTURE(tokens);
                    for (const auto& row : run(*set, m, pointers, 0, tokens))
                        for (const float y : row) CHECK(same_bits(y, expected));
                }
            }
        }
    }

    TEST_CASE("dot: all 16 codes with all 256 block scales of NVFP4 are exact") {
        constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
        for (const DotKernels* set : available_dot_kernels()) {
            CAPTURE(std::string(set->name));
            Activations x(16, 16);
            for (int64_t t = 0; t < 16; ++t)
                for (int64_t i = 0; i < 16; ++i) x.row(t)[i] = i == t ? 1.0f : 0.0f;
            const float* const* pointers = x.pointers(*set, Format::nvfp4, 16);
            for (int code = 0; code < 16; ++code) {
                Matrix m(Format::nvfp4, 256, 16);
                for (int64_t r = 0; r < 256; ++r) {
                    std::memset(m.row(r), code * 17, 8);
                    m.scales(r)[0] = static_cast<uint8_t>(r);
                }
                const auto y = run(*set, m, pointers, 0, 16);
                for (const auto& token : y) {
                    for (size_t r = 0; r < 256; ++r) {
                        const double scale = (r & 0x7f) == 0x7f ? kNan : e4m3(static_cast<uint8_t>(r));
                        const double expected = kCodes[code] * scale;
                        const double found = token[r];
                        if (std::isnan(expected) ? !std::isnan(found) : found != expected)
                            FAIL_CHECK("code ", code, " scale ", r, ": ", found, " != ", expected);
                    }
                }
            }
        }
    }

    TEST_CASE("dot: every stored value of 8 and 16 bits becomes exactly its float") {
        for (const DotKernels* set : available_dot_kernels()) {
            for (const Format f : {Format::bf16, Format::f16, Format::f8}) {
                CAPTURE(std::string(set->name));
                CAPTURE(std::string(name_of(f)));
                const int64_t count = f == Format::f8 ? 256 : 65536;
                Activations one(1, 1);
                one.row(0)[0] = 1.0f;
                Matrix single(f, count, 1);
                for (int64_t r = 0; r < count; ++r) {
                    single.row(r)[0] = static_cast<uint8_t>(r);
                    if (f != Format::f8) put16(single.row(r), static_cast<uint32_t>(r));
                }
                const auto y = run(*set, single, one.natural.data(), 0, 1)[0];
                for (int64_t r = 0; r < count; ++r) {
                    const double expected = single.value(r, 0);
                    const double found = y[static_cast<size_t>(r)];
                    if (std::isnan(expected) ? !std::isnan(found) : found != expected)
                        FAIL_CHECK("bits ", r, ": ", found, " != ", expected);
                }
                // the same through whole vectors, finite values only: 0 * infinity is not 0
                constexpr int64_t kColumns = 32;
                Matrix many(f, count / kColumns, kColumns);
                for (int64_t v = 0; v < count; ++v) {
                    uint8_t* to = many.row(v / kColumns) + v % kColumns * (f == Format::f8 ? 1 : 2);
                    const uint32_t bits = std::isfinite(single.value(v, 0)) ? static_cast<uint32_t>(v) : 0u;
                    to[0] = static_cast<uint8_t>(bits);
                    if (f != Format::f8) put16(to, bits);
                }
                Activations unit(kColumns, kColumns);
                for (int64_t t = 0; t < kColumns; ++t)
                    for (int64_t i = 0; i < kColumns; ++i) unit.row(t)[i] = i == t ? 1.0f : 0.0f;
                const auto columns_of = run(*set, many, unit.natural.data(), 0, kColumns);
                for (int64_t v = 0; v < count; ++v) {
                    const float found =
                        columns_of[static_cast<size_t>(v % kColumns)][static_cast<size_t>(v / kColumns)];
                    if (found != many.value(v / kColumns, v % kColumns)) FAIL_CHECK("bits ", v, ": ", found);
                }
            }
        }
    }

    TEST_CASE("dot: NaN and infinity come through, and only where they belong") {
        constexpr float kInfinity = std::numeric_limits<float>::infinity();
        for (const DotKernels* set : available_dot_kernels()) {
            for (const Format f : kFormats) {
                for (const int64_t place : {0, 5, 130, 271}) {
                    CAPTURE(std::string(set->name));
                    CAPTURE(std::string(name_of(f)));
                    CAPTURE(place);
                    std::mt19937 random(3);
                    Matrix m(f, 6, 272);
                    fill(m, random);
                    Activations x(6, 272);
                    for (int64_t t = 0; t < 6; ++t)
                        for (int64_t i = 0; i < 272; ++i) x.row(t)[i] = 1.0f;
                    for (int64_t r = 0; r < 6; ++r) {  // a known sign where infinity will meet it
                        if (f == Format::nvfp4) m.row(r)[place / 2] = 0x11, m.scales(r)[place / 16] = 0x38;
                        if (f == Format::f8 || f == Format::f8_block) m.row(r)[place] = 0x38;
                        if (f == Format::bf16) put16(m.row(r) + 2 * place, 0x3f80);
                        if (f == Format::f16) put16(m.row(r) + 2 * place, 0x3c00);
                        const float one = 1.0f;
                        if (f == Format::f32) std::memcpy(m.row(r) + 4 * place, &one, 4);
                    }
                    x.row(2)[place] = -kInfinity;
                    x.row(4)[place] = std::nanf("");
                    // row 3: a NaN weight (NVFP4: a NaN block scale)
                    const float nan = std::nanf("");
                    if (f == Format::f32) std::memcpy(m.row(3) + 4 * place, &nan, 4);
                    if (f == Format::bf16) put16(m.row(3) + 2 * place, 0x7fc0);
                    if (f == Format::f16) put16(m.row(3) + 2 * place, 0x7e00);
                    if (f == Format::f8 || f == Format::f8_block) m.row(3)[place] = 0xff;
                    if (f == Format::nvfp4) m.scales(3)[place / 16] = 0x7f;
                    const auto y = run(*set, m, x.pointers(*set, f, 272), 0, 6);
                    for (size_t t = 0; t < 6; ++t) {
                        for (size_t r = 0; r < 6; ++r) {
                            if (r == 3 || t == 4)
                                CHECK(std::isnan(y[t][r]));
                            else if (t == 2)
                                CHECK(y[t][r] == -kInfinity);
                            else
                                CHECK(std::isfinite(y[t][r]));
                        }
                    }
                }
            }
        }
    }

    TEST_CASE("dot: dot_f32 and axpy") {
        for (const DotKernels* set : available_dot_kernels()) {
            CAPTURE(std::string(set->name));
            for (const int64_t n : {0, 1, 3, 4, 8, 15, 16, 17, 63, 64, 65, 100, 128, 256, 333}) {
                CAPTURE(n);
                std::mt19937 random(static_cast<unsigned>(n));
                std::normal_distribution<float> normal;
                Guarded a(static_cast<size_t>(4 * n)), b(static_cast<size_t>(4 * n));
                double sum = 0, magnitude = 0;
                for (int64_t i = 0; i < n; ++i) {
                    a.floats()[i] = normal(random);
                    b.floats()[i] = normal(random);
                    sum += static_cast<double>(a.floats()[i]) * b.floats()[i];
                    magnitude += std::fabs(static_cast<double>(a.floats()[i]) * b.floats()[i]);
                }
                CHECK(std::fabs(set->dot_f32(a.floats(), b.floats(), n) - sum) <= 4e-6 * magnitude);

                std::vector<float> y(static_cast<size_t>(n) + 1, kSentinel);
                std::memcpy(y.data(), b.data(), b.size());
                set->axpy(0.3f, a.floats(), y.data(), n);
                CHECK(y.back() == kSentinel);
                for (int64_t i = 0; i < n; ++i) {
                    // one element alone gives the same bits
                    float alone = b.floats()[i];
                    set->axpy(0.3f, a.floats() + i, &alone, 1);
                    CHECK(same_bits(alone, y[static_cast<size_t>(i)]));
                    const double expected = 0.3f * static_cast<double>(a.floats()[i]) + b.floats()[i];
                    CHECK(std::fabs(alone - expected) <= 1e-6 * (1 + std::fabs(a.floats()[i])));
                }
            }
        }
    }

    TEST_CASE("dot: nothing to sum, nothing to do") {
        for (const DotKernels* set : available_dot_kernels()) {
            for (const Format f : kFormats) {
                Matrix m(f, 3, 0);
                Activations x(5, 0);
                for (const auto& row : run(*set, m, x.pointers(*set, f, 0), 0, 5))
                    for (const float y : row) CHECK(y == 0.0f);
                run(*set, m, x.natural.data(), 0, 0);
            }
        }
    }
}
