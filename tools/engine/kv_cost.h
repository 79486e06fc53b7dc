// What a packed KV cache does to a model's answers, measured on a text as dense_cost.h does it.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "tools/engine/dense_cost.h"

namespace quern {

/// The text of dense_cost.h, again and again, as token ids: 8,192 on a device and 2,000 on the CPU, within the context.
std::vector<int32_t> kv_cost_tokens(const Model& model, const Backend& backend);

/// Engine options that read `tokens` with this cache; kv_type and kv_type_v as in EngineOptions.
EngineOptions reading_options(const Model& model, int64_t tokens, const std::string& kv_type = "auto",
                              const std::string& kv_type_v = {});

/// Reads the tokens with the cache that the backend computes in, then with this one. Throws Error(memory).
DenseCost measure_kv_cost(Model& model, Backend& backend, const std::vector<int32_t>& tokens,
                          const std::string& kv_type, const std::string& kv_type_v);

}  // namespace quern
