// What `quern quantize-inspect` prints about an inspection.
#pragma once

#include <string>

#include "ggml-like/json.h"
#include "tools/common/inspection.h"
#include "tools/common/output.h"

namespace quern {

/// Tensors whose name matches `pattern`, a line each. Throws Error(usage) for an invalid regular expression.
void print_tensors(const Inspection& in, const std::string& pattern, Output& out);
/// Parts of the model by format, the account of all tensors and bytes, the verdict.
void print_summary(const Inspection& in, Output& out);
/// Who made it, how it is meant to be computed, every tensor in one class by role, the verdict.
void print_audit(const Inspection& in, Output& out);
/// Everything; `pattern` selects the tensors listed, empty: all.
nlohmann::ordered_json inspection_json(const Inspection& in, const std::string& pattern);

}  // namespace quern
