// Names of KV formats, as flags have them.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "models/model.h"

namespace quern {

/// The text of --help: what names mean.
inline constexpr const char* kKvTypesHelp =
    "KV cache: auto, bf16, f16, f32, fp8, nvfp4, tq4, k8v4 (keys fp8, values tq4); what it costs is measured "
    "and "
    "said, and too much is refused";

/// `k`: auto, bf16, f16, f32, fp8 (fp8_e4m3, q8), nvfp4, tq4 (turboquant_4bit_nc) or k8v4 (turboquant_k8v4),
/// which is both; `v`: the same for values; empty: as `k`. auto: what the backend computes in. Throws Error(usage).
KvTypes parse_kv_types(std::string_view k, std::string_view v, DType automatic);
/// Throws Error(usage) that names the flag.
void check_kv_type(std::string_view name, std::string_view flag);

/// "fp8"; of keys and values that differ: "fp8/nvfp4", or "k8v4".
std::string kv_name(DType type);
std::string kv_name(const KvTypes& types);

}  // namespace quern
