// From a JSON Schema to the nodes of a Grammar. Internal to grammar*.cpp.
#pragma once

#include <string>
#include <unordered_map>

#include "models/tool_schema.h"
#include "tools/engine/grammar_node.h"
#include "tools/engine/schema_merge.h"

namespace quern {

class SchemaCompiler {
  public:
    static constexpr int kMaxCombinations = 16;

    /// `root`: what references lead into, after with_local_refs (schema_refs.h).
    SchemaCompiler(Grammar& out, const nlohmann::ordered_json& root) : out_(out), merger_(root) {}

    /// Equal schemas become one node. Throws Error(usage) as Grammar::json does.
    const Grammar::Node* compile(const nlohmann::ordered_json& schema, const std::string& where, int depth);
    /// A parameter of a tool, of which the chat parser makes a value of this type.
    const Grammar::Node* parameter(const nlohmann::ordered_json& schema, ParameterType type,
                                   const std::string& where);
    /// Once, when all is compiled: which alternatives there are, and what can end.
    void finish();

  private:
    using Node = Grammar::Node;
    void alternatives(Node& node, const nlohmann::ordered_json& list, const std::string& where, int depth);
    void fill(Node& node, const nlohmann::ordered_json& schema, const std::string& where, int depth);
    bool shape(Node& node, const std::string& key, const nlohmann::ordered_json& value,
               const std::string& where, int depth);
    static bool bound(Node& node, const std::string& key, const nlohmann::ordered_json& value);
    void add_pattern(Node& node, const std::string& regex, const nlohmann::ordered_json& schema,
                     const std::string& where, int depth);
    void strings(Node& node, const nlohmann::ordered_json& schema, const std::string& where);
    static void literals(Node& node, const nlohmann::ordered_json& values, unsigned types,
                         const std::string& where);
    void require(Node& node, const nlohmann::ordered_json& schema, const std::string& where, int depth);
    void texts(Node& node, const nlohmann::ordered_json& schema, const std::string& where, int depth,
               bool bare);
    void add_value(Node& node, const Node* value);
    void note(const std::string& place);

    Grammar& out_;
    SchemaMerger merger_;
    std::unordered_map<std::string, const Node*> known_;  // by their text
    Node* values_ = nullptr;                              // of a parameter: what it may be but bare text
    size_t work_ = 0;                                     // bytes of schemas that were looked at
};

/// `type` of a schema as JsonType bits.
unsigned read_types(const nlohmann::ordered_json& value, const std::string& where);
/// As JSON writes it, without the quotes.
std::string json_text(const std::string& text);

}  // namespace quern
