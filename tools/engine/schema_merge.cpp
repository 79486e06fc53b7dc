#include "tools/engine/schema_merge.h"

#include <algorithm>
#include <array>

#include "ggml-like/check.h"
#include "tools/engine/schema_exclusive.h"
#include "tools/engine/schema_refs.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr int kMaxDepth = 32;  // of references and combinations in one place

ordered_json all_of(const ordered_json& a, const ordered_json& b) {
    if (a == b || b == true) return a;
    if (a == true) return b;
    return {{"allOf", {a, b}}};
}

/// Elements by elements, then what comes after the shorter list.
ordered_json zipped(const ordered_json& a, const ordered_json& rest_of_a, const ordered_json& b,
                    const ordered_json& rest_of_b) {
    ordered_json out = ordered_json::array();
    for (size_t i = 0; i < std::max(a.size(), b.size()); ++i)
        out.push_back(all_of(i < a.size() ? a[i] : rest_of_a, i < b.size() ? b[i] : rest_of_b));
    return out;
}

/// Whether the first schema says something about properties that only the other one lists. They are let pass: closed schemas
/// are combined more often than meant so.
bool closes_out(const ordered_json& schema, const ordered_json& other) {
    if (!schema.contains("additionalProperties") || schema["additionalProperties"] == true) return false;
    if (!other.contains("properties") || !other["properties"].is_object()) return false;
    const ordered_json mine = schema.value("properties", ordered_json::object());
    const auto& listed = other["properties"].items();
    return std::any_of(listed.begin(), listed.end(), [&](const auto& p) { return !mine.contains(p.key()); });
}

bool is_low(const std::string& key) {
    return key == "minimum" || key == "exclusiveMinimum" || key == "minLength" || key == "minItems" ||
           key == "minProperties";
}

bool is_high(const std::string& key) {
    return key == "maximum" || key == "exclusiveMaximum" || key == "maxLength" || key == "maxItems" ||
           key == "maxProperties";
}

/// const as an enum of one, oneOf as anyOf, and the older forms of nullable and of tuples.
ordered_json modern(const ordered_json& schema) {
    ordered_json out = ordered_json::object();
    const auto combine = [&](const char* key, const ordered_json& value) {
        if (out.contains(key))
            out["allOf"].push_back({{key, value}});
        else
            out[key] = value;
    };
    for (const auto& [key, value] : schema.items()) {
        if (key == "allOf" && value.is_array())
            for (const auto& one : value) out["allOf"].push_back(one);
        else if (key == "const")
            combine("enum", ordered_json::array({value}));
        else if (key == "oneOf" || key == "anyOf")
            combine("anyOf", value);
        else if (key == "items" && value.is_array())
            out["prefixItems"] = value;
        else if (key == "additionalItems")
            out["items"] = value;
        else if (key == "enum")
            combine("enum", value);
        else if (key != "nullable" && !is_annotation(key))
            out[key] = value;
    }
    if (schema.contains("nullable") && schema["nullable"] == true) {
        if (out.contains("type")) {
            out["type"] = as_list(out["type"]);
            out["type"].push_back("null");
        }
        if (out.contains("enum")) out["enum"].push_back(nullptr);
        if (!out.contains("type") &&
            out.contains("$ref"))  // beside a reference it is meant as an alternative
            return {{"anyOf", {{{"$ref", out["$ref"]}}, {{"type", "null"}}}}};
    }
    return out;
}

}  // namespace

bool is_annotation(const std::string& key) {
    constexpr std::array<const char*, 22> kAnnotations = {"title",
                                                          "description",
                                                          "default",
                                                          "examples",
                                                          "example",
                                                          "$schema",
                                                          "$id",
                                                          "$anchor",
                                                          "$comment",
                                                          "$vocabulary",
                                                          "deprecated",
                                                          "readOnly",
                                                          "writeOnly",
                                                          "strict",
                                                          "discriminator",
                                                          "xml",
                                                          "externalDocs",
                                                          "contentEncoding",
                                                          "$defs",
                                                          "definitions",
                                                          "contentMediaType",
                                                          "markdownDescription"};
    return key.starts_with("x-") ||
           std::find(kAnnotations.begin(), kAnnotations.end(), key) != kAnnotations.end();
}

std::string brief(const ordered_json& value) {
    constexpr size_t kMost = 60;
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    const std::string text = value.dump(-1, ' ', true, ordered_json::error_handler_t::replace);
    return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

const ordered_json& SchemaMerger::target(const ordered_json& ref, const std::string& where) {
    static const ordered_json kAnything = true;
    if (!ref.is_string()) FAIL(usage, "{}: '$ref' must be a string, found {}", where, brief(ref));
    const auto& name = ref.get_ref<const std::string&>();
    if (name == "#") return root_;
    if (name.starts_with("#/")) {
        try {
            const ordered_json::json_pointer place(name.substr(1));
            if (root_.contains(place)) return root_.at(place);
        } catch (const ordered_json::exception&) {
        }
    }
    if (is_external(name)) {
        lost_.push_back(where + ".$ref");
        return kAnything;
    }
    FAIL(usage, "{}: '$ref' leads to '{}', which is not in this schema", where, name);
}

void SchemaMerger::add(ordered_json& to, const std::string& key, const ordered_json& value,
                       const std::string& where) {
    if (!to.contains(key)) {
        to[key] = value;
        return;
    }
    ordered_json& mine = to[key];
    if (key == "type") {
        mine = common_types(mine, value);
    } else if (key == "enum" && mine.is_array() && value.is_array()) {
        mine = common_values(mine, value);
    } else if (key == "required" && mine.is_array() && value.is_array()) {
        for (const auto& name : value)
            if (std::find(mine.begin(), mine.end(), name) == mine.end()) mine.push_back(name);
    } else if (key == "properties" && mine.is_object() && value.is_object()) {
        for (const auto& [name, schema] : value.items())
            mine[name] = mine.contains(name) ? all_of(mine[name], schema) : schema;
    } else if (key == "additionalProperties") {
        mine = mine == false || value == false ? ordered_json(false) : all_of(mine, value);
    } else if (key == "items") {
        mine = mine == false || value == false ? ordered_json(false) : all_of(mine, value);
    } else if (key == "anyOf" && mine.is_array() && value.is_array()) {
        if (mine.size() * value.size() > kMaxAlternatives)
            FAIL(usage, "{}: more than {} alternatives for one value", where, kMaxAlternatives);
        ordered_json pairs = ordered_json::array();
        for (const auto& a : mine)
            for (const auto& b : value) pairs.push_back(all_of(a, b));
        mine = pairs;
    } else if ((is_low(key) || is_high(key)) && mine.is_number() && value.is_number()) {
        if (is_low(key) ? value > mine : value < mine) mine = value;
    } else if (mine != value) {
        lost_.push_back(where + ".allOf." + key);
    }
}

ordered_json SchemaMerger::both(ordered_json a, const ordered_json& b, const std::string& where) {
    if (a == false || b == true) return a;
    if (a == true || b == false) return b;
    const auto part = [](const ordered_json& schema, const char* key, ordered_json otherwise) {
        return schema.contains(key) ? schema[key] : otherwise;
    };
    if (a.contains("prefixItems") || b.contains("prefixItems")) {
        const ordered_json none = ordered_json::array();
        const ordered_json mine = part(a, "prefixItems", none), other = part(b, "prefixItems", none);
        if (mine.is_array() && other.is_array())
            a["prefixItems"] = zipped(mine, part(a, "items", true), other, part(b, "items", true));
    }
    if (closes_out(a, b) || closes_out(b, a)) lost_.push_back(where + ".allOf.additionalProperties");
    for (const auto& [key, value] : b.items())
        if (key != "prefixItems") add(a, key, value, where);
    return a;
}

/// Without $ref and allOf.
ordered_json SchemaMerger::combined(const ordered_json& schema, const std::string& where, int depth) {
    if (depth > kMaxDepth)
        FAIL(usage, "{}: references and combinations nest deeper than {}", where, kMaxDepth);
    if (schema.is_boolean()) return schema;
    if (!schema.is_object())
        FAIL(usage, "{}: a schema must be an object, true or false, found {}", where, brief(schema));
    if (const auto one_of = schema.find("oneOf");
        one_of != schema.end() &&
        !exclude_each_other(
            *one_of, [&](const ordered_json& ref) -> const ordered_json& { return target(ref, where); }))
        lost_.push_back(where + ".oneOf");
    ordered_json out = modern(schema);
    std::vector<ordered_json> others;
    if (out.contains("$ref")) {
        others.push_back(combined(target(out["$ref"], where), where, depth + 1));
        out.erase("$ref");
    }
    if (out.contains("allOf")) {
        const ordered_json list = out["allOf"];
        out.erase("allOf");
        if (!list.is_array()) FAIL(usage, "{}: 'allOf' must be a list, found {}", where, brief(list));
        if (list.size() > kMaxAlternatives)
            FAIL(usage, "{}: more than {} in 'allOf'", where, kMaxAlternatives);
        for (const auto& one : list) others.push_back(combined(one, where, depth + 1));
    }
    for (const ordered_json& other : others) out = both(out, other, where);
    return out;
}

ordered_json SchemaMerger::flat(const ordered_json& schema, const std::string& where) {
    ordered_json out = combined(schema, where, 0);
    if (!out.is_object() || !out.contains("anyOf") || out.size() == 1) return out;
    if (!out["anyOf"].is_array())
        FAIL(usage, "{}: 'anyOf' must be a list, found {}", where, brief(out["anyOf"]));
    ordered_json alternatives = ordered_json::array(), base = out;
    base.erase("anyOf");
    for (const auto& one : out["anyOf"]) alternatives.push_back({{"allOf", {base, one}}});
    return {{"anyOf", alternatives}};
}

}  // namespace quern
