// generation_config.json: how the model's makers sample, and which tokens end an answer.
#pragma once

#include "models/checkpoint.h"
#include "models/model.h"

namespace quern {

/// `config_eos`: the ids of config.json, used if generation_config.json names none. Throws Error(model) for values
/// that are not numbers and for ids outside the vocabulary.
GenerationDefaults read_generation_defaults(const Checkpoint& checkpoint,
                                            const std::vector<int32_t>& config_eos, int64_t vocab_rows);

}  // namespace quern
