#include "models/tool_arguments.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "models/json_depth.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

std::string_view skip_space(std::string_view s) {
    const size_t at = s.find_first_not_of(" \t\r\n");
    return at == std::string_view::npos ? std::string_view() : s.substr(at);
}

std::string lower(std::string_view s) {
    std::string out(s);
    for (char& c : out) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    return out;
}

/// The schema of one parameter, or null.
const Json* parameter_schema(const Json& tools, std::string_view function, const std::string& key) {
    if (!tools.is_array()) return nullptr;
    for (const Json& tool : tools) {
        const Json* f = &tool;
        if (tool.is_object() && tool.contains("function")) f = &tool["function"];
        if (!f->is_object() || !f->contains("name") || (*f)["name"] != std::string(function)) continue;
        const Json* at = f;
        for (const char* step : {"parameters", "properties"}) {
            if (!at->is_object() || !at->contains(step)) return nullptr;
            at = &(*at)[step];
        }
        return at->is_object() && at->contains(key) ? &(*at)[key] : nullptr;
    }
    return nullptr;
}

/// The first type that is not null, of "type" (a name or a list) or of the alternatives of anyOf and oneOf.
std::string schema_type(const Json* schema, int depth = 0) {
    if (schema == nullptr || !schema->is_object() || depth > 8) return "";
    if (const auto type = schema->find("type"); type != schema->end()) {
        if (type->is_string()) return type->get<std::string>();
        if (type->is_array())
            for (const Json& t : *type)
                if (t.is_string() && t != "null") return t.get<std::string>();
    }
    for (const char* key : {"anyOf", "oneOf"})
        if (const auto list = schema->find(key); list != schema->end() && list->is_array())
            for (const Json& option : *list)
                if (const std::string t = schema_type(&option, depth + 1); !t.empty() && t != "null")
                    return t;
    return "";
}

/// Python's literals as JSON: True, False, None, and strings in single quotes.
std::string python_to_json(std::string_view s) {
    std::string out;
    for (size_t i = 0; i < s.size();) {
        const char c = s[i];
        if (c == '\'' || c == '"') {
            out += '"';
            for (++i; i < s.size() && s[i] != c; ++i) {
                if (s[i] == '\\' && i + 1 < s.size() && s[i + 1] == '\'')
                    ++i;  // \' needs no escape in JSON
                else if (s[i] == '\\' && i + 1 < s.size())
                    out += s[i++];
                else if (s[i] == '"')
                    out += '\\';
                out += s[i];
            }
            out += '"';
            ++i;
        } else if (s.substr(i, 4) == "True") {
            out += "true", i += 4;
        } else if (s.substr(i, 5) == "False") {
            out += "false", i += 5;
        } else if (s.substr(i, 4) == "None") {
            out += "null", i += 4;
        } else {
            out += c, ++i;
        }
    }
    return out;
}

std::optional<Json> parse_value(std::string_view text) {
    if (!shallow_enough(text)) return {};
    Json value = Json::parse(text, nullptr, false);
    if (!value.is_discarded()) return value;
    const std::string other = python_to_json(text);
    if (!shallow_enough(other)) return {};
    value = Json::parse(other, nullptr, false);
    if (value.is_discarded()) return {};
    return value;
}

std::optional<Json> parse_number(std::string_view text, bool integer) {
    int64_t whole = 0;
    auto end = std::from_chars(text.data(), text.data() + text.size(), whole);
    if (end.ec == std::errc() && end.ptr == text.data() + text.size()) return Json(whole);
    double x = 0;
    end = std::from_chars(text.data(), text.data() + text.size(), x);
    if (end.ec != std::errc() || end.ptr != text.data() + text.size() || !std::isfinite(x)) return {};
    if (x == std::floor(x) && std::abs(x) < 9e15) return Json(static_cast<int64_t>(x));
    if (integer) return {};
    return Json(x);
}

/// A value in the type that the schema asks for; what does not fit stays a string.
Json coerce(std::string_view text, const std::string& type) {
    const Json string = std::string(text);
    if (type.empty() || type == "string") return string;
    const std::string_view bare = python_strip(text);
    const std::string low = lower(bare);
    if (low == "null" || low == "none") return nullptr;
    if (type == "integer" || type == "number") return parse_number(bare, type == "integer").value_or(string);
    if (type == "boolean") return low == "true";
    if (type == "object" || type == "array") return parse_value(bare).value_or(string);
    return string;
}

/// Cuts one value off `body`: up to </parameter>, or to the next parameter that begins on a line of its own.
std::string_view take_value(std::string_view& body) {
    constexpr std::string_view kEnd = "</parameter>";
    const size_t end = body.find(kEnd), next = body.find("\n<parameter=");
    const size_t at = std::min({end, next, body.size()});
    std::string_view value = body.substr(0, at);
    body.remove_prefix(at == end ? at + kEnd.size() : at);
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    return value;
}

}  // namespace

std::optional<ToolCall> parse_function(std::string_view body, const Json& tools) {
    const size_t close = body.find('>');
    if (close == std::string_view::npos || close == 0) return {};
    const std::string_view name = body.substr(0, close);
    if (name.find_first_of("<\n") != std::string_view::npos) return {};
    body.remove_prefix(close + 1);
    Json arguments = Json::object();
    while (!(body = skip_space(body)).empty()) {
        constexpr std::string_view kParameter = "<parameter=";
        if (!body.starts_with(kParameter)) return {};
        body.remove_prefix(kParameter.size());
        const size_t end = body.find('>');
        if (end == std::string_view::npos || end == 0) return {};
        const std::string key(body.substr(0, end));
        body.remove_prefix(end + 1);
        arguments[key] = coerce(take_value(body), schema_type(parameter_schema(tools, name, key)));
    }
    return ToolCall{.id = "", .name = std::string(name), .arguments = python_json(arguments)};
}

}  // namespace quern
