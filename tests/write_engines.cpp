// quantize-inspect --write: the names and shapes that other engines look for. What they do with them is
// checked with the engines themselves: scripts/verify_engines.py.
#include <regex>

#include "ggml-like/json.h"
#include "write_harness.h"

using namespace quern;
using namespace quern::test;

namespace {

using Shape = std::vector<int64_t>;

nlohmann::json config_of(const std::string& directory) {
    return nlohmann::json::parse(read_file(directory + "/config.json"))["quantization_config"];
}

Shape shape_of(const Checkpoint& c, const std::string& name) {
    const uint32_t at = c.find(name);
    REQUIRE_MESSAGE(at != Checkpoint::kNone, name);
    const auto dims = c.tensors()[at].tensor->dims();
    return {dims.begin(), dims.end()};
}

/// As compressed-tensors and the engines match a target: the beginning of the name.
bool matches(const std::string& target, const std::string& module) {
    REQUIRE(target.starts_with("re:"));
    return std::regex_search(module, std::regex(target.substr(3)), std::regex_constants::match_continuous);
}

int matching(const nlohmann::json& group, const std::string& module) {
    int count = 0;
    for (const auto& target : group["targets"]) count += matches(target, module);
    return count;
}

/// The group whose weights have this strategy.
nlohmann::json group_of(const nlohmann::json& config, const std::string& strategy) {
    for (const auto& [name, group] : config["config_groups"].items())
        if (group["weights"]["strategy"] == strategy) return group;
    return nullptr;
}

constexpr const char* kFp8 = R"({"roles": {"experts": "nvfp4", "delta": "fp8", "head": "fp8"},
                                 "overrides": [{"match": "layers\\.1\\..*\\.experts", "format": "keep"},
                                               {"match": "layers\\.2\\..*\\.experts", "format": "fp8"}]})";

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("write: targets match the names that a module has in the file and in other engines") {
        const TempDir dir;
        const std::string recipe = dir.write("recipe.json", kFp8);
        write(parity("base/bf16"), {.directory = dir / "out", .recipe = recipe, .threads = 2});
        const nlohmann::json config = config_of(dir / "out"), group = group_of(config, "channel");
        CHECK(group_of(config, "tensor_group")["targets"] == nlohmann::json({"Linear"}));
        for (const std::string prefix : {"model.language_model.", "language_model.model.", "model."}) {
            CAPTURE(prefix);
            CHECK(matching(group, prefix + "layers.0.linear_attn.in_proj_qkv") == 1);
            CHECK(matching(group, prefix + "layers.0.linear_attn.in_proj_z") == 1);
            CHECK(matching(group, prefix + "layers.0.linear_attn.in_proj_qkvz") == 1);
            CHECK(matching(group, prefix + "layers.0.linear_attn.in_proj_a") == 0);
            CHECK(matching(group, prefix + "layers.0.linear_attn.out_proj") == 1);
            CHECK(matching(group, prefix + "layers.2.mlp.experts.3.up_proj") == 1);
            CHECK(matching(group, prefix + "layers.0.mlp.experts.3.up_proj") == 0);
        }
        for (const std::string head : {"lm_head", "language_model.lm_head"})
            CHECK(matching(group, head) == 1);
        CHECK(matching(group, "mtp.layers.0.linear_attn.out_proj") == 0);

        int kept = 0;  // experts of a layer: too many to be listed
        for (const std::string name : config["ignore"])
            kept += name.starts_with("re:") &&
                    matches(name, "language_model.model.layers.1.mlp.experts.0.up_proj");
        CHECK(kept == 1);
    }

    TEST_CASE("write: scales of FP8 have the shape of the format") {
        const TempDir dir;
        const std::string head = "lm_head.weight_scale";
        const auto written = [&](const std::string& storage, CheckpointFormat format) {
            const std::string recipe =
                dir.write("recipe.json", R"({"roles": {"experts": "nvfp4", "head": ")" + storage + R"("}})");
            const std::string out = dir / fmt::format("{}-{}", storage, format_name(format));
            write(parity("real_heads/bf16"),
                  {.directory = out, .recipe = recipe, .format = format, .threads = 2});
            CHECK(Inspection(out, ReadMode::values).clean());
            return out;
        };
        const auto ct = CheckpointFormat::compressed_tensors, mo = CheckpointFormat::modelopt;
        CHECK(shape_of(Checkpoint::open(written("fp8", ct)), head) == Shape{160, 1});
        CHECK(shape_of(Checkpoint::open(written("fp8", mo)), head) == Shape{160});
        CHECK(shape_of(Checkpoint::open(written("fp8-block", ct)), head) == Shape{2, 1});
        CHECK(shape_of(Checkpoint::open(written("fp8-block", mo)), head) == Shape{2, 1, 1, 1});
        CHECK(shape_of(Checkpoint::open(written("fp8-tensor", ct)), head) == Shape{1});
        for (const std::string storage : {"fp8", "fp8-block"})
            CHECK(
                of(against(dir / (storage + "-modelopt"), dir / (storage + "-compressed-tensors")), "lm_head")
                    .error.different == 0);

        // The same when a file that is there is converted.
        write(parity("mixed/ct_mixed"), {.directory = dir / "there", .format = mo});
        CHECK(shape_of(Checkpoint::open(dir / "there"), head) == Shape{96});
        write(parity("mixed/modelopt_mixed"), {.directory = dir / "back"});
        const std::string out_proj = "model.language_model.layers.0.linear_attn.out_proj.";
        CHECK(shape_of(Checkpoint::open(dir / "back"), out_proj + "weight_scale") == Shape{1});
        CHECK(shape_of(Checkpoint::open(dir / "back"), out_proj + "input_scale") == Shape{1});
    }

    TEST_CASE("write: the config says whether activations have a scale, and none is made up") {
        const TempDir dir;
        write(parity("mixed/modelopt_mixed"), {.directory = dir / "static"});
        const nlohmann::json scaled = group_of(config_of(dir / "static"), "tensor")["input_activations"];
        CHECK(scaled["dynamic"] == false);
        CHECK(scaled["strategy"] == "tensor");

        // Experts with such scales, a head without: one group would have engines read a scale that is not
        // there.
        const nlohmann::json config = config_of(dir / "static");
        int groups = 0;
        for (const auto& [name, group] : config["config_groups"].items()) {
            if (group["weights"]["num_bits"] != 4) continue;
            ++groups;
            const bool head = group["targets"] == nlohmann::json({"re:.*lm_head$"});
            CHECK((head || group["targets"] == nlohmann::json({"Linear"})));
            CHECK(group["input_activations"].is_null() == head);
        }
        CHECK(groups == 2);
        write(parity("mixed/modelopt_mixed"),
              {.directory = dir / "again",
               .recipe =
                   dir.write("none.json", R"({"overrides": [{"match": "mlp.gate$", "format": "nvfp4"}]})"),
               .format = CheckpointFormat::modelopt});
        const nlohmann::json layers = config_of(dir / "again")["quantized_layers"];
        CHECK(layers["lm_head"]["quant_algo"] == "W4A16_NVFP4");
        CHECK(layers["model.language_model.layers.0.mlp.experts.0.up_proj"]["quant_algo"] == "NVFP4");
        CHECK(layers["model.language_model.layers.0.linear_attn.out_proj"]["quant_algo"] == "FP8");

        const std::string recipe =
            dir.write("recipe.json", R"({"roles": {"experts": "nvfp4", "delta": "fp8-tensor"}})");
        write(parity("base/bf16"), {.directory = dir / "dynamic", .recipe = recipe});
        CHECK(group_of(config_of(dir / "dynamic"), "tensor")["input_activations"]["dynamic"] == true);

        for (const std::string& source : {parity("base/bf16"), dir / "dynamic"}) {
            const std::string error = usage_error([&] {
                write(source, {.directory = dir / "mo",
                               .recipe = source == parity("base/bf16") ? recipe : "",
                               .format = CheckpointFormat::modelopt});
            });
            CHECK_MESSAGE(contains(error, "needs an input_scale"), error);
            CHECK(!fs::exists(dir / "mo"));
            CHECK(!fs::exists(dir / "mo.partial"));
        }
    }
}
