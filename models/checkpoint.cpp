#include "models/checkpoint.h"

#include <optional>

#include "ggml-like/check.h"
#include "ggml-like/json_guard.h"
#include "ggml-like/json_pull.h"
#include "ggml-like/parallel.h"
#include "models/checkpoint_index.h"
#include "models/quant_info.h"
#include "models/tensor_names.h"

namespace quern {
namespace {

constexpr uint64_t kMaxConfigBytes = 16'000'000;

nlohmann::json read_json_file(const std::string& path, std::string* text_out = nullptr) {
    if (path.empty()) return nullptr;
    std::string text = read_text_file(path, kMaxConfigBytes);
    if (text.starts_with("version https://git-lfs")) {
        FAIL(model, "{}: this is {}", path, guess_file_kind(text));
    }
    nlohmann::json parsed = parse_json(text, path);
    if (!parsed.is_object()) FAIL(model, "{}: expected a JSON object, found {}", path, parsed.type_name());
    if (text_out != nullptr) *text_out = std::move(text);
    return parsed;
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& typed, int threads, bool mtp_folder) {
    Checkpoint c;
    c.files_ = find_checkpoint(typed);
    c.notes_ = c.files_.notes;
    c.read_configs();
    c.open_shards(threads);
    if (mtp_folder) c.open_mtp_folder();
    c.collect_tensors();
    return c;
}

void Checkpoint::open_mtp_folder() {
    for (const SafetensorsFile& f : shards_)
        for (const SafeTensor& t : f.tensors())
            if (canonical_name(t.name).starts_with("mtp.")) return;
    const std::string base = files_.directory.ends_with('/') ? files_.directory : files_.directory + "/";
    for (const std::string& name : mtp_folder_weights(files_)) {
        shards_.push_back(SafetensorsFile::open(base + name));
        shard_names_.push_back(name);
    }
}

void Checkpoint::read_configs() {
    config_ = read_json_file(files_.config, &config_text_);
    generation_config_ = read_json_file(files_.generation_config);
    hf_quant_config_ = read_json_file(files_.hf_quant_config);
    quant_ = read_quant_info(config_, hf_quant_config_, files_.directory);
}

void Checkpoint::open_shards(int threads) {
    const std::string base = files_.directory.ends_with('/') ? files_.directory : files_.directory + "/";
    shard_names_ = files_.weights;
    CheckpointIndex index;
    std::vector<std::optional<SafetensorsFile>> opened(shard_names_.size());
    // The index has as many names as all shards together: it comes first, and so do its errors.
    for_each_parallel(threads, 1 + opened.size(), [&](size_t i) {
        if (i > 0)
            opened[i - 1] = SafetensorsFile::open(base + shard_names_[i - 1]);
        else if (!files_.index.empty())
            read_checkpoint_index(files_, index, notes_);
    });
    for (std::optional<SafetensorsFile>& file : opened) shards_.push_back(std::move(*file));
    if (!index.shards.empty()) check_index(index, shards_, shard_names_, files_.index, threads, notes_);
}

void Checkpoint::collect_tensors() {
    size_t count = 0;
    for (const SafetensorsFile& f : shards_) count += f.tensors().size();
    if (count == 0) FAIL(model, "{}: the weight files hold no tensors", files_.directory);
    tensors_.reserve(count);
    by_name_.reserve(count);
    for (uint32_t shard = 0; shard < shards_.size(); ++shard) {
        for (const SafeTensor& t : shards_[shard].tensors()) {
            const std::string_view name =
                is_canonical(t.name) ? t.name
                                     : std::string_view(renamed_.emplace_back(canonical_name(t.name)));
            const auto index = static_cast<uint32_t>(tensors_.size());
            tensors_.push_back({&t, shard, name});
            const auto [first, fresh] = by_name_.emplace(name, index);
            if (fresh) continue;
            FAIL(model,
                 "{} and {} are the same tensor '{}'; are two copies of the model in one directory, or was "
                 "the "
                 "model saved with two prefixes?",
                 where(first), where(index), escaped(name));
        }
    }
}

uint32_t Checkpoint::find(std::string_view official_name) const {
    const uint32_t* index = by_name_.find(official_name);
    return index == nullptr ? kNone : *index;
}

std::string Checkpoint::where(uint32_t index) const {
    const CheckpointTensor& t = tensors_[index];
    return fmt::format("{}: tensor '{}'", shard_names_[t.shard], escaped(t.tensor->name));
}

uint64_t Checkpoint::total_bytes() const {
    uint64_t sum = 0;
    for (const SafetensorsFile& f : shards_) sum += f.file_size();
    return sum;
}

void Checkpoint::check_unchanged() const {
    for (const SafetensorsFile& f : shards_) f.check_unchanged();
}

}  // namespace quern
