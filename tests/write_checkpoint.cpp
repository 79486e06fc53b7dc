// quantize-inspect --write: what is written, and that it is read as it was meant.
#include "write_harness.h"

using namespace quern;
using namespace quern::test;

TEST_SUITE("cpu") {
    TEST_CASE(
        "write: every recipe and format from fused and single experts reads as the model it was made of") {
        for (const std::string name : {"base/bf16", "mixed/bf16", "real_heads/bf16", "vision_mtp/bf16",
                                       "tied_text/bf16", "dead_expert/f16", "odd_pattern/bf16"}) {
            for (const std::string recipe : {"aeon", "xs", "fp8-head"}) {
                for (const CheckpointFormat format :
                     {CheckpointFormat::compressed_tensors, CheckpointFormat::modelopt}) {
                    CAPTURE(name);
                    CAPTURE(recipe);
                    CAPTURE(std::string(format_name(format)));
                    const TempDir dir;
                    const std::string out = dir / "out";
                    const WriteReport report = write(
                        parity(name), {.directory = out, .recipe = recipe, .format = format, .threads = 2});
                    CHECK(report.quantized > 10);
                    CHECK(!fs::exists(out + ".partial"));
                    const Inspection in(out, ReadMode::values);
                    CHECK(in.failure == "");
                    CHECK(in.audit.problems == std::vector<std::string>());
                    for (const std::string& note : in.audit.notes)
                        CHECK_MESSAGE(!contains(note, "config: "), note);
                    const Comparison c = against(out, parity(name));
                    CHECK_MESSAGE(c.clean(), describe(c, 3));
                    bool fp8 = false;
                    for (const ModuleComparison& m : c.modules) {
                        const bool nvfp4 = m.role == ModuleRole::attention || m.role == ModuleRole::experts ||
                                           m.role == ModuleRole::shared_expert ||
                                           (recipe == "xs" && (m.role == ModuleRole::delta ||
                                                               m.role == ModuleRole::delta_gates));
                        CAPTURE(m.name);
                        fp8 |= m.format.starts_with("FP8") && m.role == ModuleRole::head;
                        if (nvfp4)
                            CHECK(m.format == "NVFP4");
                        else if (!m.format.starts_with("FP8"))
                            CHECK(m.error.different == 0);
                    }
                    CHECK(fp8 == (recipe == "fp8-head" && !in.config.tied_head));
                }
            }
        }
    }

    TEST_CASE("write: global scales are shared by what other engines fuse, and nothing else") {
        const TempDir dir;
        write(parity("base/bf16"), {.directory = dir / "out", .recipe = "xs"});
        const Checkpoint c = Checkpoint::open(dir / "out");
        const auto scale = [&](const std::string& module) {
            const uint32_t at = c.find("model.language_model.layers." + module + ".weight_global_scale");
            REQUIRE(at != Checkpoint::kNone);
            float value;
            std::memcpy(&value, c.tensors()[at].tensor->data, sizeof value);
            return value;
        };
        CHECK(scale("3.self_attn.q_proj") == scale("3.self_attn.k_proj"));
        CHECK(scale("3.self_attn.q_proj") == scale("3.self_attn.v_proj"));
        CHECK(scale("3.self_attn.q_proj") != scale("3.self_attn.o_proj"));
        CHECK(scale("0.linear_attn.in_proj_qkv") == scale("0.linear_attn.in_proj_z"));
        CHECK(scale("0.linear_attn.in_proj_qkv") != scale("0.linear_attn.out_proj"));
        CHECK(scale("0.linear_attn.in_proj_qkv") != scale("0.linear_attn.in_proj_a"));
        CHECK(scale("0.linear_attn.in_proj_a") == scale("0.linear_attn.in_proj_b"));
        CHECK(scale("0.mlp.experts.2.gate_proj") == scale("0.mlp.experts.2.up_proj"));
        CHECK(scale("0.mlp.experts.2.gate_proj") != scale("0.mlp.experts.3.gate_proj"));
        CHECK(scale("0.mlp.shared_expert.gate_proj") == scale("0.mlp.shared_expert.up_proj"));
    }

    TEST_CASE("write: amax gives what the reference quantizers wrote of the same weights") {
        // scripts/quant_formats.py, in numpy. Where it multiplies by G and divides by the block scale,
        // compressed-tensors divides by their quotient, as we do: BF16 weights lie on ties of the codes, and
        // some fall to the other side.
        const TempDir dir;
        const std::string recipe =
            dir.write("amax.json", R"({"scales": "amax", "roles": {"attention": "nvfp4",
            "experts": "nvfp4", "shared_expert": "nvfp4"}})");
        write(
            parity("base/bf16"),
            {.directory = dir / "mo", .recipe = recipe, .format = CheckpointFormat::modelopt, .threads = 2});
        for (const ModuleComparison& m : against(dir / "mo", parity("base/modelopt")).modules)
            CHECK_MESSAGE(m.error.different == 0, m.name);
        write(parity("base/bf16"), {.directory = dir / "ct", .recipe = recipe, .threads = 2});
        for (const ModuleComparison& m : against(dir / "ct", parity("base/ct")).modules)
            CHECK_MESSAGE(static_cast<double>(m.error.different) < 0.01 * static_cast<double>(m.error.values),
                          m.name);
        const std::string blocks = dir.write("blocks.json", R"({"roles": {"head": "fp8-block"}})");
        write(parity("real_heads/bf16"), {.directory = dir / "head", .recipe = blocks, .threads = 2});
        CHECK(of(against(dir / "head", parity("real_heads/ct_fp8_head")), "lm_head").error.different == 0);
    }

    TEST_CASE("write: a recipe file decides by role, then by expression") {
        const TempDir dir;
        const std::string recipe = dir.write("recipe.json", R"({
            "roles": {"experts": "nvfp4", "delta": "fp8", "attention": "fp8-tensor"},
            "overrides": [{"match": "layers\\.0\\..*experts", "format": "fp8"},
                          {"match": "layers\\.1\\.linear_attn", "format": "keep"}],
            "scales": "amax"})");
        write(parity("base/bf16"), {.directory = dir / "out", .recipe = recipe, .threads = 2});
        const Comparison c = against(dir / "out", parity("base/bf16"));
        CHECK(c.clean());
        const std::string layer = "model.language_model.layers.";
        CHECK(of(c, layer + "0.mlp.experts.1.up_proj").format == "FP8 per channel");
        CHECK(of(c, layer + "1.mlp.experts.1.up_proj").format == "NVFP4");
        CHECK(of(c, layer + "0.linear_attn.in_proj_z").format == "FP8 per channel");
        CHECK(of(c, layer + "1.linear_attn.in_proj_z").format == "BF16");
        CHECK(of(c, layer + "3.self_attn.q_proj").format == "FP8 per tensor");
        CHECK(of(c, layer + "0.mlp.shared_expert.up_proj").format == "BF16");
        const Inspection in(dir / "out", ReadMode::values);
        CHECK(in.clean());
        for (const std::string& note : in.audit.notes) CHECK_MESSAGE(!contains(note, "config: "), note);
    }

    TEST_CASE("write: wrong recipes say what is wrong") {
        const TempDir dir;
        const auto error = [&](const std::string& text) {
            const std::string path = dir.write("recipe.json", text);
            return usage_error(
                [&] { write(parity("base/bf16"), {.directory = dir / "out", .recipe = path}); });
        };
        CHECK(contains(error("{"), "no JSON"));
        CHECK(contains(error(R"({"role": {}})"), "unknown key 'role'"));
        CHECK(contains(error(R"({"roles": {"expert": "nvfp4"}})"), "no role 'expert'"));
        CHECK(contains(error(R"({"roles": {"experts": "int4"}})"), "found 'int4'"));
        CHECK(
            contains(error(R"({"overrides": [{"match": "(", "format": "keep"}]})"), "no regular expression"));
        CHECK(contains(error(R"({"roles": {}})"), "no matrix changes"));
        CHECK(contains(error(R"({"overrides": [{"match": "q_proj", "format": "nvfp4"}]})"),
                       "other engines fuse them"));
        CHECK(contains(
            usage_error([&] { write(parity("base/bf16"), {.directory = dir / "o", .recipe = "aeno"}); }),
            "expected aeon, xs, fp8-head"));
        CHECK(!fs::exists(dir / "out"));
        CHECK(!fs::exists(dir / "out.partial"));
    }

    TEST_CASE("write: searched scales make less error than amax in every matrix") {
        const TempDir dir;
        write(demo_bf16(), {.directory = dir / "mse", .recipe = "aeon", .threads = 2});
        const std::string recipe =
            dir.write("amax.json", R"({"scales": "amax", "roles": {"attention": "nvfp4",
            "experts": "nvfp4", "shared_expert": "nvfp4"}})");
        write(demo_bf16(), {.directory = dir / "amax", .recipe = recipe, .threads = 2});
        const Comparison mse = against(dir / "mse", demo_bf16()), amax = against(dir / "amax", demo_bf16());
        double sum_mse = 0, sum_amax = 0;
        for (const ModuleComparison& m : mse.modules) {
            if (m.format != "NVFP4") continue;
            const double other = of(amax, m.name).error.squared_error;
            CHECK(m.error.squared_error < other);
            sum_mse += m.error.squared_error;
            sum_amax += other;
        }
        MESSAGE("squared error of mse over amax: " << sum_mse / sum_amax);
        CHECK(sum_mse < 0.85 * sum_amax);
    }

    TEST_CASE(
        "write: compressed-tensors to ModelOpt and back gives the same bytes, and the same weights in "
        "between") {
        for (const char* name :
             {"base/ct", "deep/ct", "vision_mtp/ct", "mixed/ct_mixed", "real_heads/ct_fp8_head"}) {
            CAPTURE(name);
            const TempDir dir;
            const WriteReport there =
                write(parity(name), {.directory = dir / "mo", .format = CheckpointFormat::modelopt});
            CHECK(there.converted > 0);
            CHECK(there.inexact == 0);
            for (const ModuleComparison& m : against(dir / "mo", parity(name)).modules)
                CHECK(m.error.different == 0);
            CHECK(Inspection(dir / "mo", ReadMode::values).clean());
            write(dir / "mo", {.directory = dir / "ct"});
            const Checkpoint before = Checkpoint::open(parity(name)), after = Checkpoint::open(dir / "ct");
            REQUIRE(before.tensors().size() == after.tensors().size());
            for (const CheckpointTensor& t : before.tensors()) {
                CAPTURE(t.name);
                const uint32_t at = after.find(t.name);
                REQUIRE(at != Checkpoint::kNone);
                const SafeTensor& other = *after.tensors()[at].tensor;
                CHECK(describe(other) == describe(*t.tensor));
                CHECK(std::equal(t.tensor->data, t.tensor->data + t.tensor->bytes(), other.data));
            }
        }
    }

    TEST_CASE("write: ModelOpt to compressed-tensors and back gives the same bytes") {
        for (const char* name :
             {"base/modelopt", "deep/modelopt", "mixed/modelopt_mixed", "odd_pattern/modelopt_xs"}) {
            CAPTURE(name);
            const TempDir dir;
            const WriteReport there = write(parity(name), {.directory = dir / "ct"});
            const Comparison c = against(dir / "ct", parity(name));
            CHECK(c.clean());
            int64_t different = 0;
            for (const ModuleComparison& m : c.modules) {
                different += m.error.different > 0;
                CHECK(m.error.relative_rms() <= std::pow(2.0, -23));
            }
            CHECK(different <= there.inexact);
            write(dir / "ct", {.directory = dir / "mo", .format = CheckpointFormat::modelopt});
            const Checkpoint before = Checkpoint::open(parity(name)), after = Checkpoint::open(dir / "mo");
            REQUIRE(before.tensors().size() == after.tensors().size());
            for (const CheckpointTensor& t : before.tensors()) {
                CAPTURE(t.name);
                const SafeTensor& other = *after.tensors()[after.find(t.name)].tensor;
                CHECK(describe(other) == describe(*t.tensor));
                CHECK(std::equal(t.tensor->data, t.tensor->data + t.tensor->bytes(), other.data));
            }
        }
    }
}

TEST_SUITE("model") {
    TEST_CASE("write: the written demo answers like its source") {
        const TempDir dir;
        const std::vector<float> source = logits(demo_bf16());
        for (const std::string recipe : {"aeon", "xs", "fp8-head"}) {
            for (const CheckpointFormat format :
                 {CheckpointFormat::compressed_tensors, CheckpointFormat::modelopt}) {
                const std::string out = dir / fmt::format("{}-{}", recipe, format_name(format));
                write(demo_bf16(), {.directory = out, .recipe = recipe, .format = format, .threads = 2});
                const double difference = relative_difference(logits(out), source);
                MESSAGE(recipe << " " << std::string(format_name(format)) << ": logits differ by "
                               << difference);
                CHECK(difference < 0.15);
            }
        }
    }
}
