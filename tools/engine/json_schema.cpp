#include "tools/engine/json_schema.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>

#include "ggml-like/check.h"
#include "tools/engine/json_schema_node.h"

namespace quern {

using nlohmann::ordered_json;
using Node = JsonSchema::Node;

namespace {

constexpr size_t kMaxNodes = 10000, kMaxProperties = 256, kMaxLiterals = 2000, kMaxAlternatives = 256;
constexpr int kMaxDepth = 64;

const std::map<std::string, unsigned>& type_bits() {
    static const std::map<std::string, unsigned> bits = {
        {"string", kString}, {"number", kNumber}, {"integer", kInteger}, {"boolean", kBoolean},
        {"null", kNull},     {"object", kObject}, {"array", kArray}};
    return bits;
}

bool is_annotation(const std::string& key) {
    constexpr std::array<const char*, 12> kAnnotations = {
        "title", "description", "default",    "examples", "format",    "$schema",
        "$id",   "$comment",    "deprecated", "readOnly", "writeOnly", "strict"};
    return std::find(kAnnotations.begin(), kAnnotations.end(), key) != kAnnotations.end();
}

int64_t count_of(const ordered_json& value, const std::string& where, const std::string& key) {
    if (!value.is_number_integer() || value < 0 || value > std::numeric_limits<int32_t>::max())
        FAIL(usage, "{}: '{}' must be a whole number from 0 to {}", where, key,
             std::numeric_limits<int32_t>::max());
    return value.get<int64_t>();
}

/// In how many ways a value's first byte may be read. Throws for a schema that is an alternative of itself.
size_t alternatives(const Node& node, std::map<const Node*, size_t>& known) {
    constexpr size_t kOpen = 0;
    const auto [at, fresh] = known.try_emplace(&node, kOpen);
    if (!fresh && at->second == kOpen) FAIL(usage, "$: a schema is among its own alternatives");
    if (!fresh) return at->second;
    size_t total = 1;
    for (const Node* other : node.any_of) total += alternatives(*other, known);
    if (total > kMaxAlternatives) FAIL(usage, "$: more than {} alternatives for one value", kMaxAlternatives);
    return known[&node] = total;
}

}  // namespace

class JsonSchema::Compiler {
  public:
    Compiler(JsonSchema& out, const ordered_json& root) : out_(out), root_(root) {}

    const Node* compile(const ordered_json& schema, const std::string& where, int depth) {
        if (depth > kMaxDepth) FAIL(usage, "{}: the schema is nested deeper than {}", where, kMaxDepth);
        if (schema.is_boolean() && schema.get<bool>()) return any();
        if (!schema.is_object()) FAIL(usage, "{}: a schema must be an object", where);
        if (const auto ref = schema.find("$ref"); ref != schema.end()) return reference(*ref, where, depth);
        if (const auto all = schema.find("allOf"); all != schema.end() && all->is_array() && all->size() == 1)
            return compile((*all)[0], where + ".allOf[0]", depth + 1);
        Node* node = add();
        fill(*node, schema, where, depth);
        return node;
    }

  private:
    Node* add() {
        if (out_.nodes_.size() >= kMaxNodes) FAIL(usage, "the schema has more than {} parts", kMaxNodes);
        out_.nodes_.push_back(std::make_unique<Node>());
        return out_.nodes_.back().get();
    }

    const Node* any() {
        if (any_ != nullptr) return any_;
        Node* node = add();
        any_ = node;
        node->types = kAnyType;
        node->additional = node->items = node;
        return node;
    }

    const Node* reference(const ordered_json& ref, const std::string& where, int depth) {
        if (!ref.is_string()) FAIL(usage, "{}: '$ref' must be a string", where);
        const auto name = ref.get<std::string>();
        if (const auto known = references_.find(name); known != references_.end()) return known->second;
        const ordered_json* target = name == "#" ? &root_ : nullptr;
        for (const char* place : {"$defs", "definitions"}) {
            const std::string prefix = std::string("#/") + place + "/";
            if (name.compare(0, prefix.size(), prefix) != 0 || !root_.contains(place)) continue;
            const auto found = root_[place].find(name.substr(prefix.size()));
            if (found != root_[place].end()) target = &*found;
        }
        if (target == nullptr)
            FAIL(usage, "{}: '$ref' to '{}' is not supported or leads nowhere", where, name);
        Node* node = add();  // known before it is filled: schemas may be recursive
        references_[name] = node;
        node->any_of = {compile(*target, name, depth + 1)};
        if (node->any_of.front() == node) FAIL(usage, "{}: '$ref' leads back to itself", where);
        return node;
    }

    void fill(Node& node, const ordered_json& schema, const std::string& where, int depth) {
        bool typed = false, shaped = false;
        for (const auto& [key, value] : schema.items()) {
            if (is_annotation(key) || key == "$defs" || key == "definitions") continue;
            if (key == "type") {
                node.types = types(value, where);
                typed = true;
            } else if (key == "enum" || key == "const") {
                literals(node, key == "const" ? ordered_json::array({value}) : value, where);
            } else if (key == "anyOf" || key == "oneOf") {
                if (!value.is_array() || value.empty()) FAIL(usage, "{}: '{}' must be a list", where, key);
                for (size_t i = 0; i < value.size(); ++i)
                    node.any_of.push_back(
                        compile(value[i], fmt::format("{}.{}[{}]", where, key, i), depth + 1));
            } else if (!shape(node, key, value, where, depth)) {
                FAIL(usage, "{}: '{}' is not supported", where, key);
            } else {
                shaped = true;
            }
        }
        if (!node.any_of.empty() && (typed || shaped))
            FAIL(usage, "{}: 'anyOf' is not supported beside other keywords", where);
        if (!typed && node.any_of.empty() && node.literals.empty()) {
            node.types = !schema.contains("properties") ? unsigned{kAnyType} : unsigned{kObject};
            if (schema.contains("items")) node.types = kArray;
        }
        if (node.items == nullptr) node.items = any();
        if (node.additional == nullptr && !node.closed && node.properties.empty()) node.additional = any();
        require(node, schema, where);
    }

    bool shape(Node& node, const std::string& key, const ordered_json& value, const std::string& where,
               int depth) {
        if (key == "properties") {
            if (!value.is_object()) FAIL(usage, "{}: 'properties' must be an object", where);
            if (value.size() > kMaxProperties)
                FAIL(usage, "{}: more than {} 'properties'", where, kMaxProperties);
            for (const auto& [name, property] : value.items()) {
                const std::string quoted = ordered_json(name).dump();
                node.properties.push_back({quoted.substr(1, quoted.size() - 2),
                                           compile(property, where + ".properties." + name, depth + 1),
                                           false});
            }
        } else if (key == "additionalProperties") {
            node.closed = value.is_boolean() && !value.get<bool>();
            if (!node.closed) node.additional = compile(value, where + "." + key, depth + 1);
        } else if (key == "items") {
            node.items = compile(value, where + ".items", depth + 1);
        } else if (key == "minItems") {
            node.min_items = count_of(value, where, key);
        } else if (key == "maxItems") {
            node.max_items = count_of(value, where, key);
        } else if (key == "minLength") {
            node.min_length = count_of(value, where, key);
        } else if (key == "maxLength") {
            node.max_length = count_of(value, where, key);
        } else {
            return key == "required";
        }
        return true;
    }

    static unsigned types(const ordered_json& value, const std::string& where) {
        unsigned bits = 0;
        for (const auto& name : value.is_array() ? value : ordered_json::array({value})) {
            const auto found =
                name.is_string() ? type_bits().find(name.get<std::string>()) : type_bits().end();
            if (found == type_bits().end()) FAIL(usage, "{}: 'type' {} is not supported", where, name.dump());
            bits |= found->second;
        }
        return bits;
    }

    static void literals(Node& node, const ordered_json& values, const std::string& where) {
        if (!values.is_array() || values.empty() || values.size() > kMaxLiterals)
            FAIL(usage, "{}: 'enum' must be a list of 1 to {} values", where, kMaxLiterals);
        for (const auto& value : values) node.literals.push_back(value.dump());
    }

    static void require(Node& node, const ordered_json& schema, const std::string& where) {
        const auto list = schema.find("required");
        if (list == schema.end()) return;
        if (!list->is_array()) FAIL(usage, "{}: 'required' must be a list", where);
        for (const auto& name : *list) {
            const std::string quoted = name.dump();
            const auto found = std::find_if(node.properties.begin(), node.properties.end(),
                                            [&](const Property& p) { return '"' + p.key + '"' == quoted; });
            if (found == node.properties.end())
                FAIL(usage, "{}: 'required' names {}, which is not among the properties", where, quoted);
            found->required = true;
        }
    }

    JsonSchema& out_;
    const ordered_json& root_;
    const Node* any_ = nullptr;
    std::map<std::string, const Node*> references_;
};

JsonSchema::~JsonSchema() = default;

JsonSchema::JsonSchema(const ordered_json& schema) {
    root_ = Compiler(*this, schema).compile(schema, "$", 0);
    std::map<const Node*, size_t> known;
    for (const auto& node : nodes_) alternatives(*node, known);
}

}  // namespace quern
