// Reading what a checkpoint's configuration says about its quantization.
#pragma once

#include <string>

#include "ggml-like/json.h"
#include "models/checkpoint.h"

namespace quern {

/// From config.json and hf_quant_config.json (null when absent); `where` names the directory in messages.
/// Error(model) for a method that quern does not read, and for rotated or sparse weights, which would otherwise load
/// and compute nonsense.
QuantInfo read_quant_info(const nlohmann::json& config, const nlohmann::json& hf_quant,
                          const std::string& where);

}  // namespace quern
