// The type of a tool's parameter, and its value as JSON from the text that the model wrote.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "ggml-like/json.h"

namespace quern {

enum class ParameterType { string, integer, number, boolean, container, null };

/// The parameter types of a request's tools. Copies what it needs; linear in the size of the tools.
class ToolSchemas {
  public:
    /// An array of {"type": "function", "function": {"name", "parameters"}} or of {"name", "parameters"};
    /// anything else in it, or in a schema, is ignored. If several tools have one name, the first counts.
    explicit ToolSchemas(const nlohmann::ordered_json& tools);

    /// Whether there is any tool, understood or not.
    bool any() const { return any_; }
    /// False only if the tool lists its parameters, this is none of them and additionalProperties does not allow others.
    bool may_have(const std::string& tool, const std::string& parameter) const;
    /// `type` of the parameter's schema; of a list of types the first that is not null, of anyOf, oneOf or allOf the
    /// same among its first two. A local $ref is followed. A schema with properties or items and no type is a
    /// container; one with an enum or const and no type has that of the first value that is not null. Parameters that are
    /// not listed have that of additionalProperties. string if the tool, the parameter or the type is unknown.
    ParameterType type(const std::string& tool, const std::string& parameter) const;

  private:
    struct Parameters {
        std::unordered_map<std::string, ParameterType> listed;
        std::optional<ParameterType> others;  // what additionalProperties says of them
    };
    std::unordered_map<std::string, Parameters> tools_;
    bool any_ = false;
};

/// What a tool's parameters say: the schema itself, or what it refers to within itself, as generators write it for types that
/// contain themselves.
const nlohmann::ordered_json& parameters_object(const nlohmann::ordered_json& parameters);

/// The JSON text for a value of this type:
/// - string: the text as it is.
/// - any other type: "null" and "none" in any case are null.
/// - integer, number: the number, with 2.0 as 2; exact whatever its size. Text that is no number: a string.
/// - boolean: true for "true" in any case, else false.
/// - container (object, array): the JSON, else the Python literal, that the text is; else a string.
/// Space around all but strings is ignored.
std::string coerce_parameter(std::string_view text, ParameterType type);

}  // namespace quern
