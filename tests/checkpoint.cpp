// Checkpoint directories: finding them, the index, official names, configs. Wrong ones give one clear
// Error(model).
#include "models/checkpoint.h"

#include <doctest/doctest.h>

#include <algorithm>

#include <sys/stat.h>

#include "models/tensor_names.h"
#include "models/tensor_use.h"

#include "checkpoint_writer.h"

using namespace quern;
using namespace quern::test;

namespace {

constexpr const char* kShard1 = "model-00001-of-00002.safetensors";
constexpr const char* kShard2 = "model-00002-of-00002.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

/// A value of the environment for the life of the object.
class Environment {
  public:
    Environment(const char* name, const std::string& value) : name_(name) {
        const char* old = std::getenv(name);
        had_ = old != nullptr;
        if (had_) old_ = old;
        setenv(name, value.c_str(), 1);
    }
    ~Environment() { had_ ? setenv(name_, old_.c_str(), 1) : unsetenv(name_); }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;

  private:
    const char* name_;
    bool had_;
    std::string old_;
};

/// Two shards with one tensor each, and their index.
void write_sharded(const TempDir& dir, const std::string& below = "") {
    dir.write(below + "config.json", "{}");
    dir.write(below + kShard1, SafetensorsWriter().bf16("model.norm.weight", {4}).bytes());
    dir.write(below + kShard2, SafetensorsWriter().bf16("lm_head.weight", {2, 4}).bytes());
    dir.write(below + kIndex, index_json({{"model.norm.weight", kShard1}, {"lm_head.weight", kShard2}}));
}

/// The same on one thread and on several.
std::string open_error(const std::string& path) {
    const std::string error = model_error([&] { Checkpoint::open(path); });
    CHECK(model_error([&] { Checkpoint::open(path, 4); }) == error);
    return error;
}

/// The error of a sharded checkpoint with this index.
std::string index_error(const std::string& json) {
    TempDir dir;
    write_sharded(dir);
    dir.write(kIndex, json);
    return open_error(dir.str());
}

bool any_contains(const std::vector<std::string>& lines, const std::string& part) {
    for (const std::string& line : lines) {
        if (contains(line, part)) return true;
    }
    return false;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("checkpoint: one file, named in four ways") {
        TempDir dir;
        dir.write("m/config.json", R"({"model_type":"x"})");
        dir.write("m/generation_config.json", R"({"top_k":20})");
        dir.write("m/model.safetensors", SafetensorsWriter().bf16("model.norm.weight", {4}).bytes());
        dir.write("m/._model.safetensors", "resource fork");
        for (const char* typed : {"m", "m/", "m/config.json", "m/model.safetensors"}) {
            CAPTURE(typed);
            const Checkpoint c = Checkpoint::open(dir / typed);
            REQUIRE(c.tensors().size() == 1);
            CHECK(c.config()["model_type"] == "x");
            CHECK(c.generation_config()["top_k"] == 20);
            CHECK(contains(c.config_text(), "model_type"));
            const uint32_t i = c.find("model.language_model.norm.weight");
            REQUIRE(i != Checkpoint::kNone);
            CHECK(c.where(i) == "model.safetensors: tensor 'model.norm.weight'");
            CHECK(c.find("model.norm.weight") == Checkpoint::kNone);
            CHECK(c.notes().empty());
            CHECK(c.total_bytes() == c.shards()[0].file_size());
            c.check_unchanged();
        }
    }

    TEST_CASE("checkpoint: shards with an index, and an extra file that it does not name") {
        TempDir dir;
        write_sharded(dir);
        dir.write("model_mtp.safetensors", SafetensorsWriter().bf16("mtp.norm.weight", {4}).bytes());
        const Checkpoint c = Checkpoint::open(dir / kIndex);
        CHECK(c.shards().size() == 3);
        CHECK(c.find("lm_head.weight") != Checkpoint::kNone);
        CHECK(c.find("mtp.norm.weight") != Checkpoint::kNone);
        CHECK(any_contains(c.notes(), "model_mtp.safetensors: not named by the index"));
        Checkpoint moved = Checkpoint::open(dir.str());
        const Checkpoint target = std::move(moved);
        CHECK(target.tensors()[target.find("lm_head.weight")].tensor->has_shape({2, 4}));
    }

    TEST_CASE("checkpoint: nothing there") {
        TempDir dir;
        const std::string message = open_error(dir / "absent");
        CHECK(contains(message, "no checkpoint found"));
        CHECK(contains(message, "absent (not there"));
        CHECK(contains(open_error(dir.str()), "config.json is missing"));
        CHECK(contains(open_error(""), "empty"));
        CHECK(contains(open_error(dir.write("x.gguf", "GGUF")), "not GGUF"));
        CHECK(contains(open_error(dir.write("x.txt", "hello")), "expected a directory, config.json"));
        CHECK(contains(open_error(std::string(5000, 'a')), "no checkpoint found"));
        dir.write("config.json", "{}");
        CHECK(contains(open_error(dir.str()), "GGUF file, which quern does not read"));
        std::filesystem::remove(dir / "x.gguf");
        CHECK(contains(open_error(dir.str()), "is the download complete?"));
        dir.write("pytorch_model.bin", "x");
        CHECK(contains(open_error(dir.str()), "PyTorch .bin"));
        dir.write("model.safetensors", with_length("{}"));
        CHECK(contains(open_error(dir.str()), "hold no tensors"));
    }

    TEST_CASE("checkpoint: configs that are no configs") {
        TempDir dir;
        dir.write("model.safetensors", SafetensorsWriter().bf16("norm.weight", {4}).bytes());
        const auto config = [&](const std::string& text) {
            dir.write("config.json", text);
            return open_error(dir.str());
        };
        CHECK(config("{}") == "<no error>");
        CHECK(contains(config(""), "config.json"));
        CHECK(contains(config("[]"), "expected a JSON object, found array"));
        CHECK(contains(config("{\"a\":"), "config.json"));
        CHECK(contains(config(std::string(100'000, '[')), "config.json"));
        CHECK(contains(config("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"));
        std::filesystem::remove(dir / "config.json");
        std::filesystem::create_directory(dir / "config.json");
        CHECK(contains(open_error(dir.str()), "found a directory"));
        std::filesystem::remove(dir / "config.json");
        REQUIRE(mkfifo((dir / "config.json").c_str(), 0600) == 0);
        CHECK(contains(open_error(dir.str()), "FIFO"));
        std::filesystem::remove(dir / "config.json");
        std::filesystem::create_symlink("/dev/zero", dir / "config.json");
        CHECK(contains(open_error(dir.str()), "device"));
    }

    TEST_CASE("checkpoint: what the configuration says about quantization") {
        TempDir dir;
        dir.write("model.safetensors", SafetensorsWriter().bf16("norm.weight", {4}).bytes());
        const auto config = [&](const std::string& text) {
            dir.write("config.json", text);
            return open_error(dir.str());
        };
        const auto info = [&] { return Checkpoint::open(dir.str()).quant(); };
        CHECK(config("{}") == "<no error>");
        CHECK(info().method == "");
        CHECK(
            config(
                R"({"quantization_config":{"quant_method":"compressed-tensors","format":"nvfp4-pack-quantized",
            "transform_config":{},"sparsity_config":{"format":"dense"},
            "kv_cache_scheme":{"num_bits":8,"type":"float"}}})") == "<no error>");
        CHECK(info().method == "compressed-tensors");
        CHECK(info().format == "nvfp4-pack-quantized");
        CHECK(info().kv_cache == "FP8");
        CHECK(contains(config(R"({"quantization_config":{"quant_method":"gptq"}})"),
                       "'gptq' is not one quern reads"));
        CHECK(contains(config(R"({"quantization_config":{"bits":4}})"), "(none given)"));
        CHECK(contains(config(R"({"quantization_config":[1]})"), "not an object"));
        CHECK(contains(config(R"({"text_config":{"quantization_config":{"quant_method":"awq"}}})"), "'awq'"));
        CHECK(contains(config(R"({"quantization_config":{"quant_method":"fp8","transform_config":{"r":1}}})"),
                       "rotated"));
        const auto auto_round = [&](const char* method, const char* more) {
            return config(fmt::format(
                R"({{"quantization_config":{{"quant_method":"{}","packing_format":"auto_round:fp8"{}}}}})",
                method, more));
        };
        for (const char* method : {"auto-round", "intel/auto-round"}) {
            CHECK(auto_round(method, "") == "<no error>");
            CHECK(info().method == method);
            CHECK(info().format == "auto_round:fp8");
            CHECK(contains(auto_round(method, R"(,"hadamard_config":{"block_size":32})"), "rotated"));
        }
        CHECK(contains(
            config(R"({"quantization_config":{"quant_method":"fp8","sparsity_config":{"format":"x"}}})"),
            "sparse format 'x'"));
        config("{}");
        dir.write("hf_quant_config.json", R"({"producer":{"name":"modelopt","version":"0.43"},
            "quantization":{"quant_algo":"NVFP4","kv_cache_quant_algo":"FP8"}})");
        CHECK(info().method == "modelopt");
        CHECK(info().format == "NVFP4");
        CHECK(info().kv_cache == "FP8");
        CHECK(info().producer == "modelopt 0.43");
    }

    TEST_CASE("checkpoint: an index that leads astray") {
        for (const char* name : {"../../etc/passwd", "/etc/passwd", "a/b.safetensors", "..\\\\b.safetensors",
                                 "..", "", "config.json", "x\\u0000.safetensors"}) {
            CAPTURE(name);
            CHECK(contains(index_error(index_json({{"lm_head.weight", name}})), "not the plain name"));
        }
        CHECK(contains(
            index_error(index_json({{"a", "model-00003-of-00002.safetensors"}, {"lm_head.weight", kShard2}})),
            "1 of 2 shards named by the index are missing: model-00003-of-00002.safetensors"));
        CHECK(contains(index_error("{}"), "expected weight_map"));
        CHECK(contains(index_error(R"({"weight_map":{}})"), "expected weight_map"));
        CHECK(contains(index_error(R"({"weight_map":[]})"), "JSON error"));
        CHECK(contains(index_error(R"({"weight_map":{"a":1}})"), "JSON error"));
        CHECK(contains(index_error(""), "JSON error"));
        CHECK(contains(index_error("{\"a\":" + std::string(100'000, '[')), "deeper than 64"));
        CHECK(contains(index_error(R"({"weight_map":{},"weight_map":{}})"), "twice"));
        CHECK(contains(index_error(index_json({{"a", kShard1}, {"a", kShard2}})), "'a' appears twice"));
        CHECK(contains(index_error("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"));
        CHECK(index_error(
                  fmt::format(R"({{"x":[1,{{}}],"metadata":null,"weight_map":{{"model.norm.wei\u0067ht":"{}",
            "lm_head.weight":"{}"}}}})",
                              kShard1, kShard2)) == "<no error>");
    }

    TEST_CASE("checkpoint: index and shards must agree, both ways") {
        const std::string swapped =
            index_error(index_json({{"model.norm.weight", kShard2}, {"lm_head.weight", kShard1}}));
        CHECK(contains(swapped, "tensor 'model.norm.weight': the index expects it in model-00002"));
        CHECK(contains(swapped, "two revisions"));
        const std::string ghost = index_error(index_json(
            {{"model.norm.weight", kShard1}, {"lm_head.weight", kShard2}, {"ghost.weight", kShard2}}));
        CHECK(contains(ghost, "1 tensors of the index are not where it says, the first is 'ghost.weight'"));
        CHECK(contains(ghost, "no file has it"));
        const std::string extra = index_error(index_json({{"model.norm.weight", kShard1}, {"z", kShard2}}));
        CHECK(contains(extra, "tensor 'lm_head.weight': expected in the index, found nothing there"));

        TempDir dir;  // the tensor is not in its shard, but in a file that the index does not name
        write_sharded(dir);
        dir.write("extra.safetensors", SafetensorsWriter().bf16("b.weight", {4}).bytes());
        dir.write(
            kIndex,
            index_json({{"model.norm.weight", kShard1}, {"lm_head.weight", kShard2}, {"b.weight", kShard1}}));
        CHECK(contains(open_error(dir.str()), "tensor 'b.weight': the index expects it in model-00001"));
    }

    TEST_CASE("checkpoint: of several faults the first is told, however many threads look") {
        TempDir dir;
        dir.write("config.json", "{}");
        std::vector<std::pair<std::string, std::string>> map;
        const auto shard = [](int i) { return fmt::format("model-{:05}-of-00009.safetensors", i); };
        for (int i = 1; i <= 9; ++i) {
            SafetensorsWriter w;
            for (int k = 0; k < 200; ++k) w.bf16(fmt::format("model.layers.{}.x{}", i, k), {4});
            for (const auto& entry : w.entries) map.emplace_back(entry.name, shard(i));
            dir.write(shard(i), w.bytes());
        }
        dir.write(kIndex, index_json(map));
        CHECK(open_error(dir.str()) == "<no error>");
        const Checkpoint c = Checkpoint::open(dir.str(), 4);
        REQUIRE(c.tensors().size() == map.size());
        for (size_t i = 0; i < map.size(); ++i) {
            CHECK(c.tensors()[i].tensor->name == map[i].first);
            CHECK(c.find(c.tensors()[i].name) == i);
        }

        const auto told = [&](const std::string& part) {
            for (int i = 0; i < 20; ++i)
                if (!contains(model_error([&] { Checkpoint::open(dir.str(), 8); }), part)) return false;
            return contains(open_error(dir.str()), part);
        };
        for (const int i : {8, 5, 3}) {  // the first fault of all that are there by then
            dir.write(shard(i), with_length(fmt::format("{{\"t{}\":1}}", i)));
            CHECK(told(shard(i) + ": JSON error at byte 6"));
        }
        std::filesystem::remove(dir / shard(6));
        CHECK(told("1 of 9 shards named by the index are missing: " + shard(6)));
        map.push_back(map.front());
        dir.write(kIndex, index_json(map));
        CHECK(told("'model.layers.1.x0' appears twice in weight_map"));
    }

    TEST_CASE("checkpoint: sizes, stale and missing indexes, mixed splits") {
        TempDir dir;
        write_sharded(dir);
        dir.write(kIndex,
                  fmt::format(R"({{"metadata":{{"total_size":99}},"weight_map":{{"model.norm.weight":"{}",
            "lm_head.weight":"{}"}}}})",
                              kShard1, kShard2));
        CHECK(
            any_contains(Checkpoint::open(dir.str()).notes(), "total size of 99 bytes; the tensors have 24"));
        std::filesystem::remove(dir / kIndex);
        CHECK(contains(open_error(dir.str()), "index.json is missing"));

        TempDir stale;
        stale.write("config.json", "{}");
        stale.write("model.safetensors", SafetensorsWriter().bf16("norm.weight", {4}).bytes());
        stale.write(kIndex, index_json({{"norm.weight", kShard1}}));
        CHECK(any_contains(Checkpoint::open(stale.str()).notes(), "model.safetensors is used alone"));

        TempDir mixed;
        write_sharded(mixed);
        mixed.write("model-00001-of-00003.safetensors",
                    SafetensorsWriter().bf16("other.weight", {4}).bytes());
        mixed.write(".cache/huggingface/download/x.incomplete", "");
        const Checkpoint c = Checkpoint::open(mixed.str());
        CHECK(any_contains(c.notes(), "two different splits"));
        CHECK(any_contains(c.notes(), "1 unfinished download (*.incomplete)"));
    }

    TEST_CASE("checkpoint: damaged and misplaced shards") {
        TempDir dir;
        write_sharded(dir);
        const std::string bytes = SafetensorsWriter().bf16("lm_head.weight", {2, 4}).bytes();
        dir.write(kShard2, bytes.substr(0, bytes.size() - 1));
        CHECK(contains(open_error(dir.str()),
                       std::string(kShard2) + ": the file is cut off: 1 bytes are missing"));
        std::filesystem::remove(dir / kShard2);
        std::filesystem::create_directory(dir / kShard2);
        CHECK(contains(open_error(dir.str()), "found a directory"));
        std::filesystem::remove(dir / kShard2);
        REQUIRE(mkfifo((dir / kShard2).c_str(), 0600) == 0);
        CHECK(contains(open_error(dir.str()), "FIFO"));
        std::filesystem::remove(dir / kShard2);
        std::filesystem::create_symlink("/dev/zero", dir / kShard2);
        CHECK(contains(open_error(dir.str()), "device"));
        std::filesystem::remove(dir / kShard2);
        dir.write(kShard2, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n");
        CHECK(contains(open_error(dir.str()), "git lfs pull"));
        std::filesystem::remove(dir / kShard2);
        std::filesystem::create_symlink(kShard2, dir / kShard2);
        CHECK(contains(open_error(dir.str()), "leads back to itself"));
        std::filesystem::remove(dir / kShard2);
        dir.write("elsewhere/blob",
                  bytes);  // a link out of the directory is how the cache of Hugging Face works
        std::filesystem::create_symlink("elsewhere/blob", dir / kShard2);
        CHECK(open_error(dir.str()) == "<no error>");
    }

    TEST_CASE("checkpoint: the same tensor twice") {
        TempDir dir;
        dir.write("config.json", "{}");
        dir.write("model.safetensors", SafetensorsWriter()
                                           .bf16("model.norm.weight", {4})
                                           .bf16("language_model.model.norm.weight", {4})
                                           .bytes());
        const std::string message = open_error(dir.str());
        CHECK(contains(message, "'model.norm.weight'"));
        CHECK(contains(message, "'language_model.model.norm.weight'"));
        CHECK(contains(message, "are the same tensor 'model.language_model.norm.weight'"));
        dir.write("model.safetensors", SafetensorsWriter().bf16("model.norm.weight", {4}).bytes());
        dir.write("copy.safetensors", SafetensorsWriter().bf16("model.norm.weight", {4}).bytes());
        CHECK(contains(open_error(dir.str()), "two copies of the model"));
        // Asking for one of the two files settles it.
        const Checkpoint one = Checkpoint::open(dir / "copy.safetensors");
        CHECK(one.shard_name(0) == "copy.safetensors");
        CHECK(any_contains(one.notes(), "only this file was asked for"));
    }

    TEST_CASE("checkpoint: repository ids in the Hugging Face cache") {
        TempDir dir;
        const std::string repo = "models--user--tiny.model/";
        const std::string hash = "0123456789abcdef0123456789abcdef01234567";
        const std::string snapshot = repo + "snapshots/" + hash + "/";
        dir.write(repo + "refs/main", hash + "\n");
        dir.write(repo + "refs/refs/pr/1", hash);
        dir.write(snapshot + "config.json", "{}");
        dir.write(repo + "blobs/aaaa", SafetensorsWriter().bf16("norm.weight", {4}).bytes());
        std::filesystem::create_symlink("../../blobs/aaaa", dir / (snapshot + "model.safetensors"));
        const Environment cache("HF_HUB_CACHE", dir.str());
        const Environment home("HOME", dir / "nobody");
        const Environment hf_home("HF_HOME", dir / "nobody");
        for (const char* typed : {"user/tiny.model", "user/tiny.model@main", "user/tiny.model@0123456789",
                                  "user/tiny.model@refs/pr/1"}) {
            CAPTURE(typed);
            CHECK(contains(Checkpoint::open(typed).files().directory, hash));
        }
        CHECK(contains(open_error("user/tiny.model@fedcba"), "(0 of 1 revisions match)"));
        CHECK(contains(open_error("user/tiny.model@../../x"), "no checkpoint found"));
        const std::string absent = open_error("user/other");
        CHECK(contains(absent, dir / "models--user--other/snapshots"));
        CHECK(contains(absent, "hf download user/other"));

        dir.write(repo + "blobs/bbbb.incomplete", "");
        CHECK(any_contains(Checkpoint::open("user/tiny.model").notes(), "unfinished download"));
        std::filesystem::remove(dir / (repo + "blobs/aaaa"));
        CHECK(contains(open_error("user/tiny.model"), "target is missing"));
        dir.write(repo + "refs/main", "../../../../etc");
        CHECK(contains(open_error("user/tiny.model"), "expected a revision hash"));
        dir.write(repo + "refs/main", "1111111111111111111111111111111111111111");
        CHECK(contains(open_error("user/tiny.model"), "was not downloaded"));
        std::filesystem::remove(dir / (repo + "refs/main"));
        std::filesystem::create_directory(dir / (repo + "snapshots/second"));
        CHECK(contains(open_error("user/tiny.model"), "2 revisions and no `main`"));
    }

    TEST_CASE("tensor names: every prefix in the wild ends in the official one") {
        const std::pair<const char*, const char*> cases[] = {
            {"model.language_model.layers.3.mlp.gate.weight",
             "model.language_model.layers.3.mlp.gate.weight"},
            {"model.layers.3.mlp.gate.weight", "model.language_model.layers.3.mlp.gate.weight"},
            {"language_model.model.layers.3.mlp.gate.weight",
             "model.language_model.layers.3.mlp.gate.weight"},
            {"model.language_model.model.norm.weight", "model.language_model.norm.weight"},
            {"model.language_model.language_model.language_model.norm.weight",
             "model.language_model.norm.weight"},
            {"language_model.embed_tokens.weight", "model.language_model.embed_tokens.weight"},
            {"layers.0.input_layernorm.weight", "model.language_model.layers.0.input_layernorm.weight"},
            {"lm_head.weight", "lm_head.weight"},
            {"language_model.lm_head.weight", "lm_head.weight"},
            {"model.language_model.lm_head.weight", "lm_head.weight"},
            {"model.language_model.visual.blocks.0.norm1.bias", "model.visual.blocks.0.norm1.bias"},
            {"visual.pos_embed.weight", "model.visual.pos_embed.weight"},
            {"vision_tower.pos_embed.weight", "model.visual.pos_embed.weight"},
            {"model.mtp.fc.weight", "mtp.fc.weight"},
            {"language_model.mtp.norm.weight", "mtp.norm.weight"},
            {"model.layers", "model.layers"},
            {"something.else", "something.else"},
            {"model.something.else", "model.something.else"},
            {"", ""},
        };
        for (const auto& [name, official] : cases) {
            const auto& this_name = name;
            CAPTURE(this_name);
            CHECK(canonical_name(name) == official);
            CHECK(is_canonical(name) == (std::string_view(name) == official));
        }
        UnusedReason reason;
        CHECK(known_unused("mtp.layers.0.mlp.gate.weight", reason));
        CHECK(reason == UnusedReason::mtp);
        CHECK(known_unused("model.language_model.layers.3.self_attn.k_proj.k_scale", reason));
        CHECK(reason == UnusedReason::kv_scale);
        for (const char* scale : {"q_scale", "k_scale", "v_scale"})
            CHECK(known_unused(fmt::format("model.language_model.layers.3.self_attn.{}", scale), reason));
        CHECK_FALSE(known_unused("model.language_model.layers.3.self_attn.k_proj.weight_scale", reason));
        CHECK_FALSE(known_unused("visual.x", reason));  // only official names are asked for
    }

    TEST_CASE("audit: every tensor and byte is in one class") {
        TempDir dir;
        dir.write("config.json", "{}");
        SafetensorsWriter w;
        w.bf16("model.norm.weight", {4}).bf16("model.language_model.visual.x", {8}).bf16("mtp.y", {2});
        w.bf16("model.layers.0.self_attn.q_proj.input_scale", {1})
            .bf16("model.layers.0.self_attn.k_scale", {1});
        w.bf16("model.layers.0.mlp.experts.9.up_proj.bias", {3});
        dir.write("model.safetensors", w.bytes());
        const Checkpoint c = Checkpoint::open(dir.str());
        TensorUse use(c);
        use.use(c.find("model.language_model.norm.weight"), "values");
        use.note("a remark");
        Audit audit = use.audit();
        CHECK(audit.used.tensors == 1);
        CHECK(audit.unused[static_cast<int>(UnusedReason::vision)].bytes == 16);
        CHECK(audit.unused[static_cast<int>(UnusedReason::mtp)].tensors == 1);
        CHECK(audit.unused[static_cast<int>(UnusedReason::activation_scale)].tensors == 1);
        CHECK(audit.unused[static_cast<int>(UnusedReason::kv_scale)].tensors == 1);
        CHECK(audit.unknown.tensors == 1);
        CHECK_FALSE(audit.ok());
        REQUIRE(audit.problems.size() == 1);
        CHECK(contains(audit.problems[0], "experts.9.up_proj.bias': [3] BF16 is not part of this model"));
        CHECK(contains(audit.problems[0], "no biases"));
        uint64_t sum = audit.used.bytes + audit.unknown.bytes + audit.header_bytes;
        for (const Audit::Count& n : audit.unused) sum += n.bytes;
        CHECK(sum == audit.file_bytes);
        CHECK(std::count(audit.notes.begin(), audit.notes.end(), "a remark") == 1);
        CHECK(contains(model_error([&] { audit.require_ok(); }), "not fully understood (1 tensors unknown)"));
        CHECK(contains(model_error([&] { use.use(c.find("model.language_model.norm.weight"), "again"); }),
                       "read twice"));
    }

    TEST_CASE("audit: a flood of unknown tensors gives a short message") {
        TempDir dir;
        dir.write("config.json", "{}");
        SafetensorsWriter w;
        for (int i = 0; i < 500; ++i) w.bf16(fmt::format("x{}", i), {1});
        dir.write("model.safetensors", w.bytes());
        const Checkpoint c = Checkpoint::open(dir.str());
        TensorUse use(c);
        CHECK(use.audit().problems.size() == 21);
        CHECK(use.audit().problems.back() == "and 480 more unknown tensors");
    }
}
