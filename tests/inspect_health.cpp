// quantize-inspect --health: a sound checkpoint has good grades, and each seeded fault in the weights is
// named.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>

#include "checkpoint_copy.h"
#include "ggml-like/nvfp4.h"
#include "tools/inspect/health.h"

using namespace quern;
using namespace quern::test;

namespace {

const std::string kDemo = QUERN_SOURCE_DIR "/models/demo";
const std::string kExpert = "model.language_model.layers.0.mlp.experts.5.";

struct Health {
    explicit Health(const std::string& path) : in(path, ReadMode::headers), report(measure_health(in, 2)) {}
    Inspection in;
    HealthReport report;

    /// Findings about the matrices of that name.
    std::string of(const std::string& module) const {
        std::string text;
        for (const MatrixHealth& m : report.matrices)
            if (m.segment->name == module)
                for (const Finding& f : m.findings)
                    text += std::string(1, letter(f.grade)) + " " + f.text + "\n";
        return text;
    }
};

/// A fault in a parity checkpoint.
std::unique_ptr<Health> after(const std::function<void(SafetensorsWriter&)>& change,
                              const std::string& name = "base/ct") {
    CheckpointCopy copy(name);
    change(copy.weights);
    copy.write();
    return std::make_unique<Health>(copy.dir.str());
}

/// NVFP4 of normally distributed values, as the reference quantizer writes it.
struct Matrix {
    static constexpr int64_t kRows = 64, kCols = 256;
    Matrix() : codes(kRows * kCols / 2), scales(kRows * kCols / 16) {
        std::mt19937 random(7);
        std::normal_distribution<float> normal;
        std::vector<float> values(kRows * kCols);
        for (float& v : values) v = normal(random);
        const float amax = std::abs(*std::max_element(
            values.begin(), values.end(), [](float a, float b) { return std::abs(a) < std::abs(b); }));
        for (size_t b = 0; b < scales.size(); ++b) {
            float largest = 0;
            for (size_t i = 0; i < 16; ++i) largest = std::max(largest, std::abs(values[16 * b + i]));
            scales[b] = nvfp4::float_to_e4m3(448 * largest / amax);
            const float scale = nvfp4::e4m3_to_float(scales[b]) * amax / 2688;
            for (size_t i = 0; i < 16; ++i) {
                const auto code = nvfp4::float_to_e2m1(values[16 * b + i] / scale);
                codes[8 * b + i / 2] =
                    static_cast<uint8_t>(codes[8 * b + i / 2] | (i % 2 ? code << 4 : code));
            }
        }
    }
    SegmentStats measure() const {
        WeightSegment s;
        s.dtype = DType::NVFP4;
        s.scale_kind = ScaleKind::nvfp4;
        s.rows = kRows;
        s.cols = kCols;
        s.data = codes.data();
        s.scale = scales.data();
        return measure_segment(s);
    }
    std::vector<uint8_t> codes, scales;
};

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("health: the demo and the parity checkpoints are sound") {
        const Health demo(kDemo);
        CHECK(demo.report.clean());
        CHECK(demo.report.worst(10).empty());
        CHECK(demo.report.dead + demo.report.duplicates == 0);
        for (int64_t l = -1; l < demo.report.layers; ++l) CHECK(letter(demo.report.grade(l)) == 'A');
        for (const char* name :
             {"base/ct", "base/modelopt", "base/bf16", "mixed/modelopt_mixed", "real_heads/fp8_block",
              "odd_pattern/modelopt_xs", "tied_text/ct", "dense/ct_mixed"}) {
            CAPTURE(name);
            const Health health(QUERN_SOURCE_DIR "/tests/vectors/parity/" + std::string(name));
            CHECK(health.report.clean());
            for (const size_t i : health.report.worst(1))
                CHECK(health.report.matrices[i].grade() <= Grade::b);
        }
    }

    TEST_CASE("health: what is counted of a matrix") {
        const Matrix sound;
        const SegmentStats s = sound.measure();
        CHECK(s.blocks == 1024);
        CHECK(s.saturated >= 1);  // the block of the largest value
        CHECK(s.zero_scales + s.bad_scales + s.erased + s.unfilled + s.outliers == 0);
        CHECK(std::count_if(s.codes.begin(), s.codes.end(), [](int64_t n) { return n == 0; }) == 0);
        CHECK(s.code_distance() < 0.03);
        CHECK(s.sign_bias() < 0.05);
        Matrix other = sound;
        CHECK(other.measure().hash == s.hash);
        other.codes[1000] ^= 1;
        CHECK(other.measure().hash != s.hash);
        other.scales[3] = 0x7f;
        other.scales[4] = 0x80;
        other.scales[5] = 0;
        other.scales[6] = 3;
        const SegmentStats bad = other.measure();
        CHECK(bad.bad_scales == 2);
        CHECK(bad.zero_scales == 1);
        CHECK(bad.erased == 1);
        CHECK(bad.subnormal == 1);
    }

    TEST_CASE("health: permuted nibbles and codes shifted against their blocks show in the use of codes") {
        Matrix rotated;  // the sign bit at the wrong end
        for (uint8_t& byte : rotated.codes)
            byte = static_cast<uint8_t>(((byte << 1) & 0xee) | ((byte >> 3) & 0x11));
        CHECK(rotated.measure().sign_bias() > 0.05);
        Matrix shifted;  // half a block
        std::rotate(shifted.codes.begin(), shifted.codes.begin() + 4, shifted.codes.end());
        const SegmentStats s = shifted.measure();
        CHECK(static_cast<double>(s.unfilled) > 0.001 * static_cast<double>(s.blocks));
        // A shift by whole blocks leaves no trace in the file.
        Matrix whole;
        std::rotate(whole.scales.begin(), whole.scales.begin() + 1, whole.scales.end());
        CHECK(whole.measure().unfilled == 0);
    }

    TEST_CASE("health: seeded faults") {
        const std::string up = kExpert + "up_proj";
        const auto inverted = after([&](SafetensorsWriter& w) {
            float g;
            std::string& data = w.at(up + ".weight_global_scale").data;
            std::memcpy(&g, data.data(), sizeof g);
            data = f32_bytes(1 / g);
        });
        CHECK(contains(inverted->of(up), "it looks inverted"));
        CHECK(!inverted->report.clean());
        const auto scales = [&](const std::function<void(std::string&)>& change) {
            return after([&](SafetensorsWriter& w) { change(w.at(up + ".weight_scale").data); })->of(up);
        };
        CHECK(
            contains(scales([](std::string& s) { s[3] = '\x7f'; }), "F 1 block scales are NaN or negative"));
        CHECK(
            contains(scales([](std::string& s) { s[3] = 0; }), "a zero scale over codes that are not zero"));
        CHECK(contains(scales([](std::string& s) { s.assign(s.size(), '\0'); }), "F 100.00 % of the blocks"));
        CHECK(contains(scales([](std::string& s) {
                           for (char& c : s) c = static_cast<char>(c - 0x30);  // exponents too small by 6
                       }),
                       "the range of the scales is not used"));
        CHECK(contains(scales([](std::string& s) { std::fill(s.begin(), s.begin() + 8, '\x02'); }),
                       "subnormal"));
        CHECK(contains(after([](SafetensorsWriter& w) {
                           w.at("lm_head.weight").data.replace(2, 2, "\xc0\x7f");
                       })->of("lm_head"),
                       "F 1 values are NaN or Inf"));
    }

    TEST_CASE("health: dead and duplicate experts, fused projections with two scales") {
        const auto copied = after([](SafetensorsWriter& w) {
            for (const char* suffix : {".weight_packed", ".weight_scale"})
                w.at(kExpert + "down_proj" + suffix).data =
                    w.at("model.language_model.layers.2.mlp.experts.1.down_proj" + std::string(suffix)).data;
        });
        CHECK(copied->report.duplicates == 1);
        const auto dead = after([](SafetensorsWriter& w) {
            std::string& codes = w.at(kExpert + "down_proj.weight_packed").data;
            codes.assign(codes.size(), '\0');
        });
        CHECK(dead->report.dead == 1);
        CHECK(contains(dead->of(kExpert + "down_proj"), "dead"));
        const auto apart = after([](SafetensorsWriter& w) {
            w.at(kExpert + "up_proj.weight_global_scale").data = f32_bytes(4321);
        });
        CHECK(contains(apart->of(kExpert + "up_proj"), "engines that fuse them take one"));

        const std::string delta = "model.language_model.layers.0.linear_attn.in_proj_";
        const auto of_z = [&](float scale) {
            const auto health = after(
                [&](SafetensorsWriter& w) {
                    w.at(delta + "qkv.weight_scale_2").data = f32_bytes(0.25f);
                    w.at(delta + "z.weight_scale_2").data = f32_bytes(scale);
                },
                "dense/modelopt_xs");
            return health->of(delta + "z");
        };
        CHECK(contains(of_z(0.5f), "of in_proj_qkv 0.25: engines that fuse them take one"));
        CHECK(!contains(of_z(0.25f), "engines that fuse them"));
    }

    TEST_CASE("health: reports and exit codes") {
        const Health demo(kDemo);
        CHECK(contains(describe(demo.report), "health: 464 A"));
        CHECK(to_json(demo.report)["tensors"].size() == 464);
        const std::string page = to_html(demo.report, "a<b");
        CHECK(contains(page, "a&#60;b"));
        CHECK(!contains(page, "http"));  // needs nothing else
        TempDir dir;
        CHECK(inspect_exit_code("--health --html " + (dir / "page.html")) == 0);
        CHECK(std::filesystem::file_size(dir / "page.html") > 1000);
        CHECK(inspect_exit_code("--health --plan") == 2);
        CheckpointCopy copy("base/ct");
        copy.weights.at(kExpert + "up_proj.weight_scale").data[0] = '\x7f';
        copy.write();
        CHECK(inspect_exit_code("--health " + copy.dir.str()) == 3);
    }
}
