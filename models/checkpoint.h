// Checkpoint: a directory of safetensors shards as one set of tensors with official names.
//
// `open` reads config.json, generation_config.json, hf_quant_config.json, the index and the headers of all
// shards, and checks them against each other: every tensor in exactly one shard, the one that the index
// names; no index entry without a tensor; no two tensors with the same official name. Weights are not read.
// Every error is Error(model) and names file, tensor, expected, found and the likely cause.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "ggml-like/json.h"
#include "ggml-like/name_hash.h"
#include "ggml-like/safetensors.h"
#include "models/checkpoint_files.h"

namespace quern {

/// What the configuration says about quantization, for cross-checks and display. How a module is read is decided
/// from its tensors, because the lists of excluded modules in real checkpoints are unreliable.
struct QuantInfo {
    std::string method;    // "compressed-tensors", "modelopt", "fp8", "auto-round"; empty = not quantized
    std::string format;    // "nvfp4-pack-quantized", "NVFP4", ...; as written
    std::string kv_cache;  // "FP8", ...; empty = not mentioned
    std::string producer;  // "modelopt 0.43"; empty = not mentioned
};

struct CheckpointTensor {
    const SafeTensor* tensor = nullptr;
    uint32_t shard = 0;
    std::string_view name;  // official name; tensor->name is the one in the file
};

class Checkpoint {
  public:
    static constexpr uint32_t kNone = 0xffffffffu;

    /// `typed`: whatever find_checkpoint accepts. Index and headers are read on `threads` threads; of several
    /// errors, the one that a single thread would meet first is thrown.
    /// mtp_folder: a checkpoint without tensors of an MTP layer also gets those of the safetensors files in its folder `mtp`.
    static Checkpoint open(const std::string& typed, int threads = 1, bool mtp_folder = false);
    Checkpoint(Checkpoint&&) = default;
    Checkpoint& operator=(Checkpoint&&) = default;

    const CheckpointFiles& files() const { return files_; }
    /// config.json; always an object.
    const nlohmann::json& config() const { return config_; }
    const std::string& config_text() const { return config_text_; }
    /// generation_config.json; null when the checkpoint has none.
    const nlohmann::json& generation_config() const { return generation_config_; }
    /// hf_quant_config.json (ModelOpt); null when the checkpoint has none.
    const nlohmann::json& hf_quant_config() const { return hf_quant_config_; }
    const QuantInfo& quant() const { return quant_; }
    const std::vector<SafetensorsFile>& shards() const { return shards_; }
    /// File name of a shard, without the directory.
    const std::string& shard_name(uint32_t shard) const { return shard_names_[shard]; }
    /// All tensors, by shard and position: in this order files are read forwards.
    const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
    /// Index into tensors() of an official name, or kNone.
    uint32_t find(std::string_view official_name) const;
    /// "model-00002-of-00009.safetensors: tensor 'lm_head.weight'", with the name as it is in the file.
    std::string where(uint32_t index) const;
    /// Sum of the sizes of all shards.
    uint64_t total_bytes() const;
    /// Harmless oddities, one line each.
    const std::vector<std::string>& notes() const { return notes_; }
    /// Fails when a shard was changed since it was opened.
    void check_unchanged() const;

  private:
    Checkpoint() = default;
    void read_configs();
    void open_shards(int threads);
    void open_mtp_folder();
    void collect_tensors();

    CheckpointFiles files_;
    nlohmann::json config_, generation_config_, hf_quant_config_;
    std::string config_text_;
    QuantInfo quant_;
    std::vector<SafetensorsFile> shards_;
    std::vector<std::string> shard_names_;
    std::vector<CheckpointTensor> tensors_;
    std::deque<std::string> renamed_;  // official names that differ from the file's
    NameMap by_name_;
    std::vector<std::string> notes_;
};

}  // namespace quern
