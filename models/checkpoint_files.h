// From what the user typed to the files of a checkpoint. Looks at names and sizes only; nothing is
// downloaded.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quern {

/// The files of one checkpoint. Paths are absolute, or relative if the user typed a relative one; empty = not there.
struct CheckpointFiles {
    std::string directory;
    std::string config;                // config.json
    std::string generation_config;     // generation_config.json
    std::string hf_quant_config;       // hf_quant_config.json (ModelOpt)
    std::string index;                 // model.safetensors.index.json, when the weights are sharded
    std::vector<std::string> weights;  // names of the *.safetensors files of the checkpoint, sorted
    std::vector<std::string> notes;    // oddities worth a line: unfinished downloads, a stale index
};

/// Accepts a directory, a file in one (config.json, an index, a .safetensors file), or a repository id
/// "user/name" or "user/name@revision" of the local Hugging Face cache ($HF_HUB_CACHE,
/// $HUGGINGFACE_HUB_CACHE, $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub, ~/.cache/huggingface/hub). An
/// existing path wins over a repository id. Error(model) lists what was tried and what to do.
CheckpointFiles find_checkpoint(const std::string& typed);

/// The *.safetensors files of its folder `mtp`, as "mtp/NAME", sorted.
std::vector<std::string> mtp_folder_weights(const CheckpointFiles& files);

/// Reads a regular file of at most `limit` bytes. Error(model) otherwise: missing, larger, a directory, a
/// FIFO.
std::string read_text_file(const std::string& path, uint64_t limit);

}  // namespace quern
