// A compiled part of a Grammar, and what the matcher keeps open. Internal to grammar*.cpp.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tools/engine/automaton.h"
#include "tools/engine/grammar.h"
#include "tools/engine/number_bounds.h"
#include "tools/engine/tag_watch.h"

namespace quern {

enum JsonType : unsigned {
    kString = 1,
    kNumber = 2,
    kInteger = 4,
    kBoolean = 8,
    kNull = 16,
    kObject = 32,
    kArray = 64,
    kAnyType = 127
};

constexpr size_t kMaxProperties = 256;
constexpr int kMaxHeight = 60;  // of what is open at a time
constexpr int kNever = 1 << 20;

struct Property {
    std::string key;  // as JSON writes it, without the quotes
    const Grammar::Node* node;
    bool required;
};

/// Properties whose keys an expression matches.
struct PropertyPattern {
    const Grammar::Node* key;  // an automaton of what follows the first quote
    const Grammar::Node* node;
};

struct Grammar::Node {
    std::vector<const Node*> any_of;    // the value may be one of these
    std::vector<std::string> literals;  // or one of these texts, sorted
    unsigned types = 0;                 // or of these types
    std::vector<Property> properties;   // sorted by key
    std::vector<PropertyPattern> patterns;
    const Node* additional = nullptr;    // null: no other properties
    std::optional<NumberBounds> bounds;  // of numbers
    std::vector<const Node*> prefix_items;
    const Node* items = nullptr;  // those after the prefix; null: none
    int64_t min_items = 0, max_items = std::numeric_limits<int32_t>::max();
    int64_t min_length = 0, max_length = std::numeric_limits<int32_t>::max();  // in characters
    std::shared_ptr<const Automaton> automaton;  // if any: the value is a text of it
    // Of a parameter in a tool call: as bare text, as JSON or one of the literals.
    const Node *text = nullptr, *value = nullptr;
    bool may_be_empty = false;  // a literal without any byte
    bool repeats = false;       // several calls in one block
    int height = kNever;        // what must be open at a time until it is complete; kNever: nothing fits
    int object_height = kNever, array_height = kNever;
    int state = 0;  // of the search for nodes that are among their own alternatives

    const Node* item(int64_t i) const {
        return i < static_cast<int64_t>(prefix_items.size()) ? prefix_items[static_cast<size_t>(i)] : items;
    }
};

/// The sorted keys that begin like the text so far.
struct KeyRange {
    uint16_t low = 0, high = 0, length = 0;

    template <typename Keys, typename KeyOf>
    void push(const Keys& keys, unsigned char byte, KeyOf&& key_of) {
        const auto fits = [&](size_t i) {
            const std::string& key = key_of(keys[i]);
            return key.size() > length && static_cast<unsigned char>(key[length]) == byte;
        };
        while (low < high && !fits(low)) ++low;
        while (low < high && !fits(high - 1u)) --high;
        ++length;
    }
    bool operator==(const KeyRange&) const = default;
};

enum class FrameKind : uint8_t {
    root,
    literal,
    word,
    string,
    number,
    object,
    array,
    block,
    call,
    text,
    automaton
};
constexpr uint16_t kAdditional = 0xFFFF, kPatterns = 0x8000;

/// A value that is open.
struct GrammarMatcher::Frame {
    const Grammar::Node* node = nullptr;
    FrameKind kind = FrameKind::root;
    uint8_t state = 0;
    uint8_t utf8 = 0;                       // see utf8_step
    bool escaped = false;                   // key: after a backslash
    bool spaced = false;                    // text: the last byte was a space
    bool leading = false, newline = false;  // text: it begins with a line feed; the last byte was one
    bool tag_at_line_start = false;         // text: the last < was the first of a line
    /// object: the property whose value comes, kPatterns and a pattern's number, or kAdditional; number: its exponent
    uint16_t value = 0;
    int32_t count = 0;  // characters, elements or digits
    KeyRange keys;
    std::string_view word;             // what is left of it
    WrittenNumber written;             // of a number with bounds
    std::bitset<kMaxProperties> seen;  // properties that are there

    /// Of a block of calls none is: a tool may be called again.
    bool has(size_t property) const { return kind != FrameKind::block && seen[property]; }
    bool between_tokens() const;
    bool number_complete() const;
    enum class Goes : uint8_t { on, to_end, nowhere };
    Goes string_goes(unsigned char byte);
    bool add_to_number(unsigned char byte);
    bool keeps_bounds(unsigned char byte);
    bool all_required() const;
    void begin_key();
    bool between_tags() const;
    const Grammar::Node* parameter() const;
    bool has_room(const TagWatch& watch) const;
    bool length_fits() const;
    bool operator==(const Frame&) const = default;
};

struct GrammarMatcher::Thread {
    std::vector<Frame> stack;  // empty: the text is complete
    bool blank = false;        // the last byte was one between tokens
    TagWatch watch;            // on in values of tool calls

    bool operator==(const Thread&) const = default;
    /// Of frames of automata.
    uint64_t hash() const;
};

/// One byte of one thread; what it may become is added to `out`.
struct GrammarMatcher::Step {
    unsigned char byte;
    std::vector<Thread>& out;
    std::unordered_set<uint64_t> settled = {};  // automata: hashes of ways that were followed already

    void go(Thread thread);
    void end(Thread thread);  // pops what is complete, goes on with what is around it
    void step(Thread thread);
    void begin(const Thread& around, const Grammar::Node& node);
    /// Whether a document of this height may be begun there.
    static bool room(const Thread& around, int height) {
        return static_cast<int>(around.stack.size()) + height <= kMaxHeight;
    }

    void automaton(Thread thread);
    void settle(Thread thread);
    void literal(Thread thread);
    void word(Thread thread);
    void string(Thread thread);
    void number(Thread thread);
    void object(Thread thread);
    void array(Thread thread);

    void block(Thread thread);
    void call(Thread thread);
    void text(Thread thread);
    void inner_key(Thread thread);
    void tag(Thread thread, ChatTag which);
    void after_value(Thread thread);
    void begin_parameter(Thread thread);
    void end_text(Thread thread, ChatTag tag);
    static void close_call(Thread& thread);
    bool add_to_text(Thread& thread) const;
    static bool text_may_go_on(const Thread& thread);
    bool may_follow_text(const Thread& thread, bool spaced) const;

    static bool may_be_key(const Thread& around);
    static bool may_be_other_key(const Thread& around);
    static bool may_be_pattern(const Thread& around, const PropertyPattern& pattern);
    void begin_patterns(const Thread& around);
    static bool end_key(Thread& thread);
    bool add_to_key(Thread& thread);
};

/// Bytes of UTF-8 as they come; `state` is 0 between characters. False for a byte that cannot follow.
bool utf8_step(uint8_t& state, unsigned char byte);
/// White space of JSON.
bool is_blank(unsigned char byte);

}  // namespace quern
