// Grammar: what a text may be, compiled; GrammarMatcher: knows after every byte of it what may follow.
//
// Of a JSON schema these are enforced: type, nullable, properties, required, additionalProperties (false where left out
// beside properties), items, prefixItems, minItems, maxItems, minLength, maxLength, enum, const, anyOf, oneOf (as anyOf),
// allOf and whatever stands beside a $ref or an anyOf, $ref into the same schema, true, false. Properties may come in any
// order. Annotations (title, description, default, x-... and such) mean nothing. All else is accepted and listed in
// not_enforced().
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

class Grammar {
  public:
    /// A JSON document. Throws Error(usage) naming the place for what is no schema ("$.properties.age: 'type' ..."), for one
    /// that no document fits, and for one that is too large.
    static std::shared_ptr<const Grammar> json(const nlohmann::ordered_json& schema);
    /// One of these texts. Throws Error(usage) for none, too many or an empty one.
    static std::shared_ptr<const Grammar> choice(std::vector<std::string> texts);
    ~Grammar();

    /// Keywords that say more than is enforced, with their places: "$.properties.age.minimum".
    const std::vector<std::string>& not_enforced() const { return not_enforced_; }

    struct Node;
    const Node& root() const { return *root_; }

  private:
    friend class SchemaCompiler;
    Grammar();
    Node* add();

    std::vector<std::unique_ptr<Node>> nodes_;
    const Node* root_ = nullptr;
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
    /// Adds bytes. After bytes that were not acceptable, no others are.
    void push(std::string_view bytes);
    /// The text so far is whole.
    bool complete() const;
    /// Complete, and nothing could follow.
    bool finished() const;

  private:
    struct Frame;
    struct Thread;
    struct Step;

    static std::vector<Thread> run(std::vector<Thread> threads, std::string_view bytes);

    std::shared_ptr<const Grammar> grammar_;
    std::vector<Thread> threads_;
    mutable int asked_ = 0;           // calls of accepts since the last push
    mutable std::bitset<256> first_;  // bytes that may come next, once it pays to know them
};

}  // namespace quern
