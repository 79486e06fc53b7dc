#include "tools/engine/schema_merge.h"

#include <algorithm>
#include <array>

#include "ggml-like/check.h"
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

ordered_json common(const ordered_json& a, const ordered_json& b) {
    ordered_json out = ordered_json::array();
    for (const auto& value : a)
        if (std::find(b.begin(), b.end(), value) != b.end()) out.push_back(value);
    return out;
}

ordered_json as_list(const ordered_json& value) {
    return value.is_array() ? value : ordered_json::array({value});
}

/// Types that both allow: an integer is a number.
ordered_json common_types(const ordered_json& a, const ordered_json& b) {
    const ordered_json one = as_list(a), other = as_list(b);
    ordered_json out = common(one, other);
    const auto has = [](const ordered_json& list, const char* type) {
        return std::find(list.begin(), list.end(), type) != list.end();
    };
    const bool integer =
        (has(one, "integer") && has(other, "number")) || (has(one, "number") && has(other, "integer"));
    if (integer && !has(out, "number") && !has(out, "integer")) out.push_back("integer");
    return out;
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

const ordered_json& SchemaMerger::target(const ordered_json& ref, const std::string& where) {
    static const ordered_json kAnything = true;
    if (!ref.is_string()) FAIL(usage, "{}: '$ref' must be a string", where);
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
        mine = common(mine, value);
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

/// Whether no document fits two of them, so that oneOf is anyOf. False if that is not plain to see.
bool SchemaMerger::exclude_each_other(const ordered_json& list, const std::string& where) {
    if (!list.is_array() || list.size() > kMaxAlternatives) return true;  // an error of its own
    for (size_t i = 0; i < list.size(); ++i)
        for (size_t j = 0; j < i; ++j)
            if (!exclude_each_other(list[j], list[i], where, true)) return false;
    return true;
}

/// `by_tag`: also objects one of which requires a property that has other values in the other one.
bool SchemaMerger::exclude_each_other(ordered_json a, ordered_json b, const std::string& where, bool by_tag) {
    for (ordered_json* schema : {&a, &b})
        for (int depth = 0; depth < kMaxDepth && schema->is_object() && schema->contains("$ref"); ++depth)
            *schema = ordered_json(target((*schema)["$ref"], where));
    if (a == false || b == false) return true;
    if (!a.is_object() || !b.is_object()) return false;
    const auto values = [](const ordered_json& schema) {
        return schema.contains("const") ? ordered_json::array({schema["const"]})
                                        : schema.value("enum", ordered_json());
    };
    const ordered_json mine = values(a), other = values(b);
    if (mine.is_array() && other.is_array()) return common(mine, other).empty();
    if (a.contains("type") && b.contains("type") && common_types(a["type"], b["type"]).empty()) return true;
    const auto tag = [&](const ordered_json& one, const ordered_json& two) {  // one has it, two has another
        if (!one.contains("required") || !one["required"].is_array()) return false;
        const ordered_json none = ordered_json::object();
        const ordered_json here = one.value("properties", none), there = two.value("properties", none);
        return std::any_of(one["required"].begin(), one["required"].end(), [&](const ordered_json& key) {
            if (!key.is_string()) return false;
            const auto x = here.find(key.get<std::string>()), y = there.find(key.get<std::string>());
            return x != here.end() && y != there.end() && exclude_each_other(*x, *y, where, false);
        });
    };
    const auto is_object = [](const ordered_json& schema) {
        return schema.contains("type") ? schema["type"] == "object" : schema.contains("properties");
    };
    return by_tag && is_object(a) && is_object(b) && (tag(a, b) || tag(b, a));
}

/// Without $ref and allOf.
ordered_json SchemaMerger::combined(const ordered_json& schema, const std::string& where, int depth) {
    if (depth > kMaxDepth)
        FAIL(usage, "{}: references and combinations nest deeper than {}", where, kMaxDepth);
    if (schema.is_boolean()) return schema;
    if (!schema.is_object()) FAIL(usage, "{}: a schema must be an object, true or false", where);
    if (schema.contains("oneOf") && !exclude_each_other(schema["oneOf"], where))
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
        if (!list.is_array()) FAIL(usage, "{}: 'allOf' must be a list", where);
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
    if (!out["anyOf"].is_array()) FAIL(usage, "{}: 'anyOf' must be a list", where);
    ordered_json alternatives = ordered_json::array(), base = out;
    base.erase("anyOf");
    for (const auto& one : out["anyOf"]) alternatives.push_back({{"allOf", {base, one}}});
    return {{"anyOf", alternatives}};
}

}  // namespace quern
