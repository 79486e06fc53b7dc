// quantize-inspect --against.
#include "write_harness.h"

using namespace quern;
using namespace quern::test;

TEST_SUITE("cpu") {
    TEST_CASE("against: what no single file shows") {
        const std::string expert = "model.language_model.layers.0.mlp.experts.1.";
        const auto verdict = [&](const std::function<void(SafetensorsWriter&)>& change) {
            CheckpointCopy copy("base/ct");
            change(copy.weights);
            copy.write();
            const Comparison c = against(copy.dir.str(), parity("base/bf16"));
            std::string text;
            for (const ModuleComparison& m : c.modules)
                if (!m.problem.empty()) text += m.name + "\n";
            for (const std::string& p : c.problems) text += p + "\n";
            return text;
        };
        CHECK(verdict([](SafetensorsWriter&) {}) == "");
        CHECK(verdict([&](SafetensorsWriter& w) {
                  for (const char* part : {"weight_packed", "weight_scale", "weight_global_scale"})
                      std::swap(w.at(expert + "gate_proj." + part).data,
                                w.at(expert + "up_proj." + part).data);
              }) == expert + "gate_proj\n" + expert + "up_proj\n");
        CHECK(contains(verdict([&](SafetensorsWriter& w) {
                           std::string& s = w.at(expert + "up_proj.weight_scale").data;
                           std::rotate(s.begin(), s.begin() + 1, s.end());
                       }),
                       expert + "up_proj\n"));
        CHECK(contains(verdict([&](SafetensorsWriter& w) {
                           for (char& byte : w.at(expert + "up_proj.weight_packed").data)
                               byte = static_cast<char>(byte << 4 | (byte >> 4 & 15));
                       }),
                       expert + "up_proj\n"));
        CHECK(contains(
            verdict([](SafetensorsWriter& w) { w.at("model.language_model.norm.weight").data[1] ^= 1; }),
            "model.language_model.norm.weight: relative error"));
        CHECK(contains(verdict([](SafetensorsWriter& w) { w.remove("lm_head.weight"); }), "lm_head: not in"));
    }

    TEST_CASE("against: the numbers are those of the definition") {
        const TempDir a, b;
        const nlohmann::json config = test::read_json(parity("base/bf16/config.json"));
        for (const TempDir* d : {&a, &b}) d->write("config.json", config.dump());
        std::string x, y;
        double error = 0, sum = 0, product = 0, other = 0;
        for (int i = 0; i < 64; ++i) {
            const float u = bf16_to_float(float_to_bf16(std::sin(static_cast<float>(i)))),
                        v = bf16_to_float(float_to_bf16(u * 1.002f + (i == 40)));
            x += test::raw_bytes({float_to_bf16(v)});
            y += test::raw_bytes({float_to_bf16(u)});
            error += std::pow(static_cast<double>(v - u), 2);
            sum += std::pow(static_cast<double>(u), 2);
            other += std::pow(static_cast<double>(v), 2);
            product += static_cast<double>(u) * static_cast<double>(v);
        }
        a.write("model.safetensors", SafetensorsWriter().add("lm_head.weight", "BF16", {2, 32}, x).bytes());
        b.write("model.safetensors", SafetensorsWriter().add("lm_head.weight", "BF16", {2, 32}, y).bytes());
        const Comparison c = against(a.str(), b.str());
        REQUIRE(c.modules.size() == 1);
        const MatrixError& e = c.modules[0].error;
        CHECK(e.relative_rms() == doctest::Approx(std::sqrt(error / sum)));
        CHECK(e.snr_db() == doctest::Approx(10 * std::log10(sum / error)));
        CHECK(e.cosine() == doctest::Approx(product / std::sqrt(sum * other)));
        CHECK(e.largest == doctest::Approx(1).epsilon(0.02));
        CHECK(c.modules[0].worst.at(0).row == 1);
        CHECK(c.modules[0].worst.at(0).block == 0);
        CHECK(!c.clean());
    }
}
