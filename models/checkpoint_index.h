// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "ggml-like/name_hash.h"
#include "ggml-like/safetensors.h"
#include "models/checkpoint_files.h"

namespace quern {

/// Must not be moved: names are views into `text` or `unescaped`.
struct CheckpointIndex {
    std::string text;
    std::vector<std::string> shards;  // distinct file names
    NameMap shard_of;                 // tensor name in the file -> index into `shards`
    std::deque<std::string> unescaped;
    uint64_t total_size = 0;  // metadata.total_size; 0 = not given
};

/// Reads the index and compares it with the files that are there. If it names none of them but model.safetensors
/// exists, `index` stays empty and a note is added. Throws Error(model).
void read_checkpoint_index(const CheckpointFiles& files, CheckpointIndex& index,
                           std::vector<std::string>& notes);

/// Throws Error(model) unless the index and the shards list the same tensors. Shards that the index does not name
/// are extras (a separate MTP block), whose tensors must not be in the index. `names`: the shards' file names;
/// `path`: the index, for messages.
void check_index(const CheckpointIndex& index, const std::vector<SafetensorsFile>& shards,
                 const std::vector<std::string>& names, const std::string& path, int threads,
                 std::vector<std::string>& notes);

}  // namespace quern
