// quantize-inspect --audit: a sound checkpoint is clean, and each seeded fault is named.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "checkpoint_copy.h"
#include "models/module_list.h"
#include "tools/common/inspection.h"

using namespace quern;
using namespace quern::test;
using nlohmann::json;

namespace {

const std::string kVectors = QUERN_SOURCE_DIR "/tests/vectors/parity/";
const std::string kLayer = "model.language_model.layers.0.";
const std::string kExpert = kLayer + "mlp.experts.5.";

struct Findings {
    bool clean = true;
    std::string problems, notes;
};

Findings audit(const std::string& path) {
    Findings f;
    try {
        const Inspection in(path, ReadMode::values);
        f.clean = in.clean();
        f.problems = in.failure;
        for (const std::string& p : in.audit.problems) f.problems += "\n" + p;
        for (const std::string& n : in.audit.notes) f.notes += n + "\n";
    } catch (const Error& error) {
        f = {false, error.what(), ""};
    }
    return f;
}

Findings after(const std::function<void(CheckpointCopy&)>& change, const std::string& name = "base/ct") {
    CheckpointCopy copy(name);
    change(copy);
    copy.write();
    return audit(copy.dir.str());
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("audit: sound checkpoints are clean and their configurations contradict nothing") {
        for (const char* name :
             {"base/ct", "base/modelopt", "base/bf16", "tied_text/ct", "mixed/ct_mixed",
              "mixed/modelopt_mixed", "odd_pattern/modelopt_xs", "real_heads/ct_fp8_head",
              "real_heads/fp8_block", "vision_mtp/ct", "deep/modelopt", "many_experts/ct", "dense/ct",
              "dense/ct_mixed", "dense/modelopt_mixed", "dense/fp8_block", "dense_heads/modelopt_xs"}) {
            CAPTURE(name);
            const Findings f = audit(kVectors + name);
            CHECK(f.problems == "");
            CHECK_MESSAGE(f.notes.find("config:") == std::string::npos, f.notes);
        }
        CHECK(inspect_exit_code("--audit") == 0);
        CHECK(inspect_exit_code("--audit --json " + kVectors + "base/ct") == 0);
    }

    TEST_CASE("audit: who made it, and for which activations") {
        const auto print = [](const std::string& name) {
            return fingerprint(Checkpoint::open(kVectors + name));
        };
        const Fingerprint ct = print("base/ct"), modelopt = print("base/modelopt"),
                          plain = print("base/bf16");
        CHECK(ct.producer == "llm-compressor (compressed-tensors 0.13.0)");
        CHECK(modelopt.producer == "modelopt 0.43.0");
        CHECK(plain.scheme() == std::string("not NVFP4"));
        CHECK(ct.mtp == "absent");
        const Fingerprint grafted = print("vision_mtp/ct");
        CHECK(grafted.vision);
        CHECK(grafted.mtp == "grafted: in model_mtp.safetensors, without text layers");
        CheckpointCopy copy("base/ct");
        const auto scheme = [&] {
            copy.write();
            return std::string(fingerprint(Checkpoint::open(copy.dir.str())).scheme());
        };
        CHECK(scheme() == "W4A4");
        copy.weights.remove(kExpert + "up_proj.input_global_scale");
        CHECK(scheme() == "W4A4 in part");
        std::erase_if(copy.weights.entries,
                      [](const auto& e) { return e.name.ends_with("input_global_scale"); });
        CHECK(scheme() == "W4A16");
        CHECK(contains(audit(copy.dir.str()).notes, "W4A4 is declared"));
    }

    TEST_CASE("audit: modules that are declared to have quantized weights only are W4A16") {
        // As NVIDIA's own releases: activation scales are stored, and quantized_layers says that they are not used.
        const auto declare = [](CheckpointCopy& c, const char* algo) {
            const auto add = [&](const std::string& module) {
                c.hf_quant["quantization"]["quantized_layers"][module] = {{"quant_algo", algo}};
            };
            c.hf_quant["quantization"]["quant_algo"] = "MIXED_PRECISION";
            for (int layer = 0; layer < 4; ++layer) {
                const std::string prefix = fmt::format("model.language_model.layers.{}.", layer);
                add(prefix + "mlp.experts");  // one name for all of a layer
                for (const char* part : {"gate_proj", "up_proj", "down_proj"})
                    add(prefix + "mlp.shared_expert." + part);
                for (const char* part : {"q_proj", "k_proj", "v_proj", "o_proj"})
                    add(prefix + "self_attn." + part);
            }
        };
        for (const char* bits : {"4", "none"}) {
            for (const char* algo : {"W4A16_NVFP4", "NVFP4"}) {
                CAPTURE(bits);
                CAPTURE(algo);
                CheckpointCopy copy("base/modelopt");
                declare(copy, algo);
                json group = {{"weights", {{"num_bits", 4}}}, {"targets", json::array()}};
                if (bits[0] == '4') group["input_activations"] = {{"num_bits", 4}};
                copy.config["quantization_config"] = {{"quant_method", "modelopt"},
                                                      {"quant_algo", "MIXED_PRECISION"},
                                                      {"config_groups", {{"group_1", group}}}};
                copy.write();
                const bool weights_only = algo[0] == 'W';
                CHECK(fingerprint(Checkpoint::open(copy.dir.str())).scheme() ==
                      std::string(weights_only ? "W4A16" : "W4A4"));
                const bool contradicts = !weights_only && bits[0] != '4';
                CHECK(contains(audit(copy.dir.str()).notes, "W4A16 is declared") == contradicts);
            }
        }
    }

    TEST_CASE("audit: faults of tensors") {
        const auto global = [](CheckpointCopy& c) -> std::string& {
            return c.weights.at(kExpert + "up_proj.weight_global_scale").data;
        };
        const Findings inverted = after([&](CheckpointCopy& c) {
            float g;
            std::memcpy(&g, global(c).data(), sizeof g);
            global(c) = f32_bytes(1 / g);
        });
        CHECK(!inverted.clean);
        CHECK(contains(inverted.problems, "it looks inverted"));
        CHECK(contains(
            after([](CheckpointCopy& c) { c.weights.remove(kExpert + "up_proj.weight_scale"); }).problems,
            kExpert + "up_proj.weight_scale': expected beside weight_packed"));
        CHECK(contains(after([](CheckpointCopy& c) {
                           c.weights.bf16(kExpert + "up_proj.weight", {16, 32});
                       }).problems,
                       "expected one of weight and weight_packed, found both"));
        CHECK(contains(after([](CheckpointCopy& c) {
                           c.weights.bf16(kLayer + "mlp.extra.weight", {2, 2});
                       }).problems,
                       "mlp.extra.weight': [2, 2] BF16 is not part of this model"));
        CHECK(contains(after([](CheckpointCopy& c) {
                           for (auto& e : c.weights.entries)
                               if (e.name == kLayer + "mlp.gate.weight")
                                   e.name = "model.language_model.gate.weight";
                       }).problems,
                       "mlp.gate"));
    }

    TEST_CASE("audit: special token ids against the tokenizer") {
        TempDir dir;
        for (const char* name : {"tokenizer.json", "tokenizer_config.json", "model.safetensors"})
            std::filesystem::create_symlink(QUERN_SOURCE_DIR "/models/demo/" + std::string(name), dir / name);
        json config = read_json(QUERN_SOURCE_DIR "/models/demo/config.json");
        dir.write("config.json", config.dump());
        dir.write("generation_config.json", R"({"eos_token_id": 3000})");
        CHECK(contains(audit(dir.str()).notes, "no eos_token_id is <|im_end|>"));
        config["image_token_id"] = 7;
        dir.write("config.json", config.dump());
        CHECK(
            contains(audit(dir.str()).notes, "image_token_id is 7, but the tokenizer has <|image_pad|> at"));
        CHECK(audit(QUERN_SOURCE_DIR "/models/demo").notes.empty());
    }

    TEST_CASE("audit: an embedding that was quantized afterwards") {
        const Findings f = after([](CheckpointCopy& c) {
            c.weights.remove("model.language_model.embed_tokens.weight");
            c.weights.nvfp4_ct("model.language_model.embed_tokens", 96, 32);
        });
        CHECK(f.clean);
        CHECK(contains(f.notes, "embed_tokens is stored as NVFP4"));
    }

    TEST_CASE("audit: a file cut off, a pointer to a file, exit code 3") {
        CheckpointCopy copy("base/ct");
        copy.write();
        CHECK(inspect_exit_code("--audit " + copy.dir.str()) == 0);
        const std::string whole = copy.weights.bytes();
        copy.dir.write("model.safetensors", whole.substr(0, whole.size() - 100));
        CHECK(contains(audit(copy.dir.str()).problems, "the file is cut off"));
        CHECK(inspect_exit_code("--audit " + copy.dir.str()) == 3);
        copy.dir.write("model.safetensors",
                       "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n");
        CHECK(contains(audit(copy.dir.str()).problems, "git-lfs"));
    }

    TEST_CASE("audit: faults of the configuration") {
        const Findings layers = after([](CheckpointCopy& c) {
            c.config["text_config"]["layer_types"] = {"full_attention", "linear_attention",
                                                      "linear_attention", "linear_attention"};
        });
        CHECK(contains(layers.problems,
                       "layer_types makes layer 0 full_attention, expected tensors of self_attn"));
        CHECK(contains(layers.problems, "layer_types makes layer 3 linear_attention"));
        CHECK(contains(after([](CheckpointCopy& c) { c.config["tie_word_embeddings"] = true; }).notes,
                       "has an lm_head of its own"));
        CHECK(contains(after([](CheckpointCopy& c) { c.generation["eos_token_id"] = 96; }).problems,
                       "'eos_token_id' should be token ids below 96"));
        const Findings ids = after([](CheckpointCopy& c) {
            c.config["image_token_id"] = 248056;
            c.generation["eos_token_id"] = 5;
        });
        CHECK(ids.clean);
        CHECK(contains(ids.notes, "image_token_id is 248056, but the vocabulary has 96 rows"));
        CHECK(contains(ids.notes,
                       "eos_token_id 88 of config.json is not among those of generation_config.json"));
    }

    TEST_CASE("audit: ignore lists and declared formats against the tensors") {
        const auto ignore = [](const json& list) {
            return after([&](CheckpointCopy& c) { c.config["quantization_config"]["ignore"] = list; }).notes;
        };
        CHECK(contains(ignore({"re:.*mlp.experts.0.*", "re:.*linear_attn.*", "lm_head", "re:.*gate$"}),
                       "the ignore list names 12 modules"));
        CHECK(contains(ignore({"lm_head", "re:.*gate$"}), "neither quantized nor on the ignore list"));
        CHECK(contains(ignore({"re:(a+)+$"}), "the ignore list has 1 expression beyond"));
        CHECK(contains(after([](CheckpointCopy& c) { c.config.erase("quantization_config"); }).notes,
                       "but no quantization is declared"));
        const auto modelopt = [](const std::function<void(CheckpointCopy&)>& change) {
            return after(change, "base/modelopt").notes;
        };
        CHECK(contains(modelopt([](CheckpointCopy& c) {
                           c.hf_quant["quantization"]["exclude_modules"] = {"*experts*"};
                       }),
                       "the ignore list names"));
    }

    TEST_CASE("module lists: names, expressions that are wildcards, wildcards") {
        ModuleList regex, glob;
        regex.add({"lm_head", "Linear", "re:.*mlp\\.gate$", "re:model\\.visual.*", "re:[a-z]+", 5,
                   "re:^mtp[.]fc$", "re:[^.]x", "re:a[.]+b"},
                  ModuleList::Syntax::regex);
        CHECK(regex.unread() == 3);
        CHECK(regex.contains("mtp.fc", "x"));
        CHECK(!regex.contains("mtp_fc", "x"));
        CHECK(regex.contains("lm_head", "lm_head"));
        CHECK(regex.contains("model.language_model.layers.0.mlp.gate", "x"));
        CHECK(!regex.contains("model.language_model.layers.0.mlp.gate_proj", "x"));
        CHECK(regex.contains("model.visual.blocks.0", "x"));
        glob.add({"model.layers.1", "*router*"}, ModuleList::Syntax::glob);
        CHECK(glob.contains("model.language_model.layers.1.mlp.gate", "x"));
        CHECK(!glob.contains("model.language_model.layers.11.mlp.gate", "x"));
        CHECK(glob.contains("a.router.b", "x"));
        CHECK(!matches_wildcard(std::string(200, '*') + "b", std::string(10'000, 'a')));
    }
}
