// Whether alternatives of a JSON Schema rule each other out.
#pragma once

#include <functional>

#include "ggml-like/json.h"

namespace quern {

/// What a $ref leads to. The result must outlive the call.
using SchemaTarget = std::function<const nlohmann::ordered_json&(const nlohmann::ordered_json& ref)>;

/// Whether no document fits two of them, so that oneOf means anyOf: by their types, by values that are listed, or by a property
/// that one of two objects requires and that has other types or values in the other. False if that is not plain to see, or
/// takes more than some ten thousand comparisons. `list`: an array of schemas.
bool exclude_each_other(const nlohmann::ordered_json& list, const SchemaTarget& target);

/// Values that are in both lists, in the order of the first.
nlohmann::ordered_json common_values(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b);
/// Types that both allow, as lists or single words: an integer is a number.
nlohmann::ordered_json common_types(const nlohmann::ordered_json& a, const nlohmann::ordered_json& b);
/// A list of one, or the list.
nlohmann::ordered_json as_list(const nlohmann::ordered_json& value);

}  // namespace quern
