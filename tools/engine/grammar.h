// Grammar: what a text may be, compiled; GrammarMatcher: knows after every byte of it what may follow.
//
// Of a JSON schema these are enforced: type, nullable, properties, required, patternProperties, propertyNames (a list or an
// expression), additionalProperties (false where left out beside properties and patternProperties), items, prefixItems, minItems,
// maxItems, minLength, maxLength, pattern and format (string_formats.h) where no length stands beside them, minimum, maximum,
// exclusiveMinimum, exclusiveMaximum, multipleOf of integers and of powers of ten, enum, const, anyOf, oneOf (as anyOf), allOf
// and whatever stands beside a $ref or an anyOf, $ref into the same schema (schema_refs.h), true, false. Properties may come in
// any order. Strings with a pattern or a format are written in the shortest way, numbers with bounds without an exponent.
// Annotations (title, description, default, x-... and such) mean nothing. All else is accepted and listed in not_enforced(), also
// a oneOf whose alternatives do not plainly exclude each other, and a $ref to another document.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ggml-like/json.h"

namespace quern {

enum class ParameterType;
class ToolSchemas;

class Grammar {
  public:
    /// A JSON document. Throws Error(usage) naming the place for what is no schema ("$.properties.age: 'type' ..."), for one
    /// that no document fits, and for one that is too large.
    static std::shared_ptr<const Grammar> json(const nlohmann::ordered_json& schema);
    /// One of these texts. Throws Error(usage) for none, too many or an empty one.
    static std::shared_ptr<const Grammar> choice(std::vector<std::string> texts);
    /// A text that the expression matches from its start to its end: characters, ., classes, \d \w \s, groups, |, * + ? {m,n};
    /// no looking around, no references back, ^ and $ only at the ends. Throws Error(usage) naming the place.
    static std::shared_ptr<const Grammar> regex(std::string_view text);
    /// A text of the rule `root` of a grammar in llama.cpp's GBNF. Throws Error(usage) naming the place, also for a rule that
    /// begins with itself.
    static std::shared_ptr<const Grammar> gbnf(std::string_view text);
    /// Calls of these tools, as the chat format writes them, from behind the marker that begins a block to the one that ends
    /// it. Names are among `allowed` (empty: all); parameters may come in any order, each once, those that are required
    /// always, others than the listed ones if additionalProperties allows it. Text is bare, with its lengths and its enum
    /// enforced; other types are JSON of their schema. A schema that cannot be used counts as its type alone, and is listed
    /// in not_enforced(). `several`: calls in one block. Null without any tool.
    static std::shared_ptr<const Grammar> calls(const nlohmann::ordered_json& tools,
                                                const std::vector<std::string>& allowed, bool several);
    ~Grammar();

    /// Keywords that say more than is enforced, with their places: "$.properties.age.minimum".
    const std::vector<std::string>& not_enforced() const { return not_enforced_; }

    struct Node;
    const Node& root() const { return *root_; }
    /// Whether the root is a block of tool calls.
    bool of_calls() const { return calls_; }

  private:
    friend class SchemaCompiler;
    Grammar();
    Node* add();
    static std::shared_ptr<const Grammar> of_text(struct Automaton automaton);
    const Node* add_parameter(const nlohmann::ordered_json& schema, const nlohmann::ordered_json& root,
                              ParameterType type, const std::string& where);
    const Node* add_tool(const nlohmann::ordered_json& root, const ToolSchemas& schemas,
                         const std::string& name);

    std::vector<std::unique_ptr<Node>> nodes_;
    const Node* root_ = nullptr;
    bool calls_ = false;
    std::vector<std::string> not_enforced_;
};

/// Follows a text while it is written, along all readings that it allows. There is no blank before and after the text, and
/// at most one between the tokens of JSON; digits of a number and depth are bounded, so that a document always ends.
class GrammarMatcher {
  public:
    /// Null: nothing to match; the other functions must then not be used.
    explicit GrammarMatcher(std::shared_ptr<const Grammar> grammar);
    GrammarMatcher(const GrammarMatcher&);
    GrammarMatcher(GrammarMatcher&&) noexcept;
    GrammarMatcher& operator=(GrammarMatcher&&) noexcept;
    ~GrammarMatcher();

    /// Whether the text so far and `bytes` begin a text of the grammar; false for no bytes.
    bool accepts(std::string_view bytes) const;
    /// The bytes that acceptable ones may begin with.
    const std::bitset<256>& first_bytes() const;
    /// Adds bytes. After bytes that were not acceptable, no others are.
    void push(std::string_view bytes);
    /// The text so far is whole.
    bool complete() const;
    /// Complete, and nothing could follow.
    bool finished() const;
    /// Nothing can follow, since bytes were added that were not acceptable.
    bool dead() const;

  private:
    struct Frame;
    struct Thread;
    struct Step;

    static std::vector<Thread> run(std::vector<Thread> threads, std::string_view bytes);
    std::optional<bool> stays_in_string(std::string_view bytes) const;
    bool may_begin(char byte) const;

    std::shared_ptr<const Grammar> grammar_;
    std::vector<Thread> threads_;
    mutable int asked_ = 0;           // calls of accepts since the last push
    mutable std::bitset<256> known_;  // first bytes that were asked for
    mutable std::bitset<256> first_;  // those of them that may come next
};

}  // namespace quern
