#include "models/tool_schema.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <system_error>
#include <utility>

#include "models/python_text.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

/// Member of an object, or null.
const ordered_json* member(const ordered_json& value, const char* key) {
    if (!value.is_object()) return nullptr;
    const auto it = value.find(key);
    return it == value.end() ? nullptr : &*it;
}

const std::string* text_of(const ordered_json* value) {
    return value && value->is_string() ? value->get_ptr<const std::string*>() : nullptr;
}

ParameterType named_type(std::string_view name) {
    static constexpr std::pair<std::string_view, ParameterType> kNames[] = {
        {"integer", ParameterType::integer}, {"int", ParameterType::integer},
        {"number", ParameterType::number},   {"float", ParameterType::number},
        {"double", ParameterType::number},   {"boolean", ParameterType::boolean},
        {"bool", ParameterType::boolean},    {"object", ParameterType::container},
        {"dict", ParameterType::container},  {"array", ParameterType::container},
        {"list", ParameterType::container},  {"null", ParameterType::null}};
    for (const auto& [known, type] : kNames)
        if (name == known) return type;
    return ParameterType::string;
}

/// Reads the parameter schemas of one tool.
class SchemaReader {
  public:
    explicit SchemaReader(const ordered_json& parameters) {
        for (const char* place : {"$defs", "definitions"}) {
            const ordered_json* definitions = member(parameters, place);
            if (!definitions || !definitions->is_object()) continue;
            for (const auto& [name, schema] : definitions->items())
                definitions_.try_emplace("#/" + std::string(place) + "/" + name, &schema);
        }
    }

    ParameterType type(const ordered_json& schema, int depth = 0) const {
        if (depth > kMaxDepth) return ParameterType::string;
        if (const std::string* ref = text_of(member(schema, "$ref"))) {
            const auto it = definitions_.find(*ref);
            return it == definitions_.end() ? ParameterType::string : type(*it->second, depth + 1);
        }
        if (const ordered_json* names = member(schema, "type")) return listed_type(*names);
        for (const char* choice : {"anyOf", "oneOf", "allOf"})
            if (const ordered_json* choices = member(schema, choice); choices && choices->is_array())
                return chosen_type(*choices, depth);
        if (const ordered_json* value = member(schema, "const")) return type_of_value(*value);
        if (const ordered_json* values = member(schema, "enum"); values && values->is_array())
            for (const ordered_json& value : *values)
                if (!value.is_null()) return type_of_value(value);
        const bool container = member(schema, "properties") || member(schema, "items");
        return container ? ParameterType::container : ParameterType::string;
    }

  private:
    static constexpr int kMaxDepth = 8;  // definitions may refer to themselves

    static ParameterType type_of_value(const ordered_json& value) {
        if (value.is_number_integer()) return ParameterType::integer;
        if (value.is_number()) return ParameterType::number;
        if (value.is_boolean()) return ParameterType::boolean;
        if (value.is_null()) return ParameterType::null;
        return value.is_string() ? ParameterType::string : ParameterType::container;
    }

    static ParameterType listed_type(const ordered_json& names) {
        if (names.is_string()) return named_type(names.get_ref<const std::string&>());
        if (!names.is_array()) return ParameterType::string;
        ParameterType found = ParameterType::string;
        for (const ordered_json& name : names) {
            if (!name.is_string()) continue;
            found = named_type(name.get_ref<const std::string&>());
            if (found != ParameterType::null) break;
        }
        return found;
    }

    /// The first choice that is not null. Only the first few are looked at: choices that refer to lists of
    /// choices would else multiply.
    ParameterType chosen_type(const ordered_json& choices, int depth) const {
        ParameterType found = ParameterType::string;
        for (size_t i = 0; i < std::min<size_t>(choices.size(), 2); ++i) {
            found = type(choices[i], depth + 1);
            if (found != ParameterType::null) break;
        }
        return found;
    }

    std::unordered_map<std::string, const ordered_json*> definitions_;
};

bool equals_ignoring_case(std::string_view text, std::string_view lower) {
    return std::equal(text.begin(), text.end(), lower.begin(), lower.end(),
                      [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b; });
}

bool all_digits(std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

/// Digits without leading zeros, and never "-0".
std::string integer_text(bool negative, std::string_view digits) {
    const size_t first = digits.find_first_not_of('0');
    if (first == digits.npos) return "0";
    return (negative ? "-" : "") + std::string(digits.substr(first));
}

/// Empty if the text is no number that JSON can express.
std::string number_text(std::string_view text) {
    const bool negative = text.starts_with('-');
    if (negative || text.starts_with('+')) text.remove_prefix(1);
    if (all_digits(text)) return integer_text(negative, text);
    if (text.empty() || text.find_first_not_of("0123456789.eE+-") != text.npos || text[0] == '-') return {};
    double value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    if (result.ec != std::errc() || result.ptr != text.data() + text.size()) return {};
    if (negative) value = -value;
    constexpr double kExact = 9007199254740992.0;  // 2^53: integers of doubles are exact up to here
    if (std::abs(value) <= kExact && value == std::floor(value))
        return std::to_string(static_cast<int64_t>(value));
    return python_float(value);
}

std::string quoted(std::string_view text) {
    std::string out;
    append_python_json_string(out, text);
    return out;
}

}  // namespace

ToolSchemas::ToolSchemas(const ordered_json& tools) {
    if (!tools.is_array()) return;
    any_ = !tools.empty();
    for (const ordered_json& tool : tools) {
        const ordered_json* inner = member(tool, "function");
        const ordered_json& function = inner ? *inner : tool;
        const std::string* name = text_of(member(function, "name"));
        if (!name) continue;
        const auto [it, fresh] = tools_.try_emplace(*name);
        const ordered_json* parameters = member(function, "parameters");
        if (!fresh || !parameters) continue;
        const SchemaReader reader(*parameters);
        const ordered_json& object = parameters_object(*parameters);
        const ordered_json* properties = member(object, "properties");
        if (properties && properties->is_object())
            for (const auto& [key, schema] : properties->items())
                it->second.listed.try_emplace(key, reader.type(schema));
        const ordered_json* others = member(object, "additionalProperties");
        if (others && *others != false) it->second.others = reader.type(*others);
    }
}

const ordered_json& parameters_object(const ordered_json& parameters) {
    constexpr int kMaxRefs = 8;
    const ordered_json* at = &parameters;
    for (int i = 0; i < kMaxRefs; ++i) {
        const std::string* ref = text_of(member(*at, "$ref"));
        if (ref == nullptr || !ref->starts_with("#/")) break;
        try {
            const ordered_json::json_pointer place(ref->substr(1));
            if (!parameters.contains(place)) break;
            at = &parameters.at(place);
        } catch (const ordered_json::exception&) {
            break;
        }
    }
    return *at;
}

bool ToolSchemas::may_have(const std::string& tool, const std::string& parameter) const {
    const auto found = tools_.find(tool);
    if (found == tools_.end() || found->second.others) return true;
    const auto& listed = found->second.listed;
    return listed.empty() || listed.count(parameter) > 0;
}

ParameterType ToolSchemas::type(const std::string& tool, const std::string& parameter) const {
    const auto found = tools_.find(tool);
    if (found == tools_.end()) return ParameterType::string;
    const auto listed = found->second.listed.find(parameter);
    if (listed != found->second.listed.end()) return listed->second;
    return found->second.others.value_or(ParameterType::string);
}

std::string coerce_parameter(std::string_view text, ParameterType type) {
    if (type == ParameterType::string) return quoted(text);
    const std::string_view bare = python_strip(text);
    if (equals_ignoring_case(bare, "null") || equals_ignoring_case(bare, "none")) return "null";
    switch (type) {
        case ParameterType::integer:
        case ParameterType::number:
            if (std::string number = number_text(bare); !number.empty()) return number;
            break;
        case ParameterType::boolean:
            return equals_ignoring_case(bare, "true") ? "true" : "false";
        case ParameterType::container:
            if (const auto json = parse_ordered_json(bare)) return python_json(*json);
            if (const auto literal = parse_python_literal(bare)) return python_json(*literal);
            break;
        default:
            break;
    }
    return quoted(text);
}

}  // namespace quern
