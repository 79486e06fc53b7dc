#include "tools/serve/structure_fields.h"

#include <fmt/format.h>

#include "ggml-like/json_guard.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

using GrammarPtr = std::shared_ptr<const Grammar>;

/// A schema, or the text of one.
GrammarPtr from_schema(const ordered_json& value, const std::string& field) {
    try {
        if (!value.is_string()) return Grammar::json(value);
        return Grammar::json(
            parse_json_ordered(value.get_ref<const std::string&>(), field, {.kind = ErrorKind::usage}));
    } catch (const Error& error) {
        throw FieldError(field, error.what(), "unsupported_schema");
    }
}

GrammarPtr from_choice(const ordered_json& value, const std::string& field) {
    std::vector<std::string> texts;
    if (!value.is_array()) throw wrong_value(field, "a list of texts", value);
    for (const ordered_json& text : value) {
        if (!text.is_string())
            throw FieldError(
                field, fmt::format("{} must be a list of texts, found {} in it", field, found_text(text)));
        texts.push_back(text.get<std::string>());
    }
    try {
        return Grammar::choice(std::move(texts));
    } catch (const Error& error) {
        throw FieldError(field, error.what());
    }
}

template <GrammarPtr (*Compile)(std::string_view)>
GrammarPtr from_text(const ordered_json& value, const std::string& field) {
    if (!value.is_string()) throw wrong_value(field, "a text", value);
    try {
        return Compile(value.get_ref<const std::string&>());
    } catch (const Error& error) {
        throw FieldError(field, error.what(), "unsupported_grammar");
    }
}

GrammarPtr any_object(const ordered_json&, const std::string&) { return Grammar::json({{"type", "object"}}); }

struct Source {
    const char* name;
    GrammarPtr (*read)(const ordered_json& value, const std::string& field);
};

constexpr Source kTopLevel[] = {
    {"json_schema", from_schema},          {"guided_json", from_schema},
    {"guided_choice", from_choice},        {"choice", from_choice},
    {"grammar", from_text<Grammar::gbnf>}, {"guided_grammar", from_text<Grammar::gbnf>},
    {"regex", from_text<Grammar::regex>},  {"guided_regex", from_text<Grammar::regex>}};
constexpr Source kStructuredOutputs[] = {{"json", from_schema},
                                         {"json_object", any_object},
                                         {"choice", from_choice},
                                         {"grammar", from_text<Grammar::gbnf>},
                                         {"regex", from_text<Grammar::regex>}};

bool is_absent(const ordered_json& value) { return value == false || value == ""; }

/// The one of these fields that is there.
template <size_t N>
void read_sources(Fields& f, const Source (&sources)[N], GrammarPtr& out, std::string& chosen) {
    for (const Source& source : sources) {
        const ordered_json* value = f.value(source.name);
        if (value == nullptr || is_absent(*value)) continue;
        const std::string field = f.full(source.name);
        if (out != nullptr)
            throw FieldError(field, fmt::format("{} and {} say both what the answer must be; only one may",
                                                chosen, field));
        out = source.read(*value, field);
        chosen = field;
    }
}

GrammarPtr read_response_format(const ordered_json& format) {
    Fields inner(format, "response_format");
    const std::string type = inner.string("type").value_or("text");
    if (type == "text") return nullptr;
    if (type != "json_schema" && type != "json_object")
        throw wrong_value("response_format.type", "text, json_object or json_schema", type);
    std::string field = "response_format.schema";
    const ordered_json* schema = inner.value("schema");
    if (const ordered_json* named = inner.object("json_schema")) {
        field = "response_format.json_schema.schema";
        schema = Fields(*named, "response_format.json_schema").value("schema");
    }
    if (schema != nullptr) return from_schema(*schema, field);
    if (type == "json_object") return any_object({}, {});
    throw FieldError("response_format.json_schema.schema", "response_format.json_schema.schema is missing");
}

}  // namespace

GrammarPtr read_structure(Fields& f) {
    GrammarPtr out;
    std::string chosen = "response_format";
    if (const ordered_json* format = f.object("response_format")) out = read_response_format(*format);
    read_sources(f, kTopLevel, out, chosen);
    if (const ordered_json* outputs = f.object("structured_outputs")) {
        Fields inner(*outputs, "structured_outputs");
        read_sources(inner, kStructuredOutputs, out, chosen);
        // of spaces there is one at most, and additional properties are closed where a schema says nothing
        inner.ignore({"disable_any_whitespace", "disable_additional_properties", "disable_fallback"});
        for (const std::string& name : inner.unknown())
            if (inner.value(name) != nullptr)
                throw FieldError(inner.full(name), inner.full(name) + " is not supported by this server",
                                 "unsupported_parameter");
    }
    return out;
}

}  // namespace quern
