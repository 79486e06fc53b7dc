// The models and steps whose launches are tested.
#pragma once

#include <string>
#include <vector>

#include "launches/placed_model.h"

namespace quern::test {

/// The 35B and the 27B in all mixes, and the tiny models.
std::vector<ModelChoice> all_models();
/// Of each shape and each mix.
std::vector<ModelChoice> some_models();
/// Checkpoints in all formats, with matrices too small for most of the kernels.
std::vector<ModelChoice> small_checkpoints();
/// "qwen3.6-35b-a3b aeon"; with "dense fp8" where the dense weights are changed.
std::string name_of(const ModelChoice& choice);

/// Answers of 1 to 64 rows, one a sequence and several a sequence; prompts of 1 to 8192 rows, also of two sequences and
/// with all logits.
std::vector<BatchShape> all_steps(const PlacedModel& model);
/// One of each kind that launches something else.
std::vector<BatchShape> some_steps(const PlacedModel& model);
/// "answer, 8 rows of 8 sequences, 8 with logits"
std::string name_of(const BatchShape& shape);

}  // namespace quern::test
