// What the configuration files claim about a checkpoint, compared with the tensors that are there.
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
    int64_t weights_only = 0;  // of these two, declared W4A16 module by module: the scale is not used
    std::string mtp;           // "absent", or where its tensors are
    bool vision = false;

    /// "W4A4", "W4A16", "W4A4 in part", or "not NVFP4".
    const char* scheme() const;
};
Fingerprint fingerprint(const Checkpoint& checkpoint);

/// Adds problems to `audit` where layer_types contradict the layers' tensors, so that the checkpoint does not run, and
/// notes on all other contradictions: ignore lists, declared formats, token ids. The lists of ignored modules in
/// real checkpoints are unreliable, so the tensors decide.
void check_config(const Checkpoint& checkpoint, const Qwen36MoeConfig& config, Audit& audit);

/// Adds notes on special token ids in the configurations that differ from the tokenizer's.
void check_token_ids(const Checkpoint& checkpoint, const Tokenizer& tokenizer,
                     const std::vector<int32_t>& eos_ids, Audit& audit);

}  // namespace quern
