// quantize-inspect on a checkpoint with all 124,306 tensors of the 35B model: headers only, the data are
// holes.
#include <doctest/doctest.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include <fmt/ranges.h>

#include "checkpoint_writer.h"

using namespace quern::test;

namespace {

constexpr int kShards = 9;

/// Headers of a sharded checkpoint; tensors go round the shards.
class Headers {
  public:
    void add(const std::string& name, const char* dtype, const std::vector<int64_t>& shape, int64_t size) {
        Shard& shard = shards_[static_cast<size_t>(tensors_++ % kShards)];
        for (const int64_t d : shape) size *= d;
        shard.json += fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                                  shard.json.empty() ? '{' : ',', name, dtype, fmt::join(shape, ","),
                                  shard.end, shard.end + size);
        shard.end += size;
        index_.emplace_back(name, file_name(static_cast<int>((tensors_ - 1) % kShards)));
    }
    void bf16(const std::string& name, const std::vector<int64_t>& shape) { add(name, "BF16", shape, 2); }
    void nvfp4(const std::string& module, int64_t rows, int64_t cols) {
        add(module + ".weight_packed", "U8", {rows, cols / 2}, 1);
        add(module + ".weight_scale", "F8_E4M3", {rows, cols / 16}, 1);
        add(module + ".weight_global_scale", "F32", {1}, 4);
        add(module + ".input_global_scale", "F32", {1}, 4);
    }
    void write(const TempDir& dir) const {
        for (int i = 0; i < kShards; ++i) {
            const Shard& shard = shards_[static_cast<size_t>(i)];
            const std::string path = dir.write(file_name(i), with_length(shard.json + "}"));
            std::filesystem::resize_file(path,
                                         std::filesystem::file_size(path) + static_cast<uint64_t>(shard.end));
        }
        dir.write("model.safetensors.index.json", index_json(index_));
    }
    int64_t tensors() const { return tensors_; }

  private:
    struct Shard {
        std::string json;
        int64_t end = 0;
    };
    static std::string file_name(int i) {
        return fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, kShards);
    }
    std::vector<Shard> shards_{kShards};
    std::vector<std::pair<std::string, std::string>> index_;
    int64_t tensors_ = 0;
};

/// The tensors of Qwen3.6-35B-A3B where experts, shared experts and attention are NVFP4.
Headers big_model() {
    Headers h;
    h.bf16("model.language_model.embed_tokens.weight", {248320, 2048});
    h.bf16("lm_head.weight", {248320, 2048});
    h.bf16("model.language_model.norm.weight", {2048});
    for (int i = 0; i < 333; ++i) h.bf16(fmt::format("model.visual.blocks.{}.weight", i), {64, 64});
    for (int layer = 0; layer < 40; ++layer) {
        const std::string at = fmt::format("model.language_model.layers.{}.", layer);
        h.bf16(at + "input_layernorm.weight", {2048});
        h.bf16(at + "post_attention_layernorm.weight", {2048});
        if (layer % 4 == 3) {
            const std::string attention = at + "self_attn.";
            h.nvfp4(attention + "q_proj", 8192, 2048);
            h.nvfp4(attention + "k_proj", 512, 2048);
            h.nvfp4(attention + "v_proj", 512, 2048);
            h.nvfp4(attention + "o_proj", 2048, 4096);
            h.bf16(attention + "q_norm.weight", {256});
            h.bf16(attention + "k_norm.weight", {256});
        } else {
            const std::string delta = at + "linear_attn.";
            h.bf16(delta + "in_proj_qkv.weight", {8192, 2048});
            h.bf16(delta + "in_proj_z.weight", {4096, 2048});
            h.bf16(delta + "in_proj_a.weight", {32, 2048});
            h.bf16(delta + "in_proj_b.weight", {32, 2048});
            h.bf16(delta + "conv1d.weight", {8192, 1, 4});
            h.bf16(delta + "A_log", {32});
            h.bf16(delta + "dt_bias", {32});
            h.bf16(delta + "norm.weight", {128});
            h.bf16(delta + "out_proj.weight", {2048, 4096});
        }
        h.bf16(at + "mlp.gate.weight", {256, 2048});
        h.bf16(at + "mlp.shared_expert_gate.weight", {1, 2048});
        for (int e = -1; e < 256; ++e) {
            const std::string expert =
                e < 0 ? at + "mlp.shared_expert." : fmt::format("{}mlp.experts.{}.", at, e);
            h.nvfp4(expert + "gate_proj", 512, 2048);
            h.nvfp4(expert + "up_proj", 512, 2048);
            h.nvfp4(expert + "down_proj", 2048, 512);
        }
    }
    return h;
}

double cpu_seconds() {
    rusage children{};
    getrusage(RUSAGE_CHILDREN, &children);
    const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * t.tv_usec; };
    return seconds(children.ru_utime) + seconds(children.ru_stime);
}

}  // namespace

TEST_SUITE("perf") {
    TEST_CASE("quantize-inspect: 124,306 tensors in a second") {
        const Headers headers = big_model();
        REQUIRE(headers.tensors() == 124'306);
        TempDir dir;
        headers.write(dir);
        dir.write("config.json",
                  R"({"model_type":"qwen3_5_moe","text_config":{}})");  // the defaults are the 35B's
        for (const char* flags : {"", " --tensors .", " --json"}) {
            double best_time = 1e9, best_cpu = 1e9;
            for (int i = 0; i < 4; ++i) {
                const auto start = std::chrono::steady_clock::now();
                const double before = cpu_seconds();
                const std::string command = std::string(QUERN_BINARY) + " quantize-inspect " + dir.str() +
                                            flags + " > " + (dir / "out");
                REQUIRE(std::system(command.c_str()) == 0);
                const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
                best_time = std::min(best_time, time.count());
                best_cpu = std::min(best_cpu, cpu_seconds() - before);
            }
            fmt::print("quantize-inspect{}: {:.2f} s, {:.2f} s of processor time\n", flags, best_time,
                       best_cpu);
            CHECK(best_cpu < 1.0);
        }
    }
}
