// What config.json and hf_quant_config.json say about the quantization of a written checkpoint, as
// compressed-tensors, vLLM and ModelOpt read it.
#pragma once

#include <nlohmann/json.hpp>

#include "tools/quantize/write_plan.h"

namespace quern {

/// `quantization_config` of config.json; null if nothing is quantized. The KV cache scheme of the source
/// stays.
nlohmann::ordered_json quantization_config(const Checkpoint& source, const ModuleIndex& index,
                                           const WritePlan& plan);

/// hf_quant_config.json beside a `quantization_config` of ModelOpt's form.
nlohmann::ordered_json hf_quant_config(const Checkpoint& source, const ModuleIndex& index,
                                       const WritePlan& plan);

}  // namespace quern
