// Grammar of tool calls: the tools' schemas, each parameter as the chat parser makes a value of it.
#include <algorithm>
#include <cctype>
#include <iterator>

#include "ggml-like/check.h"
#include "models/tool_schema.h"
#include "tools/engine/grammar_node.h"
#include "tools/engine/schema_compiler.h"
#include "tools/engine/schema_refs.h"

namespace quern {

using nlohmann::ordered_json;
using Node = Grammar::Node;

namespace {

/// What a parameter may be when its schema cannot be used.
ordered_json plain_schema(ParameterType type) {
    switch (type) {
        case ParameterType::string:
            return {{"type", "string"}};
        case ParameterType::integer:
            return {{"type", "integer"}};
        case ParameterType::number:
            return {{"type", "number"}};
        case ParameterType::boolean:
            return {{"type", "boolean"}};
        case ParameterType::null:
            return {{"type", "null"}};
        default:
            return {{"type", {"object", "array"}}};
    }
}

/// The types that the parser can make of a text which is meant to be of this type. A text that is none stays a text.
ordered_json readable_types(ParameterType type) {
    switch (type) {
        case ParameterType::integer:
        case ParameterType::number:
            return {"number", "integer", "null"};
        case ParameterType::boolean:
            return {"boolean", "null"};
        case ParameterType::null:
            return {"null"};
        default:
            return {"number", "integer", "boolean", "null", "object", "array"};
    }
}

/// Whether the parser leaves a text alone in a parameter of another type.
bool stays_text(std::string text) {
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return std::isalpha(static_cast<unsigned char>(text.front())) && text != "null" && text != "none" &&
           text != "true" && text != "false";
}

const ordered_json kNothing = ordered_json::object();

const ordered_json& part(const ordered_json& object, const char* key) {
    const auto found = object.is_object() ? object.find(key) : object.end();
    return found != object.end() && found->is_object() ? *found : kNothing;
}

/// Names that the parser can read.
bool readable(const std::string& key) {
    return !key.empty() && key.find_first_of("<>\n") == key.npos &&
           !TagWatch::is_space(static_cast<unsigned char>(key.front())) &&
           !TagWatch::is_space(static_cast<unsigned char>(key.back()));
}

}  // namespace

/// Collects what the parameter may be as bare text.
void SchemaCompiler::texts(Node& node, const ordered_json& schema, const std::string& where, int depth,
                           bool bare) {
    if (depth > kMaxCombinations) FAIL(usage, "{}: references and combinations nest too deep", where);
    const ordered_json flat = merger_.flat(schema, where);
    if (flat == false) return;
    if (flat.is_object() && flat.contains("anyOf")) {
        for (const auto& one : flat["anyOf"]) texts(node, one, where, depth + 1, bare);
        return;
    }
    ordered_json strings = flat == true ? ordered_json::object() : flat;
    if (strings.contains("type") && !(read_types(strings["type"], where) & kString)) return;
    strings["type"] = "string";
    if (strings.contains("enum")) {
        Node* list = out_.add();
        for (const auto& value : strings["enum"]) {
            if (!value.is_string()) continue;
            const auto& text = value.get_ref<const std::string&>();
            list->may_be_empty = list->may_be_empty || (text.empty() && bare);
            const bool feeds = text.starts_with('\n') || text.ends_with('\n');  // the parser takes these away
            const bool tags = text.find("</") != text.npos || text.find("<parameter=") != text.npos;
            if (!bare && (text.empty() || !stays_text(text))) continue;
            if (!text.empty() && !feeds && !tags) list->literals.push_back(text);
        }
        std::sort(list->literals.begin(), list->literals.end());
        list->literals.erase(std::unique(list->literals.begin(), list->literals.end()), list->literals.end());
        add_value(node, list);
        return;
    }
    if (!bare) return;
    for (const char* key : {"pattern", "format"})  // of bare text they are not enforced
        if (strings.erase(key) > 0) note(where + "." + key);
    Node* text = out_.add();
    fill(*text, strings, where, 0);
    text->height = 1;
    // Of several kinds of text the one that allows most.
    if (node.text == nullptr || node.text->max_length < text->max_length) node.text = text;
}

void SchemaCompiler::add_value(Node& node, const Node* value) {
    if (node.value == nullptr) {
        Node* choice = out_.add();
        node.value = choice;
        values_ = choice;
    }
    values_->any_of.push_back(value);
    values_->may_be_empty = values_->may_be_empty || value->may_be_empty;
}

const Node* SchemaCompiler::parameter(const ordered_json& schema, ParameterType type,
                                      const std::string& where) {
    Node* node = out_.add();
    const bool text = type == ParameterType::string;
    if (!text) {
        const ordered_json kinds = {{"type", readable_types(type)}};
        add_value(*node, compile({{"allOf", {schema, kinds}}}, where, 0));
    }
    // A text in place of another value stays a text only if it is none of those; the parser of booleans knows no texts.
    if (type != ParameterType::boolean) texts(*node, schema, where, 0, text);
    return node;
}

/// The node of a parameter, with what it needs; what cannot be compiled is any value of its type.
const Node* Grammar::add_parameter(const ordered_json& schema, const ordered_json& root, ParameterType type,
                                   const std::string& where) {
    for (const ordered_json& tried : {schema, plain_schema(type)}) {
        Grammar own;
        SchemaCompiler compiler(own, root);
        try {
            const Node* node = compiler.parameter(tried, type, where);
            compiler.finish();
            if (node->height > kMaxHeight - 2) FAIL(usage, "{}: no value fits", where);
            std::move(own.nodes_.begin(), own.nodes_.end(), std::back_inserter(nodes_));
            not_enforced_.insert(not_enforced_.end(), own.not_enforced_.begin(), own.not_enforced_.end());
            return node;
        } catch (const Error&) {
            not_enforced_.push_back(where);
        }
    }
    FAIL(usage, "{}: no value fits", where);
}

const Node* Grammar::add_tool(const ordered_json& root, const ToolSchemas& schemas, const std::string& name) {
    Node* tool = add();
    tool->types = kObject;
    const std::string where = "tools." + name;
    const ordered_json& parameters = parameters_object(root);
    const ordered_json& properties = part(parameters, "properties");
    const bool listed = parameters.is_object() && parameters.contains("properties");
    const auto parameter = [&](const ordered_json& schema, const std::string& key) {
        return add_parameter(schema, root, schemas.type(name, key), where + "." + key);
    };
    for (const auto& [key, schema] : properties.items()) {
        if (readable(key) && tool->properties.size() < kMaxProperties)
            tool->properties.push_back({key, parameter(schema, key), false});
        else
            not_enforced_.push_back(where + "." + key);
    }
    const auto others = parameters.is_object() ? parameters.find("additionalProperties") : parameters.end();
    const bool open = parameters.is_object() && others != parameters.end() ? *others != false : !listed;
    if (open) tool->additional = parameter(others != parameters.end() ? *others : ordered_json(true), "");
    const ordered_json required =
        parameters.is_object() ? parameters.value("required", ordered_json()) : ordered_json();
    for (const auto& key : required) {
        const auto found = std::find_if(tool->properties.begin(), tool->properties.end(),
                                        [&](const Property& p) { return key == p.key; });
        if (found != tool->properties.end())
            found->required = true;
        else if (key.is_string() && open && readable(key.get<std::string>()) &&
                 tool->properties.size() < kMaxProperties)
            tool->properties.push_back({key.get<std::string>(), tool->additional, true});
    }
    if (parameters.is_object())
        for (const auto& [key, value] : parameters.items())
            if (key != "type" && key != "properties" && key != "required" && key != "additionalProperties" &&
                !is_annotation(key))
                not_enforced_.push_back(where + ":" + key);
    std::sort(tool->properties.begin(), tool->properties.end(),
              [](const Property& a, const Property& b) { return a.key < b.key; });
    tool->height = 1;
    return tool;
}

std::shared_ptr<const Grammar> Grammar::calls(const ordered_json& tools,
                                              const std::vector<std::string>& allowed, bool several) {
    const std::shared_ptr<Grammar> out(new Grammar);
    const ToolSchemas schemas(tools);
    Node* root = out->add();
    root->repeats = several;
    root->height = 1;
    for (const auto& tool : tools.is_array() ? tools : ordered_json::array()) {
        const ordered_json& function =
            tool.is_object() && tool.contains("function") ? tool["function"] : tool;
        if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) continue;
        const auto name = function["name"].get<std::string>();
        const bool offered =
            allowed.empty() || std::find(allowed.begin(), allowed.end(), name) != allowed.end();
        if (!offered || !readable(name)) continue;
        const auto parameters = function.find("parameters");
        const ordered_json described = with_local_refs(parameters != function.end() ? *parameters : kNothing);
        root->properties.push_back({name, out->add_tool(described, schemas, name), false});
    }
    std::sort(root->properties.begin(), root->properties.end(),
              [](const Property& a, const Property& b) { return a.key < b.key; });
    if (root->properties.empty()) return nullptr;
    out->root_ = root;
    out->calls_ = true;
    return out;
}

}  // namespace quern
