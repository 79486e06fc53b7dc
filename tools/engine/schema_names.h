// propertyNames of a JSON Schema in other words.
#pragma once

#include "ggml-like/json.h"

namespace quern {

/// A schema without combinations (SchemaMerger::flat) whose propertyNames, where that is possible, is said by the properties,
/// patterns and additionalProperties that it allows: names that are listed, that match an expression, or any. Where it is not
/// (both listed properties and an expression, lengths), it stays.
nlohmann::ordered_json without_property_names(nlohmann::ordered_json schema);

}  // namespace quern
