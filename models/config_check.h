// What the configuration files claim about a checkpoint, held against the tensors that are there.
#pragma once

#include <cstdint>
#include <string>

#include "models/checkpoint.h"
#include "models/qwen3_6_moe.h"
#include "models/tensor_use.h"

namespace quern {

class Tokenizer;

/// Who made the checkpoint, as far as its files tell.
struct Fingerprint {
    std::string producer;       // "llm-compressor (compressed-tensors 0.13.0)", "modelopt 0.43.0", ...
    int64_t nvfp4_modules = 0;  // of the text model
    int64_t with_input_scale = 0;
    std::string mtp;  // "absent", or where its tensors are
    bool vision = false;

    /// "W4A4", "W4A16", "W4A4 in part", or "not NVFP4".
    const char* scheme() const;
};
Fingerprint fingerprint(const Checkpoint& checkpoint);

/// Adds to `audit` the problems that must keep the checkpoint from running (layer_types against the layers'
/// tensors) and notes on all other contradictions: ignore lists, declared formats, token ids. The lists of
/// ignored modules in real checkpoints are unreliable, so the tensors decide and the lists are only noted.
void check_config(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, Audit& audit);

/// Notes on special token ids of the configurations that are not those of the tokenizer.
void check_token_ids(const Checkpoint& checkpoint, const Tokenizer& tokenizer,
                     const std::vector<int32_t>& eos_ids, Audit& audit);

}  // namespace quern
