#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "ggml-like/check.h"
#include "tools/engine/grammar_node.h"
#include "tools/engine/schema_compiler.h"
#include "tools/engine/schema_names.h"
#include "tools/engine/schema_refs.h"
#include "tools/engine/string_formats.h"

namespace quern {

using nlohmann::ordered_json;
using Node = Grammar::Node;

namespace {

constexpr size_t kMaxNodes = 10000, kMaxLiterals = 2000, kMaxWork = 32u << 20;
constexpr int kMaxDepth = 64;

const std::map<std::string, unsigned>& type_bits() {
    static const std::map<std::string, unsigned> bits = {
        {"string", kString}, {"number", kNumber}, {"integer", kInteger}, {"boolean", kBoolean},
        {"null", kNull},     {"object", kObject}, {"array", kArray}};
    return bits;
}

unsigned type_of(const ordered_json& value) {
    if (value.is_string()) return kString;
    if (value.is_number_integer()) return kInteger | kNumber;
    if (value.is_number()) return kNumber;
    if (value.is_boolean()) return kBoolean;
    if (value.is_null()) return kNull;
    return value.is_object() ? kObject : kArray;
}

int64_t count_of(const ordered_json& value, const std::string& where, const std::string& key) {
    const double count = value.is_number() ? value.get<double>() : -1;
    if (!(count >= 0) || count != std::floor(count))
        FAIL(usage, "{}: '{}' must be a whole number from 0 on, found {}", where, key, brief(value));
    return static_cast<int64_t>(std::min<double>(count, std::numeric_limits<int32_t>::max()));
}

/// Follows alternatives only; a schema that is among its own never begins.
size_t count_alternatives(Node& node) {
    constexpr int kOpen = -1;
    if (node.state == kOpen) FAIL(usage, "$: a schema is among its own alternatives");
    if (node.state > 0) return static_cast<size_t>(node.state);
    node.state = kOpen;
    size_t total = 1;
    for (const Node* other : node.any_of) total += count_alternatives(const_cast<Node&>(*other));
    if (total > SchemaMerger::kMaxAlternatives)
        FAIL(usage, "$: more than {} alternatives for one value", SchemaMerger::kMaxAlternatives);
    node.state = static_cast<int>(total);
    return total;
}

/// Whether a key of an expression may also be read as another one's, as a listed or as an additional one: then it is any of
/// these, not all.
bool keys_are_ambiguous(const Node& node) {
    constexpr size_t kMaxPatterns = 16;  // each is compared with each
    const auto& patterns = node.patterns;
    if (patterns.size() > kMaxPatterns) return true;
    if (!patterns.empty() && (node.additional != nullptr || !node.properties.empty())) return true;
    for (size_t i = 0; i < patterns.size(); ++i)
        for (size_t j = 0; j < i; ++j)
            if (may_share_a_text(*patterns[i].key->automaton, *patterns[j].key->automaton)) return true;
    return false;
}

/// Heights from those of what is inside. True if one became smaller.
bool settle_height(Node& node) {
    int object = 1, array = 1;
    for (const Property& p : node.properties)
        if (p.required) object = std::max(object, 1 + p.node->height);
    for (int64_t i = 0;
         i < std::min<int64_t>(node.min_items, static_cast<int64_t>(node.prefix_items.size()) + 1); ++i)
        array = std::max(array, 1 + (node.item(i) != nullptr ? node.item(i)->height : kNever));
    if (node.min_items > node.max_items) array = kNever;
    const bool number =
        node.types & (kNumber | kInteger) && (!node.bounds || node.bounds->any((node.types & kNumber) == 0));
    const bool text = number || node.types & (kBoolean | kNull) || node.automaton != nullptr ||
                      (node.types & kString && node.min_length <= node.max_length) || !node.literals.empty();
    node.object_height = node.types & kObject ? std::min(object, kNever) : kNever;
    node.array_height = node.types & kArray ? std::min(array, kNever) : kNever;
    int height = std::min({text ? 1 : kNever, node.object_height, node.array_height});
    for (const Node* other : node.any_of) height = std::min(height, other->height);
    if (node.text != nullptr || node.may_be_empty) height = 1;
    if (node.value != nullptr) height = std::min(height, node.value->height);
    return height < std::exchange(node.height, height);
}

}  // namespace

bool utf8_step(uint8_t& state, unsigned char byte) {
    // 1 to 3: so many bytes to come; 4 to 7: after E0, ED, F0 and F4, where not all bytes may follow
    constexpr struct {
        unsigned char low, high;
        uint8_t next;
    } kAfter[] = {{},
                  {0x80, 0xBF, 0},
                  {0x80, 0xBF, 1},
                  {0x80, 0xBF, 2},
                  {0xA0, 0xBF, 1},
                  {0x80, 0x9F, 1},
                  {0x90, 0xBF, 2},
                  {0x80, 0x8F, 2}};
    if (state != 0) {
        if (byte < kAfter[state].low || byte > kAfter[state].high) return false;
        state = kAfter[state].next;
        return true;
    }
    if (byte < 0x80) return true;
    if (byte < 0xC2 || byte > 0xF4) return false;
    state = byte < 0xE0    ? 1
            : byte == 0xE0 ? 4
            : byte == 0xED ? 5
            : byte < 0xF0  ? 2
            : byte == 0xF0 ? 6
            : byte == 0xF4 ? 7
                           : 3;
    return true;
}

unsigned read_types(const ordered_json& value, const std::string& where) {
    unsigned bits = 0;
    for (const auto& name : value.is_array() ? value : ordered_json::array({value})) {
        const auto found = name.is_string() ? type_bits().find(name.get<std::string>()) : type_bits().end();
        if (found == type_bits().end())
            FAIL(usage,
                 "{}: 'type' is {}; there are string, number, integer, boolean, null, object and array",
                 where, name.dump());
        bits |= found->second;
    }
    return bits;
}

std::string json_text(const std::string& text) {
    std::string quoted = ordered_json(text).dump(-1, ' ', false, ordered_json::error_handler_t::replace);
    return quoted.substr(1, quoted.size() - 2);
}

const Node* SchemaCompiler::compile(const ordered_json& schema, const std::string& where, int depth) {
    if (depth > kMaxDepth) FAIL(usage, "{}: the schema is nested deeper than {}", where, kMaxDepth);
    const std::string text = schema.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
    work_ += text.size();
    if (work_ > kMaxWork) FAIL(usage, "{}: the schema is too large to be enforced", where);
    const auto [at, fresh] = known_.try_emplace(text, nullptr);
    if (!fresh) return at->second;
    if (out_.nodes_.size() >= kMaxNodes) FAIL(usage, "the schema has more than {} parts", kMaxNodes);
    Node* node = out_.add();
    at->second = node;  // before it is filled: schemas may be recursive
    const ordered_json flat = without_property_names(merger_.flat(schema, where));
    if (flat == false) return node;
    if (flat == true)
        fill(*node, ordered_json::object(), where, depth);
    else if (flat.contains("anyOf"))
        alternatives(*node, flat["anyOf"], where, depth);
    else
        fill(*node, flat, where, depth);
    return node;
}

void SchemaCompiler::alternatives(Node& node, const ordered_json& list, const std::string& where, int depth) {
    if (!list.is_array() || list.empty())
        FAIL(usage, "{}: 'anyOf' must be a list, found {}", where,
             list.is_array() ? "an empty one" : brief(list));
    for (size_t i = 0; i < list.size(); ++i) {
        const Node* one = compile(list[i], fmt::format("{}.anyOf[{}]", where, i), depth + 1);
        if (std::find(node.any_of.begin(), node.any_of.end(), one) == node.any_of.end())
            node.any_of.push_back(one);
    }
}

void SchemaCompiler::fill(Node& node, const ordered_json& schema, const std::string& where, int depth) {
    unsigned types = !schema.contains("properties") ? unsigned{kAnyType} : unsigned{kObject};
    if (schema.contains("items") || schema.contains("prefixItems")) types = kArray;
    if (schema.contains("type")) types = read_types(schema["type"], where);
    const bool listed = schema.contains("enum");
    if (listed) literals(node, schema["enum"], types, where);
    node.types = listed ? 0 : types;
    for (const auto& [key, value] : schema.items()) {
        if (key == "type" || key == "enum" || (!listed && key == "required")) continue;
        if (listed || !(shape(node, key, value, where, depth) || bound(node, key, value)))
            note(where + "." + key);
    }
    if (listed) return;
    strings(node, schema, where);
    if (keys_are_ambiguous(node)) note(where + ".patternProperties");
    if (node.items == nullptr && !schema.contains("items"))
        node.items = types & kArray ? compile(true, where, depth) : nullptr;
    if (!schema.contains("additionalProperties") && !schema.contains("properties") && node.patterns.empty())
        node.additional = types & kObject ? compile(true, where, depth) : nullptr;
    require(node, schema, where, depth);
    std::sort(node.properties.begin(), node.properties.end(),
              [](const Property& a, const Property& b) { return a.key < b.key; });
}

bool SchemaCompiler::shape(Node& node, const std::string& key, const ordered_json& value,
                           const std::string& where, int depth) {
    const auto inner = [&](const ordered_json& schema, const std::string& name) -> const Node* {
        return schema == false ? nullptr : compile(schema, where + "." + name, depth + 1);
    };
    if (key == "properties") {
        if (!value.is_object())
            FAIL(usage, "{}: 'properties' must be an object, found {}", where, brief(value));
        if (value.size() > kMaxProperties)
            FAIL(usage, "{}: more than {} 'properties'", where, kMaxProperties);
        for (const auto& [name, schema] : value.items())
            node.properties.push_back(
                {json_text(name), compile(schema, where + ".properties." + name, depth + 1), false});
    } else if (key == "additionalProperties") {
        node.additional = inner(value, key);
    } else if (key == "items") {
        node.items = inner(value, key);
    } else if (key == "prefixItems") {
        if (!value.is_array()) FAIL(usage, "{}: 'prefixItems' must be a list, found {}", where, brief(value));
        for (size_t i = 0; i < value.size(); ++i)
            node.prefix_items.push_back(
                compile(value[i], fmt::format("{}.prefixItems[{}]", where, i), depth + 1));
    } else if (key == "minItems") {
        node.min_items = count_of(value, where, key);
    } else if (key == "maxItems") {
        node.max_items = count_of(value, where, key);
    } else if (key == "minLength") {
        node.min_length = count_of(value, where, key);
    } else if (key == "maxLength") {
        node.max_length = count_of(value, where, key);
    } else if (key == "patternProperties" && value.is_object()) {
        for (const auto& [regex, schema] : value.items()) add_pattern(node, regex, schema, where, depth);
    } else {
        return key == "pattern" || key == "format";  // see strings
    }
    return true;
}

/// Bounds of numbers. False for a keyword that is none of them, or says what is not enforced.
bool SchemaCompiler::bound(Node& node, const std::string& key, const ordered_json& value) {
    const bool low = key == "minimum" || key == "exclusiveMinimum",
               high = key == "maximum" || key == "exclusiveMaximum";
    if ((!low && !high && key != "multipleOf") || !value.is_number()) return false;
    NumberBounds bounds = node.bounds.value_or(NumberBounds{});
    const double number = value.get<double>();
    const bool open = key.starts_with("exclusive");
    if (low && (number > bounds.low || (number == bounds.low && open))) {
        bounds.low = number;
        bounds.low_open = open;
    }
    if (high && (number < bounds.high || (number == bounds.high && open))) {
        bounds.high = number;
        bounds.high_open = open;
    }
    if (key == "multipleOf") {
        const double parts = 1 / number;
        int digits = 0;
        while (digits < 9 && std::abs(std::pow(10.0, digits) - parts) > 1e-9 * parts) ++digits;
        if (number >= 1 && number == std::floor(number) && number <= 1e15)
            bounds.multiple = static_cast<int64_t>(number);
        else if (number > 0 && digits < 9)
            bounds.fraction_digits = digits;
        else
            return false;
    }
    node.bounds = bounds;
    return true;
}

/// The properties whose keys the expression matches. One that cannot be read, and one that listed keys match, too, is noted.
void SchemaCompiler::add_pattern(Node& node, const std::string& regex, const ordered_json& schema,
                                 const std::string& where, int depth) {
    const std::string place = where + ".patternProperties." + regex;
    try {
        Node* key = out_.add();
        key->automaton = std::make_shared<const Automaton>(json_string(regex, false, true));
        const Node* value = schema == false ? nullptr : compile(schema, place, depth + 1);
        if (value != nullptr)
            node.patterns.push_back({key, value});
        else
            note(place);
    } catch (const Error& error) {
        if (!std::string(error.what()).starts_with("pattern:")) throw;
        note(place);
    }
}

/// Strings that an expression or a format describes, as an alternative of their own.
void SchemaCompiler::strings(Node& node, const ordered_json& schema, const std::string& where) {
    const auto text = [&](const char* key) {
        return schema.contains(key) && schema[key].is_string() ? schema[key].get<std::string>()
                                                               : std::string();
    };
    const std::string pattern = text("pattern"), format = text("format");
    if (!schema.contains("pattern") && !schema.contains("format")) return;
    const char* known = format_regex(format);
    try {
        if ((node.types & kString) && (schema.contains("pattern") ? !pattern.empty() : known != nullptr)) {
            const bool by_pattern = schema.contains("pattern");
            Node* own = out_.add();
            own->automaton =
                std::make_shared<const Automaton>(json_string(by_pattern ? pattern : known, !by_pattern));
            node.any_of.push_back(own);
            node.types &= ~unsigned{kString};
            for (const char* length : {"minLength", "maxLength"})
                if (schema.contains(length)) note(where + "." + length);
            if (by_pattern && !format.empty()) note(where + ".format");
            return;
        }
    } catch (const Error&) {  // what the expression has is not supported
    }
    for (const char* key : {"pattern", "format"})
        if (schema.contains(key) && (node.types & kString)) note(where + "." + key);
}

void SchemaCompiler::literals(Node& node, const ordered_json& values, unsigned types,
                              const std::string& where) {
    if (!values.is_array() || values.size() > kMaxLiterals)
        FAIL(usage, "{}: 'enum' must be a list of at most {} values, found {}", where, kMaxLiterals,
             values.is_array() ? fmt::format("{}", values.size()) : brief(values));
    std::set<std::string> texts;
    for (const auto& value : values)
        if (type_of(value) & types)
            texts.insert(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
    node.literals.assign(texts.begin(), texts.end());
}

/// A required property that is not described may be anything that additional ones may be; if nothing is said of those,
/// anything.
void SchemaCompiler::require(Node& node, const ordered_json& schema, const std::string& where, int depth) {
    const auto list = schema.find("required");
    if (list == schema.end()) return;
    if (!list->is_array()) FAIL(usage, "{}: 'required' must be a list, found {}", where, brief(*list));
    for (const auto& name : *list) {
        if (!name.is_string())
            FAIL(usage, "{}: 'required' must be a list of names, found {} in it", where, brief(name));
        const std::string key = json_text(name.get<std::string>());
        auto found = std::find_if(node.properties.begin(), node.properties.end(),
                                  [&](const Property& p) { return p.key == key; });
        if (found == node.properties.end()) {
            const Node* value =
                schema.contains("additionalProperties") || !(node.types & kObject) || !node.patterns.empty()
                    ? node.additional
                    : compile(true, where, depth);
            if (value == nullptr && (node.types & kObject))
                FAIL(usage, "{}: 'required' names \"{}\", which is not among the properties", where, key);
            if (node.properties.size() >= kMaxProperties || value == nullptr) continue;
            node.properties.push_back({key, value, false});
            found = node.properties.end() - 1;
        }
        found->required = true;
    }
}

void SchemaCompiler::note(const std::string& place) {
    auto& list = out_.not_enforced_;
    if (std::find(list.begin(), list.end(), place) == list.end()) list.push_back(place);
}

void SchemaCompiler::finish() {
    for (const std::string& place : merger_.lost()) note(place);
    for (const auto& node : out_.nodes_) count_alternatives(*node);
    for (bool changed = true; changed;) {
        changed = false;
        for (auto node = out_.nodes_.rbegin(); node != out_.nodes_.rend(); ++node)
            changed = settle_height(**node) || changed;
    }
}

Grammar::Grammar() = default;
Grammar::~Grammar() = default;

Node* Grammar::add() {
    nodes_.push_back(std::make_unique<Node>());
    return nodes_.back().get();
}

std::shared_ptr<const Grammar> Grammar::json(const ordered_json& schema) {
    const std::shared_ptr<Grammar> out(new Grammar);
    const ordered_json root = with_local_refs(schema);
    SchemaCompiler compiler(*out, root);
    out->root_ = compiler.compile(root, "$", 0);
    compiler.finish();
    if (out->root_->height > kMaxHeight)
        FAIL(usage, "$: no document fits this schema, or only one that is nested deeper than {}", kMaxHeight);
    return out;
}

std::shared_ptr<const Grammar> Grammar::choice(std::vector<std::string> texts) {
    if (texts.empty() || texts.size() > kMaxLiterals)
        FAIL(usage, "a choice is a list of 1 to {} texts", kMaxLiterals);
    for (const std::string& text : texts)
        if (text.empty()) FAIL(usage, "a choice must not be an empty text");
    const std::shared_ptr<Grammar> out(new Grammar);
    Node* root = out->add();
    std::sort(texts.begin(), texts.end());
    texts.erase(std::unique(texts.begin(), texts.end()), texts.end());
    root->literals = std::move(texts);
    root->height = 1;
    out->root_ = root;
    return out;
}

}  // namespace quern
