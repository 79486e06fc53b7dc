// References of a JSON Schema, led back to places in it.
#pragma once

#include <string>

#include "ggml-like/json.h"

namespace quern {

/// The schema with every $ref that leads into it as "#" and a JSON pointer: by pointer, percent-encoded or not, by $id, absolute
/// or relative to the $id around it, by $anchor or $dynamicAnchor. Others stay: is_external says which lead out of it.
/// What stands in enum, const, default and examples is no schema.
nlohmann::ordered_json with_local_refs(const nlohmann::ordered_json& schema);

/// Whether a $ref that with_local_refs left leads to another document, rather than to a place that is not there.
bool is_external(const std::string& ref);

}  // namespace quern
