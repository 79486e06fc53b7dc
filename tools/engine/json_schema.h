// JsonSchema: a documented subset of JSON Schema, and a matcher that knows after every byte what may follow.
//
// Enforced: type (one or a list), properties, required, additionalProperties (false where left out beside
// properties), items, minItems, maxItems, minLength, maxLength, enum, const, anyOf, oneOf (as anyOf), allOf
// of one schema, $ref to "#", "#/$defs/..." and "#/definitions/...", true. Ignored, as annotations: title,
// description, default, examples, format, $schema, $id, $comment, deprecated, readOnly, writeOnly. Anything
// else is an error that names the keyword. Properties may come in any order.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace quern {

class JsonSchema {
  public:
    /// Throws Error(usage) naming the keyword and its place: "$.properties.age: 'minimum' is not supported".
    explicit JsonSchema(const nlohmann::ordered_json& schema);
    ~JsonSchema();

    struct Node;
    const Node& root() const { return *root_; }

  private:
    class Compiler;
    std::vector<std::unique_ptr<Node>> nodes_;
    const Node* root_ = nullptr;
};

/// Follows a document while it is written, along all readings that the text allows. White space between tokens, digits
/// of a number and depth are bounded, so that a document always ends.
class JsonMatcher {
  public:
    /// Null: nothing to match; the other functions must then not be used.
    explicit JsonMatcher(std::shared_ptr<const JsonSchema> schema);

    /// Whether the text so far and `bytes` begin a document of the schema; false for no bytes.
    bool accepts(std::string_view bytes) const;
    /// Adds bytes. After bytes that were not acceptable, no others are.
    void push(std::string_view bytes);
    /// The text so far is a whole document.
    bool complete() const;
    /// Complete, and only white space could follow.
    bool finished() const;

  private:
    enum class Kind : uint8_t { value, literal, string, number, object, array };
    struct Frame {
        const JsonSchema::Node* node;
        Kind kind;
        uint8_t state = 0;
        int64_t count = 0;      // characters, elements or bytes so far
        std::string text;       // literal: what is left; object: the key so far
        std::bitset<256> seen;  // object: properties that are there
        int property = -1;      // object: whose value comes next; -1: an additional one
    };
    struct Thread {
        std::vector<Frame> stack;  // empty: the document is complete
        int blanks = 0;            // in a row
    };

    static void step(const Thread& thread, unsigned char byte, std::vector<Thread>& out);
    static void begin_value(Thread thread, unsigned char byte, std::vector<Thread>& out);
    static void begin_node(Thread thread, const JsonSchema::Node& node, unsigned char byte,
                           std::vector<Thread>& out);
    static bool step_string(Frame& f, unsigned char byte, bool* closed);
    static bool step_number(Frame& f, unsigned char byte);
    static bool number_complete(const Frame& f);
    static void step_object(Thread thread, unsigned char byte, std::vector<Thread>& out);
    static void step_array(Thread thread, unsigned char byte, std::vector<Thread>& out);
    static void run(std::vector<Thread>& threads, std::string_view bytes);

    std::shared_ptr<const JsonSchema> schema_;
    std::vector<Thread> threads_;
    mutable std::bitset<256> first_;  // bytes that may come next, filled on demand
    mutable bool first_known_ = false;
};

}  // namespace quern
