// Formats of matrices: what is read, bit for bit, and what is refused with which explanation.
#include "models/weight_format.h"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <functional>
#include <limits>

#include "weight_format_fixture.h"

using namespace quern;
using namespace quern::test;

namespace {

std::string linear_error(const SafetensorsWriter& w, int64_t rows = kRows, int64_t cols = kCols) {
    Fixture f(w);
    return model_error([&] { f.linear(rows, cols); });
}

std::string check_error(const SafetensorsWriter& w) {
    Fixture f(w);
    const WeightSegment s = f.linear();
    const WeightSegment* all[] = {&s};
    const ScaleCheck check = check_scales(f.checkpoint, all, 2);
    return check.problems.empty() ? "<no error>" : check.problems[0];
}

std::string with_entry(SafetensorsWriter w, const std::string& suffix,
                       const std::function<void(SafetensorsWriter::Entry&)>& change) {
    change(w.at(kModule + suffix));
    return linear_error(w);
}

/// The error when the tensor gets this dtype and shape, with `size` bytes an element.
std::string with_form(SafetensorsWriter w, const std::string& suffix, const char* dtype,
                      std::vector<int64_t> shape, size_t size = 1) {
    return with_entry(std::move(w), suffix, [&](SafetensorsWriter::Entry& e) {
        for (const int64_t d : shape) size *= static_cast<size_t>(d);
        e.data.assign(size, '\x38');
        e.dtype = dtype;
        e.shape = std::move(shape);
    });
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("weight format: NVFP4 of both producers gives the same weights") {
        Fixture a(ct(8400.0f)), b(modelopt(1.0f / 8400.0f));
        for (Fixture* f : {&a, &b}) {
            const WeightSegment s = f->linear();
            CHECK(s.dtype == DType::NVFP4);
            CHECK(s.scale_kind == ScaleKind::nvfp4);
            CHECK(s.name == kModule);
            CHECK(s.rows == kRows);
            CHECK(s.cols == kCols);
            CHECK(s.global_scale == 1.0f / 8400.0f);
            CHECK(static_cast<const uint8_t*>(s.data)[5] == 0x21);
            CHECK(static_cast<const uint8_t*>(s.scale)[5] == 0x38);
            CHECK(f->use.audit().ok());
            CHECK(f->use.audit().used.tensors == 3);
        }
        CHECK(check_error(ct()) == "<no error>");
    }

    TEST_CASE("weight format: the worked example of the format") {
        SafetensorsWriter w;  // scale 0x70 = 128; bytes 0x21 0x7f = 0.5, 1, -6, 6; G = 2688 / 0.32
        w.add("lm_head.weight_packed", "U8", {1, 8}, raw_bytes<uint8_t>({0x21, 0x7f, 0, 0, 0, 0, 0, 0}));
        w.add("lm_head.weight_scale", "F8_E4M3", {1, 1}, raw_bytes<uint8_t>({0x70}));
        w.add("lm_head.weight_global_scale", "F32", {1}, f32_bytes(8400));
        Fixture f(w);
        const Weight weight("w", {f.linear(1, 16)});
        float row[16];
        dequantize_row(weight, 0, row);
        CHECK(row[0] == doctest::Approx(0.0076190).epsilon(1e-5));
        CHECK(row[1] == doctest::Approx(0.0152381).epsilon(1e-5));
        CHECK(row[2] == doctest::Approx(-0.0914286).epsilon(1e-5));
        CHECK(row[3] == doctest::Approx(0.0914286).epsilon(1e-5));
        CHECK(row[4] == 0.0f);
    }

    TEST_CASE("weight format: FP8 and its three kinds of scales, plain weights") {
        const std::tuple<std::vector<int64_t>, const char*, ScaleKind> cases[] = {
            {{}, ".weight_scale", ScaleKind::per_tensor},
            {{1}, ".weight_scale", ScaleKind::per_tensor},
            {{1, 1}, ".weight_scale", ScaleKind::per_tensor},
            {{kRows}, ".weight_scale", ScaleKind::per_row},
            {{kRows, 1}, ".weight_scale", ScaleKind::per_row},
            {{2, 2}, ".weight_scale", ScaleKind::block128},
            {{2, 2}, ".weight_scale_inv", ScaleKind::block128},
        };
        for (const auto& [shape, suffix, kind] : cases) {
            Fixture f(fp8(shape, 0.25f, suffix));
            const WeightSegment s = f.linear();
            CHECK(s.scale_kind == kind);
            CHECK(s.dtype == DType::F8_E4M3);
            if (kind == ScaleKind::per_tensor)
                CHECK(s.global_scale == 0.25f);
            else
                CHECK(static_cast<const float*>(s.scale)[1] == 0.25f);
            CHECK(f.use.audit().ok());
        }
        SafetensorsWriter w = fp8({2, 2});
        w.at(kModule + ".weight_scale") = {
            kModule + ".weight_scale", "BF16", {2, 2}, raw_bytes<uint16_t>({0x3f80, 0x3f00, 0x3e80, 0x4000})};
        Fixture f(w);
        const auto* scale = static_cast<const float*>(f.linear().scale);
        CHECK(scale[0] == 1.0f);
        CHECK(scale[1] == 0.5f);
        CHECK(scale[2] == 0.25f);
        CHECK(scale[3] == 2.0f);
        for (const auto& [name, dtype, size] :
             {std::tuple{"BF16", DType::BF16, 2}, {"F16", DType::F16, 2}, {"F32", DType::F32, 4}}) {
            Fixture plain(SafetensorsWriter().fill(kModule + ".weight", name, {kRows, kCols},
                                                   static_cast<size_t>(kRows * kCols * size)));
            const WeightSegment s = plain.linear();
            CHECK(s.dtype == dtype);
            CHECK(s.scale_kind == ScaleKind::none);
            CHECK(s.global_scale == 1.0f);
        }
        // 200 rows of 130 columns: the blocks at the edge are smaller.
        SafetensorsWriter ragged;
        ragged.fill(kModule + ".weight", "F8_E4M3", {200, 130}, 200 * 130, 0x38);
        ragged.add(kModule + ".weight_scale", "F32", {2, 2}, floats(4, 0.5f));
        CHECK(linear_error(ragged, 200, 130) == "<no error>");
    }

    TEST_CASE("weight format: headers mode reads no values") {
        TempDir dir;
        dir.write("config.json", "{}");
        dir.write("model.safetensors", ct(-1).bf16("model.norm.weight", {4}, 0x7f80).bytes());
        const Checkpoint c = Checkpoint::open(dir.str());
        TensorUse use(c, ReadMode::headers);
        CHECK(read_linear(c, kModule, kRows, kCols, use).global_scale == 1.0f);
        CHECK(read_floats(c, "model.language_model.norm.weight", {4}, use).data == nullptr);
        CHECK(use.audit().ok());
    }

    TEST_CASE("weight format: missing and surplus tensors") {
        CHECK(contains(linear_error(SafetensorsWriter().bf16("norm.weight", {4})),
                       "expected a matrix [256, 256], found none"));
        CHECK(contains(linear_error(SafetensorsWriter().bf16("lm_head.qweight", {4})), "GPTQ"));
        CHECK(contains(linear_error(SafetensorsWriter().bf16("lm_head.scales", {4})), "MLX"));
        CHECK(contains(linear_error(ct().remove("lm_head.weight_packed")), "its weight_scale is there"));
        CHECK(contains(linear_error(ct().remove("lm_head.weight_scale")),
                       "tensor 'lm_head.weight_scale': expected beside weight_packed"));
        CHECK(contains(linear_error(ct().remove("lm_head.weight_global_scale")),
                       "'lm_head.weight_global_scale': expected"));
        CHECK(contains(linear_error(modelopt().remove("lm_head.weight_scale_2")),
                       "'lm_head.weight_scale_2': expected"));
        CHECK(contains(linear_error(fp8({}).remove("lm_head.weight_scale")),
                       "expected beside an F8_E4M3 weight"));
        CHECK(contains(linear_error(ct().bf16("lm_head.weight", {kRows, kCols})),
                       "expected one of weight and weight_packed, found both"));
        CHECK(contains(linear_error(ct().add("lm_head.weight_scale_2", "F32", {}, f32_bytes(1))),
                       "two exports mixed"));
        CHECK(contains(linear_error(modelopt().add("lm_head.weight_global_scale", "F32", {1}, f32_bytes(1))),
                       "two exports mixed"));
        CHECK(contains(linear_error(fp8({}).add("lm_head.weight_scale_2", "F32", {}, f32_bytes(1))),
                       "two exports mixed"));
        CHECK(contains(linear_error(fp8({}).add("lm_head.weight_scale_inv", "F32", {}, f32_bytes(1))),
                       "tensor 'lm_head.weight_scale_inv': expected no such scale"));
        for (const char* suffix :
             {".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale"}) {
            SafetensorsWriter w;
            w.bf16("lm_head.weight", {kRows, kCols}).add(kModule + suffix, "F32", {1}, f32_bytes(1));
            CHECK(contains(linear_error(w), "model.safetensors: tensor 'lm_head" + std::string(suffix) +
                                                "': a scale beside a BF16 weight"));
        }
    }

    TEST_CASE("weight format: codes of the wrong dtype or shape") {
        const auto codes = [](const char* dtype, std::vector<int64_t> shape, size_t size = 1) {
            return with_form(ct(), ".weight_packed", dtype, std::move(shape), size);
        };
        CHECK(contains(codes("I8", {kRows, kCols / 2}), "signed bytes"));
        CHECK(contains(codes("I32", {kRows, kCols / 8}, 4), "INT4 pack-quantized"));
        CHECK(contains(codes("F8_E4M3", {kRows, kCols / 2}), "not packed FP4 codes"));
        CHECK(contains(codes("U8", {kRows, kCols}), "it was not packed"));
        CHECK(contains(codes("U8", {kRows + 1, kCols / 2}),
                       "expected [256, 128] U8 (two codes a byte), found [257, 128] U8"));
        CHECK(contains(codes("U8", {2, kRows, kCols / 2}), "several matrices stacked"));
        CHECK(contains(with_form(modelopt(), ".weight", "I8", {kRows, kCols / 2}), "signed bytes"));
        SafetensorsWriter wide;
        wide.nvfp4_ct(kModule, 32, 64);
        CHECK(contains(linear_error(wide, 32, 128), "expected [32, 64] U8"));
        CHECK(contains(linear_error(wide, 64, 64), "expected [64, 32] U8"));
        SafetensorsWriter odd;
        odd.fill("lm_head.weight_packed", "U8", {4, 12}, 48);
        CHECK(contains(linear_error(odd, 4, 24), "multiple of 16 columns"));
        SafetensorsWriter turned;
        turned.fill("lm_head.weight_packed", "U8", {32, 128}, 4096);
        CHECK(contains(linear_error(turned, 128, 64), "transposed"));
    }

    TEST_CASE("weight format: block scales of the wrong dtype or shape") {
        const auto scale = [](const char* dtype, std::vector<int64_t> shape, size_t size = 1) {
            return with_form(ct(), ".weight_scale", dtype, std::move(shape), size);
        };
        CHECK(contains(scale("F32", {kRows, 16}, 4), "the scales were decoded"));
        CHECK(contains(scale("F16", {kRows, 16}, 2), "the scales were decoded"));
        CHECK(contains(scale("BF16", {kRows, 16}, 2), "the scales were decoded"));
        CHECK(contains(scale("U8", {kRows, 16}), "lost their dtype"));
        CHECK(contains(scale("F8_E4M3", {kRows, 8}), "this is MXFP4"));
        CHECK(contains(scale("U8", {kRows, 8}), "this is MXFP4"));
        CHECK(contains(scale("F8_E4M3", {16, kRows}), "transposed"));
        CHECK(contains(scale("F8_E4M3", {kRows * 16}), "swizzled"));
        CHECK(contains(scale("F8_E4M3", {2, 4, 32, 4, 4}), "swizzled"));
        CHECK(contains(scale("F8_E4M3", {kRows, 17}), "expected [256, 16] F8_E4M3"));
        SafetensorsWriter padded;
        padded.nvfp4_ct(kModule, 48, 32);
        auto& e = padded.at("lm_head.weight_scale");
        e.shape = {128, 4};
        e.data.assign(512, '\x38');
        CHECK(contains(linear_error(padded, 48, 32), "padded"));
    }

    TEST_CASE("weight format: the global scale") {
        const auto g = [](float value) { return linear_error(ct(value)); };
        const auto s2 = [](float value) { return linear_error(modelopt(value)); };
        for (const float bad : {0.0f, -2688.0f, std::nanf(""), HUGE_VALF, -HUGE_VALF, 1e-40f}) {
            CAPTURE(bad);
            CHECK(contains(g(bad), "expected a positive number"));
            CHECK(contains(s2(bad), "expected a positive number"));
        }
        CHECK(g(8400.0f) == "<no error>");
        CHECK(g(3.0f) == "<no error>");                // amax 896
        CHECK(g(2.6e6f) == "<no error>");              // amax 0.00103
        CHECK(contains(g(2.0f), "expected between"));  // amax 1344
        CHECK(contains(g(1.0f / 8400), "looks inverted"));
        CHECK(contains(s2(8400.0f), "looks inverted"));
        CHECK(contains(s2(8400.0f), "multiplier (ModelOpt)"));
        CHECK(contains(g(1e20f), "damaged"));
        CHECK(contains(with_form(ct(), ".weight_global_scale", "F32", {2}, 4),
                       "expected one value in F32, BF16 or F16, found [2] F32"));
        CHECK(contains(with_form(ct(), ".weight_global_scale", "F32", {1, 1}, 4), "expected one value"));
        CHECK(contains(with_form(ct(), ".weight_global_scale", "F8_E4M3", {1}, 1), "expected one value"));
        CHECK(contains(with_form(modelopt(), ".weight_scale_2", "F32", {0}, 4), "expected one value"));
        // 2688 is 0x4528 in BF16 and 0x6940 in F16.
        for (const auto& [dtype, bits] : {std::pair("BF16", 0x4528), std::pair("F16", 0x6940)}) {
            SafetensorsWriter w = ct();
            w.at(kModule + ".weight_global_scale").dtype = dtype;
            w.at(kModule + ".weight_global_scale").data = raw_bytes({static_cast<uint16_t>(bits)});
            CHECK(Fixture(w).linear().global_scale == 1 / 2688.0f);
        }
        // Exactly 1 is what an expert without any weights gets.
        CHECK(contains(g(1.0f), "never calibrated"));
        const auto zero = [](float value, char codes) {
            return linear_error(SafetensorsWriter().nvfp4_ct(kModule, kRows, kCols, value, codes));
        };
        CHECK(zero(1.0f, 0) == "<no error>");
        CHECK(zero(1.0f, static_cast<char>(0x88)) == "<no error>");  // -0
        CHECK(contains(zero(1.0f, 0x10), "never calibrated"));
        CHECK(contains(zero(2.0f, 0), "expected between"));
    }

    TEST_CASE("weight format: FP8 scales") {
        CHECK(
            contains(linear_error(fp8({4, 4})), "expected one scale, [256, 1] or [2, 2], found [4, 4] F32"));
        CHECK(contains(linear_error(fp8({1, kCols})), "one scale a column"));
        CHECK(contains(linear_error(fp8({4})), "it was reshaped"));
        CHECK(contains(linear_error(fp8({3})), "fused projection"));
        SafetensorsWriter tall;
        tall.fill(kModule + ".weight", "F8_E4M3", {384, 128}, 384 * 128, 0x38);
        tall.add(kModule + ".weight_scale", "F32", {1, 3}, floats(3, 1));
        CHECK(contains(linear_error(tall, 384, 128), "transposed"));
        CHECK(contains(with_form(fp8({}), ".weight_scale", "I8", {}), "scales are floats"));
        for (const char* dtype : {"U8", "F8_E8M0"})
            CHECK(contains(with_form(fp8({}), ".weight_scale", dtype, {kRows, kCols / 32}), "this is MXFP8"));
        SafetensorsWriter half = fp8({kRows, 1});
        half.at(kModule + ".weight_scale").dtype = "F16";
        half.at(kModule + ".weight_scale").data.clear();
        for (int64_t i = 0; i < kRows; ++i)  // 1/64, 1/32, ... four sizes
            half.at(kModule + ".weight_scale").data +=
                raw_bytes({static_cast<uint16_t>(0x2400 + i % 4 * 0x400)});
        Fixture in_half(half);
        const WeightSegment scaled = in_half.linear();
        CHECK(scaled.scale_kind == ScaleKind::per_row);
        for (int64_t i = 0; i < kRows; ++i)
            CHECK(static_cast<const float*>(scaled.scale)[i] ==
                  std::ldexp(1.0f, static_cast<int>(i % 4) - 6));
        CHECK(contains(with_form(fp8({}), ".weight", "F8_E5M2", {kRows, kCols}), "E5M2 is no weight format"));
        CHECK(contains(with_form(fp8({}), ".weight", "F8_E4M3", {kRows, kCols + 1}),
                       "found [256, 257] F8_E4M3"));
        for (const auto& shape : {std::vector<int64_t>{}, {kRows}, {2, 2}}) {
            for (const float bad : {0.0f, -1.0f, std::nanf(""), HUGE_VALF, 1e-40f}) {
                CHECK(contains(linear_error(fp8(shape, bad)), "expected positive numbers"));
            }
            CHECK(contains(linear_error(fp8(shape, 1e4f)), "looks inverted"));
            CHECK(contains(linear_error(fp8(shape, 1e-7f)), "damaged"));
            CHECK(contains(linear_error(fp8(shape, 1e12f)), "damaged"));
        }
        // A scale of zero is fine where the values are zero, and only there.
        for (const size_t row : {size_t{0}, size_t{255}}) {
            SafetensorsWriter w = fp8({kRows});
            w.at(kModule + ".weight_scale").data.replace(row * 4, 4, 4, '\0');
            CHECK(contains(linear_error(w), fmt::format("found 0 at element {}", row)));
            w.at(kModule + ".weight").data.replace(row * kCols, kCols, kCols, '\0');
            CHECK(linear_error(w) == "<no error>");
        }
        SafetensorsWriter block = fp8({2, 2});
        block.at(kModule + ".weight_scale").data.replace(4, 4, 4, '\0');  // rows 0..127, columns 128..255
        CHECK(contains(linear_error(block), "found 0 at element 1"));
        for (size_t r = 0; r < 128; ++r)
            block.at(kModule + ".weight").data.replace(r * kCols + 128, 128, 128, '\x80');
        CHECK(linear_error(block) == "<no error>");
    }

    TEST_CASE("weight format: check_scales") {
        const auto scale_byte = [](size_t at, uint8_t value) {
            SafetensorsWriter w = ct();
            w.at("lm_head.weight_scale").data[at] = static_cast<char>(value);
            return check_error(w);
        };
        CHECK(scale_byte(0, 0x7e) == "<no error>");
        CHECK(scale_byte(0, 0) == "<no error>");  // one zero block is the writer's business
        CHECK(contains(scale_byte(17, 0x7f), "the scale of row 1, block 1 is NaN (0x7f)"));
        CHECK(contains(scale_byte(4095, 0xff), "the scale of row 255, block 15 is NaN (0xff)"));
        CHECK(contains(scale_byte(0, 0xb8), "is negative (0xb8)"));
        CHECK(contains(scale_byte(0, 0x80), "is negative (0x80)"));
        CHECK(contains(scale_byte(0, 0x7f), "model.safetensors: tensor 'lm_head.weight_scale'"));
        CHECK(contains(check_error(SafetensorsWriter().nvfp4_ct(kModule, kRows, kCols, 2688, 0x21, 0)),
                       "all 4096 scales are zero, but the codes are not"));
        CHECK(check_error(SafetensorsWriter().nvfp4_ct(kModule, kRows, kCols, 2688, 0, 0)) == "<no error>");
        SafetensorsWriter nan = fp8({});
        nan.at("lm_head.weight").data[77] = static_cast<char>(0xff);
        CHECK(contains(check_error(nan), "tensor 'lm_head.weight': 1 of 65536 values are NaN"));
        CHECK(check_error(fp8({})) == "<no error>");
    }

    TEST_CASE("weight format: check_scales looks at all parts of a large matrix") {
        const Fixture f(fp8({}));
        std::vector<uint8_t> values(3 << 20, 0x38);
        const WeightSegment s{.name = "large",
                              .dtype = DType::F8_E4M3,
                              .rows = 3 << 10,
                              .cols = 1 << 10,
                              .data = values.data(),
                              .scale_kind = ScaleKind::per_tensor};
        const WeightSegment* const list[] = {&s};
        CHECK(check_scales(f.checkpoint, list, 2).problems.empty());
        for (const size_t at : {size_t{0}, size_t{(1 << 20) - 1}, size_t{1 << 20}, values.size() - 1})
            values[at] = 0x7f;
        const ScaleCheck found = check_scales(f.checkpoint, list, 2);
        REQUIRE(found.problems.size() == 1);
        CHECK(contains(found.problems[0], "large.weight: 4 of 3145728 values are NaN"));
    }

    TEST_CASE("weight format: check_scales goes through many segments") {
        SafetensorsWriter w;
        for (int i = 0; i < 40; ++i) {
            w.nvfp4_ct(fmt::format("model.layers.{}.up", i), 4, 32, 2688, 0x21,
                       i % 10 == 9 ? '\x7f' : '\0' + (i % 2));
        }
        Fixture f(w);
        std::vector<WeightSegment> segments;
        for (int i = 0; i < 40; ++i) {
            segments.push_back(
                read_linear(f.checkpoint, fmt::format("model.language_model.layers.{}.up", i), 4, 32, f.use));
        }
        std::vector<const WeightSegment*> pointers;
        for (const WeightSegment& s : segments) pointers.push_back(&s);
        for (const int threads : {1, 3, 64}) {
            const ScaleCheck check = check_scales(f.checkpoint, pointers, threads);
            REQUIRE(check.problems.size() == 4 + 20);
            CHECK(contains(check.problems[0], "layers.0.up.weight_scale': all 8 scales are zero"));
            CHECK(check.zero_blocks == 20 * 8);
        }
        CHECK(check_scales(f.checkpoint, {}, 4).problems.empty());
    }

    TEST_CASE("weight format: MXFP4 is called by its name") {
        for (const char* dtype : {"U8", "F8_E8M0"}) {
            SafetensorsWriter w;  // as compressed-tensors writes it: no global scale
            w.fill(kModule + ".weight_packed", "U8", {kRows, kCols / 2}, kRows * kCols / 2, 0x21);
            w.fill(kModule + ".weight_scale", dtype, {kRows, kCols / 32}, kRows * kCols / 32, 0x7f);
            const std::string message = linear_error(w);
            CHECK(contains(message, "this is MXFP4, which quern does not read"));
            CHECK(contains(message, kModule + ".weight_scale"));
            CHECK_FALSE(contains(message, "weight_global_scale"));
        }
    }

    TEST_CASE("weight format: small tensors as floats") {
        SafetensorsWriter w;
        w.fill("odd", "U8", {1}, 1);  // moves the next ones to odd addresses
        w.bf16("model.norm.weight", {3}, 0xbfc0).add("f", "F32", {1, 2}, raw_bytes({1.25f, -3.0f}));
        w.add("h", "F16", {}, raw_bytes<uint16_t>({0x3e00}))
            .bf16("inf", {2}, 0x7f80)
            .bf16("nan", {2}, 0x7fc0);
        Fixture f(w);
        const Tensor t = read_floats(f.checkpoint, "model.language_model.norm.weight", {3}, f.use);
        CHECK(t.dtype == DType::F32);
        CHECK(t.as<float>()[2] == -1.5f);
        CHECK(read_floats(f.checkpoint, "f", {1, 2}, f.use).as<float>()[1] == -3.0f);
        CHECK(contains(model_error([&] { read_floats(f.checkpoint, "inf", {2}, f.use); }),
                       "element 0 of [2] BF16 is inf"));
        CHECK(contains(model_error([&] { read_floats(f.checkpoint, "nan", {2}, f.use); }), "damaged"));
        CHECK(contains(model_error([&] {
                           read_floats(f.checkpoint, "f", {2, 1}, f.use);
                       }),
                       "expected [2, 1], found [1, 2] F32"));
        CHECK(contains(model_error([&] { read_floats(f.checkpoint, "odd", {1}, f.use); }),
                       "expected BF16, F16 or F32"));
        CHECK(contains(model_error([&] { read_floats(f.checkpoint, "gone", {1}, f.use); }),
                       "'gone': expected [1], found none"));
        CHECK(f.use.take_floats().size() == 4);
    }
}
