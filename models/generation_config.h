// generation_config.json: how the model's makers sample from it, and which tokens end an answer.
#pragma once

#include "models/checkpoint.h"
#include "models/model.h"

namespace quern {

/// `config_eos`: the ids of config.json, for checkpoints whose generation_config.json names none. Throws
/// Error(model) for values that are no numbers and for ids outside of the vocabulary.
GenerationDefaults read_generation_defaults(const Checkpoint& checkpoint,
                                            const std::vector<int32_t>& config_eos, int64_t vocab_rows);

}  // namespace quern
