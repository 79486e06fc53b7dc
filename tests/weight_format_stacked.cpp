// Matrices stacked in one tensor or module, and slices of matrices.
#include <doctest/doctest.h>

#include <cstring>
#include <functional>

#include "weight_format_fixture.h"

using namespace quern;
using namespace quern::test;

TEST_SUITE("cpu") {
    TEST_CASE("weight format: stacked experts and slices") {
        SafetensorsWriter w;
        std::string data;
        for (uint16_t i = 0; i < 3 * 4 * 2; ++i) data += raw_bytes({i});
        w.add("model.layers.0.mlp.experts.gate_up_proj", "BF16", {3, 4, 2}, data);
        Fixture f(w);
        const std::string name = "model.language_model.layers.0.mlp.experts.gate_up_proj";
        CHECK(contains(model_error([&] { read_stacked(f.checkpoint, name, 3, 2, 4, f.use); }),
                       "expected [3, 2, 4], found [3, 4, 2] BF16; its dimensions are in another order"));
        CHECK(contains(model_error([&] { read_stacked(f.checkpoint, name, 4, 4, 2, f.use); }),
                       "expected [4, 4, 2]"));
        CHECK(contains(model_error([&] { read_stacked(f.checkpoint, "x", 4, 4, 2, f.use); }), "found none"));
        SafetensorsWriter fp8;
        fp8.add("model.layers.0.mlp.experts.gate_up_proj", "F8_E4M3", {3, 4, 2}, std::string(24, '8'));
        Fixture quantized(fp8);
        CHECK(contains(model_error([&] { read_stacked(quantized.checkpoint, name, 3, 4, 2, quantized.use); }),
                       "gate_up_proj.weight_scale': expected beside an F8_E4M3 weight, found none"));
        const std::vector<WeightSegment> all = read_stacked(f.checkpoint, name, 3, 4, 2, f.use);
        REQUIRE(all.size() == 3);
        const auto first = [](const WeightSegment& s) {
            uint16_t bits;
            memcpy(&bits, s.data, sizeof bits);
            return bits;
        };
        CHECK(first(all[2]) == 16);
        CHECK(all[2].name == name + "[2]");
        const WeightSegment up = slice_rows(all[1], 2, 2, "up");
        CHECK(first(up) == 12);
        CHECK(up.rows == 2);
        CHECK(up.name == "up");
        CHECK_THROWS_AS(slice_rows(all[1], 3, 2, "x"), Error);
        CHECK_THROWS_AS(slice_rows(all[1], -1, 2, "x"), Error);
        CHECK(f.use.audit().ok());
    }

    TEST_CASE("weight format: NVFP4 matrices stacked in one module, with one global scale or several") {
        // Matrix e has codes 1 + e and block scales 1 + e/8: what is read must come from its own rows.
        constexpr int64_t kCount = 3, kEach = 8, kWide = 32;
        const std::string name = "model.language_model.layers.0.mlp.experts.gate_up_proj";
        const auto stack = [&](bool flat, bool modelopt, std::vector<float> globals) {
            std::string codes, scales, global;
            for (char e = 0; e < kCount; ++e) {
                codes.append(kEach * kWide / 2, static_cast<char>(0x11 * (1 + e)));
                scales.append(kEach * kWide / 16, static_cast<char>(0x38 + e));
            }
            for (const float g : globals) global += f32_bytes(g);
            const auto shape = [&](int64_t cols) {
                return flat ? std::vector{kCount * kEach, cols} : std::vector{kCount, kEach, cols};
            };
            SafetensorsWriter w;
            w.add(name + (modelopt ? ".weight" : ".weight_packed"), "U8", shape(kWide / 2), codes);
            w.add(name + ".weight_scale", "F8_E4M3", shape(kWide / 16), scales);
            return w.add(name + (modelopt ? ".weight_scale_2" : ".weight_global_scale"), "F32",
                         {static_cast<int64_t>(globals.size())}, global);
        };
        const auto read = [&](Fixture& f) {
            return read_stacked(f.checkpoint, name, kCount, kEach, kWide, f.use);
        };
        for (const bool flat : {true, false}) {
            for (const bool modelopt : {true, false}) {
                const float one = modelopt ? 1 / 4096.0f : 4096.0f;
                for (const bool many : {true, false}) {
                    Fixture f(
                        stack(flat, modelopt, many ? std::vector{one, one / 2, one * 2} : std::vector{one}));
                    CHECK(has_stacked(f.checkpoint, name));
                    const auto all = read(f);
                    REQUIRE(all.size() == kCount);
                    for (int e = 0; e < kCount; ++e) {
                        const float factor = !many || e == 0 ? 1.0f : (e == 1) == modelopt ? 0.5f : 2.0f;
                        const float code = std::array{0.5f, 1.0f, 1.5f}[static_cast<size_t>(e)];
                        float row[kWide];
                        dequantize_row(all[static_cast<size_t>(e)], kEach - 1, row);
                        for (const float v : row)
                            CHECK(v == code * (1 + static_cast<float>(e) / 8) * factor / 4096);
                    }
                    CHECK(f.use.audit().ok());
                }
            }
        }
        const auto error = [&](const SafetensorsWriter& w) {
            Fixture f(w);
            return model_error([&] { read(f); });
        };
        CHECK(contains(error(stack(true, false, {4096, 4096})), "expected one value, or 3, in F32"));
        CHECK(contains(error(stack(true, false, {4096, -1, 4096})), "expected a positive number, found -1"));
        CHECK(contains(error(stack(true, false, {4096, 1, 4096})), "never calibrated"));
        SafetensorsWriter empty = stack(true, false, {4096, 1, 4096});  // expert 1 has no weights
        empty.at(name + ".weight_packed")
            .data.replace(kEach * kWide / 2, kEach * kWide / 2, kEach * kWide / 2, 0);
        CHECK(error(empty) == "<no error>");
        SafetensorsWriter short_one = stack(true, false, {4096});
        short_one.at(name + ".weight_packed").shape = {kCount * kEach / 2, kWide};
        CHECK(contains(error(short_one), "expected [24, 16] U8"));
        SafetensorsWriter plain;
        plain.bf16(name + ".weight", {kCount, kEach, kWide});
        CHECK(error(plain) == "<no error>");
    }

    TEST_CASE("weight format: FP8 matrices stacked in one tensor, with scales of every kind") {
        // Values of matrix e, row r, column c and what their scale is are different for every place.
        constexpr int64_t kCount = 3, kEach = 160, kWide = 192, kDown = 2, kAcross = 2;
        const std::string name = "model.language_model.layers.0.mlp.experts.down_proj";
        const auto code = [](int64_t e, int64_t r, int64_t c) { return 0x30 + (e * 5 + r * 3 + c) % 16; };
        std::string values;
        for (int64_t e = 0; e < kCount; ++e)
            for (int64_t r = 0; r < kEach; ++r)
                for (int64_t c = 0; c < kWide; ++c) values += static_cast<char>(code(e, r, c));
        const auto read = [&](Fixture& f) {
            return read_stacked(f.checkpoint, name, kCount, kEach, kWide, f.use);
        };
        const auto stacked = [&](std::vector<int64_t> shape, bool bare, bool flat) {
            int64_t count = 1;
            for (const int64_t d : shape) count *= d;
            std::string scales;
            for (int64_t i = 0; i < count; ++i) scales += f32_bytes(0.01f + 0.001f * static_cast<float>(i));
            SafetensorsWriter w;
            w.add(name + (bare ? "" : ".weight"), "F8_E4M3",
                  flat ? std::vector{kCount * kEach, kWide} : std::vector{kCount, kEach, kWide}, values);
            return w.add(name + (bare ? "_scale_inv" : ".weight_scale"), "F32", std::move(shape), scales);
        };
        struct Case {
            std::vector<int64_t> shape;
            std::function<int64_t(int64_t e, int64_t r, int64_t c)> scale;  // its index
        };
        const auto one = [](int64_t, int64_t, int64_t) { return int64_t{0}; };
        const auto matrix = [](int64_t e, int64_t, int64_t) { return e; };
        const auto row = [](int64_t e, int64_t r, int64_t) { return e * kEach + r; };
        const auto block = [](int64_t e, int64_t r, int64_t c) {
            return (e * kDown + r / 128) * kAcross + c / 128;
        };
        for (const auto& [shape, scale] :
             {Case{{1}, one}, Case{{kCount}, matrix}, Case{{kCount, 1, 1}, matrix},
              Case{{kCount, kEach}, row}, Case{{kCount, kEach, 1}, row}, Case{{kCount * kEach, 1}, row},
              Case{{kCount, kDown, kAcross}, block}, Case{{kCount * kDown, kAcross}, block}}) {
            const std::string shown = shape_text(shape);
            CAPTURE(shown);
            for (const auto& [bare, flat] :
                 {std::pair{true, false}, std::pair{false, false}, std::pair{false, true}}) {
                Fixture f(stacked(shape, bare, flat));
                const std::vector<WeightSegment> all = read(f);
                REQUIRE(all.size() == kCount);
                int64_t wrong = 0;
                for (int64_t e = 0; e < kCount; ++e) {
                    for (int64_t r = 0; r < kEach; ++r) {
                        float found[kWide];
                        dequantize_row(Weight("x", {all[static_cast<size_t>(e)]}), r, found);
                        for (int64_t c = 0; c < kWide; ++c) {
                            const int64_t bits = code(e, r, c);  // exponent 6 or 7 of bias 7
                            const float value =
                                (bits < 0x38 ? 0.5f : 1.0f) * (1 + static_cast<float>(bits % 8) / 8);
                            wrong +=
                                found[c] != value * (0.01f + 0.001f * static_cast<float>(scale(e, r, c)));
                        }
                    }
                }
                CHECK(wrong == 0);
                CHECK(f.use.audit().ok());
            }
        }
        const auto error = [&](const SafetensorsWriter& w) {
            Fixture f(w);
            return model_error([&] { read(f); });
        };
        CHECK(contains(error(stacked({kCount, 2}, true, false)),
                       "of each of 3 matrices: expected one scale, [160, 1] or [2, 2], found [3, 2]"));
        SafetensorsWriter negative = stacked({kCount}, true, false);
        negative.at(name + "_scale_inv").data.replace(4, 4, f32_bytes(-1));
        CHECK(contains(error(negative), "matrix 1: expected positive numbers, found -1"));
        SafetensorsWriter narrow = stacked({kCount}, false, false);
        narrow.at(name + ".weight").shape = {kCount, kWide, kEach};
        CHECK(contains(error(narrow), "expected [480, 192], found [3, 192, 160]"));
    }

    TEST_CASE("weight format: slices keep their scales") {
        const auto slice = [](const SafetensorsWriter& w, int64_t begin) {
            Fixture f(w);
            const WeightSegment all = f.linear();
            const WeightSegment part = slice_rows(all, begin, 64, "part");
            std::vector<float> a(kCols), b(kCols);
            for (int64_t r = 0; r < 64; ++r) {
                dequantize_row(Weight("all", {all}), begin + r, a.data());
                dequantize_row(Weight("part", {part}), r, b.data());
                if (a != b) return false;
            }
            return true;
        };
        const auto vary = [](SafetensorsWriter w) {  // every byte of codes and values different, scales too
            for (auto& e : w.entries) {
                for (size_t i = 0; i < e.data.size() && e.data.size() > 100; ++i) {
                    if (e.dtype != "F32")
                        e.data[i] = static_cast<char>((i * 37 + i / 256) % 0x70);
                    else if (i % 4 == 2)
                        e.data[i] = static_cast<char>(i / 4 % 100);
                }
            }
            return w;
        };
        CHECK(slice(vary(ct()), 48));
        CHECK(slice(vary(fp8({kRows})), 48));
        SafetensorsWriter block = vary(fp8({2, 2}));
        block.at("lm_head.weight_scale").data = raw_bytes({0.5f, 0.25f, 1.0f, 2.0f});
        CHECK(slice(block, 128));
        CHECK_THROWS_AS(slice(block, 64), Error);
        CHECK(slice(vary(fp8({})), 7));
    }
}
