#include "tools/engine/schema_names.h"

#include <algorithm>

namespace quern {

using nlohmann::ordered_json;

namespace {

/// The names that an enum or a const allows; null: it has none.
ordered_json listed_names(const ordered_json& names) {
    ordered_json out =
        names.contains("const") ? ordered_json::array({names["const"]}) : names.value("enum", ordered_json());
    if (out.is_array())
        out.erase(std::remove_if(out.begin(), out.end(), [](const auto& n) { return !n.is_string(); }),
                  out.end());
    return out;
}

/// Whether the schema of names has no other keywords than `allowed` and the type, which is that of a string.
bool says_only(const ordered_json& names, std::initializer_list<const char*> allowed) {
    return std::all_of(names.items().begin(), names.items().end(), [&](const auto& item) {
        return (item.key() == "type" && item.value() == "string") ||
               std::find(allowed.begin(), allowed.end(), item.key()) != allowed.end();
    });
}

ordered_json with_listed(ordered_json schema, const ordered_json& names) {
    const ordered_json others = schema.value("additionalProperties", ordered_json(true)),
                       before = schema.value("properties", ordered_json::object());
    ordered_json properties = ordered_json::object();
    for (const auto& name : names) {
        const auto key = name.get<std::string>();
        if (before.contains(key))
            properties[key] = before[key];
        else if (others != false)
            properties[key] = others;
    }
    schema["properties"] = properties;
    schema["additionalProperties"] = false;
    return schema;
}

}  // namespace

ordered_json without_property_names(ordered_json schema) {
    const auto found = schema.is_object() ? schema.find("propertyNames") : schema.end();
    if (!schema.is_object() || found == schema.end()) return schema;
    const ordered_json names = *found;
    ordered_json rest = schema;
    rest.erase("propertyNames");
    if (names == true || (names.is_object() && says_only(names, {}))) return rest;
    if (!names.is_object() || rest.contains("patternProperties")) return schema;
    if (says_only(names, {"enum", "const"}) && !(names.contains("enum") && names.contains("const")))
        if (const ordered_json list = listed_names(names); list.is_array()) return with_listed(rest, list);
    if (says_only(names, {"pattern"}) && names["pattern"].is_string() && !rest.contains("properties")) {
        rest["patternProperties"] = {
            {names["pattern"].get<std::string>(), rest.value("additionalProperties", ordered_json(true))}};
        rest["additionalProperties"] = false;
        return rest;
    }
    return schema;
}

}  // namespace quern
