// What config.json and hf_quant_config.json say about the quantization of a written checkpoint, in the form that
// compressed-tensors, vLLM and ModelOpt read.
#pragma once

#include "ggml-like/json.h"
#include "tools/quantize/write_plan.h"

namespace quern {

/// `quantization_config` of config.json, with the KV cache scheme of the source; null if nothing is quantized.
nlohmann::ordered_json quantization_config(const Checkpoint& source, const ModuleIndex& index,
                                           const WritePlan& plan);

/// hf_quant_config.json, for ModelOpt's format.
nlohmann::ordered_json hf_quant_config(const Checkpoint& source, const ModuleIndex& index,
                                       const WritePlan& plan);

}  // namespace quern
