// JsonMatcher: a thread for each way to read the text, with a stack of what is open.
#include <algorithm>
#include <cstring>

#include "tools/engine/json_schema.h"
#include "tools/engine/json_schema_node.h"

namespace quern {

using Node = JsonSchema::Node;

namespace {

constexpr int kMaxBlanks = 100;  // in a row: a line feed and a deep indentation
constexpr size_t kMaxDepth = 60;
constexpr size_t kMaxThreads = 256;
constexpr int64_t kMaxDigits = 40;

// States of a string: 0 between characters, 1 after a backslash, 2..5 hex digits to come, 10 + n: n bytes of
// the character to come.
constexpr uint8_t kEscape = 1, kHex = 2, kTail = 10;
// States of a number.
enum : uint8_t { kMinus = 1, kZero, kDigits, kPoint, kFraction, kExponent, kExponentSign, kExponentDigits };
// States of an object: after {, in a key, after a key, before a value, after a value, after a comma.
enum : uint8_t { kOpen, kKey, kColon, kBeforeValue, kAfterValue, kComma };

bool is_blank(unsigned char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }
bool is_digit(unsigned char c) { return c >= '0' && c <= '9'; }
bool is_hex(unsigned char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

}  // namespace

JsonMatcher::JsonMatcher(std::shared_ptr<const JsonSchema> schema) : schema_(std::move(schema)) {
    if (schema_) threads_.push_back({.stack = {{.node = &schema_->root(), .kind = Kind::value}}});
}

bool JsonMatcher::accepts(std::string_view bytes) const {
    if (bytes.empty()) return false;
    if (!first_known_) {
        for (unsigned b = 0; b < 256; ++b) {
            std::vector<Thread> next;
            for (const Thread& t : threads_) step(t, static_cast<unsigned char>(b), next);
            first_[b] = !next.empty();
        }
        first_known_ = true;
    }
    if (!first_[static_cast<unsigned char>(bytes.front())]) return false;
    std::vector<Thread> threads = threads_;
    run(threads, bytes);
    return !threads.empty();
}

void JsonMatcher::push(std::string_view bytes) {
    first_known_ = false;
    run(threads_, bytes);
}

void JsonMatcher::run(std::vector<Thread>& threads, std::string_view bytes) {
    for (const char c : bytes) {
        std::vector<Thread> next;
        for (const Thread& t : threads) step(t, static_cast<unsigned char>(c), next);
        if (next.size() > kMaxThreads) next.resize(kMaxThreads);
        threads = std::move(next);
    }
}

bool JsonMatcher::complete() const {
    return std::any_of(threads_.begin(), threads_.end(), [](const Thread& t) {
        return t.stack.empty() ||
               (t.stack.size() == 1 && t.stack[0].kind == Kind::number && number_complete(t.stack[0]));
    });
}

bool JsonMatcher::finished() const {
    return !threads_.empty() &&
           std::all_of(threads_.begin(), threads_.end(), [](const Thread& t) { return t.stack.empty(); });
}

void JsonMatcher::step(const Thread& thread, unsigned char byte, std::vector<Thread>& out) {
    const bool inside =
        !thread.stack.empty() &&
        (thread.stack.back().kind == Kind::string || thread.stack.back().kind == Kind::literal ||
         (thread.stack.back().kind == Kind::object && thread.stack.back().state == kKey));
    if (!inside && is_blank(byte)) {
        Thread t = thread;
        if (!t.stack.empty() && t.stack.back().kind == Kind::number) {
            if (!number_complete(t.stack.back())) return;
            t.stack.pop_back();
        }
        if (++t.blanks <= kMaxBlanks) out.push_back(std::move(t));
        return;
    }
    if (thread.stack.empty()) return;
    Thread t = thread;
    t.blanks = 0;
    Frame& f = t.stack.back();
    switch (f.kind) {
        case Kind::value:
            return begin_value(std::move(t), byte, out);
        case Kind::literal:
            if (static_cast<unsigned char>(f.text.front()) != byte) return;
            f.text.erase(0, 1);
            if (f.text.empty()) t.stack.pop_back();
            out.push_back(std::move(t));
            return;
        case Kind::string: {
            bool closed = false;
            if (!step_string(f, byte, &closed)) return;
            if (closed) t.stack.pop_back();
            out.push_back(std::move(t));
            return;
        }
        case Kind::number: {
            if (step_number(f, byte)) {
                out.push_back(std::move(t));
                return;
            }
            if (!number_complete(f)) return;
            t.stack.pop_back();  // a number ends where something else begins
            if (!t.stack.empty()) step(t, byte, out);
            return;
        }
        case Kind::object:
            return step_object(std::move(t), byte, out);
        case Kind::array:
            return step_array(std::move(t), byte, out);
    }
}

void JsonMatcher::begin_value(Thread thread, unsigned char byte, std::vector<Thread>& out) {
    const Node& node = *thread.stack.back().node;
    thread.stack.pop_back();
    begin_node(std::move(thread), node, byte, out);
}

/// `thread` is what is open around the value.
void JsonMatcher::begin_node(Thread thread, const Node& node, unsigned char byte, std::vector<Thread>& out) {
    if (thread.stack.size() >= kMaxDepth) return;
    for (const Node* other : node.any_of) begin_node(thread, *other, byte, out);
    const auto open = [&](Frame frame) {
        Thread t = thread;
        t.stack.push_back(std::move(frame));
        out.push_back(std::move(t));
    };
    const auto literal = [&](std::string_view text) {
        if (static_cast<unsigned char>(text.front()) != byte) return;
        if (text.size() == 1)
            out.push_back(thread);
        else
            open({.node = &node, .kind = Kind::literal, .text = std::string(text.substr(1))});
    };
    for (const std::string& text : node.literals) literal(text);
    if (!node.literals.empty()) return;
    if (node.types & kBoolean) {
        literal("true");
        literal("false");
    }
    if (node.types & kNull) literal("null");
    if ((node.types & kString) && byte == '"') open({.node = &node, .kind = Kind::string});
    if (node.types & (kNumber | kInteger)) {
        Frame number{.node = &node, .kind = Kind::number};
        if (step_number(number, byte)) open(std::move(number));
    }
    if ((node.types & kObject) && byte == '{') open({.node = &node, .kind = Kind::object});
    if ((node.types & kArray) && byte == '[') open({.node = &node, .kind = Kind::array});
}

bool JsonMatcher::step_string(Frame& f, unsigned char byte, bool* closed) {
    if (f.state == kEscape) {
        if (byte == 'u')
            f.state = kHex + 3;
        else if (std::memchr("\"\\/bfnrt", byte, 8) != nullptr)
            f.state = 0;
        else
            return false;
        return true;
    }
    if (f.state >= kHex && f.state < kHex + 4) {
        if (!is_hex(byte)) return false;
        f.state = f.state == kHex ? 0 : static_cast<uint8_t>(f.state - 1);
        return true;
    }
    if (f.state > kTail) {
        if ((byte & 0xC0) != 0x80) return false;
        f.state = f.state == kTail + 1 ? 0 : static_cast<uint8_t>(f.state - 1);
        return true;
    }
    if (byte == '"') {
        *closed = true;
        return f.count >= f.node->min_length;
    }
    if (byte < 0x20 || byte == 0x7F || f.count >= f.node->max_length) return false;
    ++f.count;
    if (byte == '\\')
        f.state = kEscape;
    else if (byte >= 0x80) {
        const int tail = byte >= 0xF0 && byte <= 0xF4  ? 3
                         : byte >= 0xE0 && byte < 0xF0 ? 2
                         : byte >= 0xC2 && byte < 0xE0 ? 1
                                                       : 0;
        if (tail == 0) return false;
        f.state = static_cast<uint8_t>(kTail + tail);
    }
    return true;
}

bool JsonMatcher::number_complete(const Frame& f) {
    return f.state == kZero || f.state == kDigits || f.state == kFraction || f.state == kExponentDigits;
}

bool JsonMatcher::step_number(Frame& f, unsigned char byte) {
    const bool whole_only = (f.node->types & kNumber) == 0;
    const auto go = [&](uint8_t state) {
        f.state = state;
        return ++f.count <= kMaxDigits;
    };
    switch (f.state) {
        case 0:
            if (byte == '-') return go(kMinus);
            [[fallthrough]];
        case kMinus:
            return byte == '0' ? go(kZero) : is_digit(byte) && go(kDigits);
        case kDigits:
            if (is_digit(byte)) return go(kDigits);
            [[fallthrough]];
        case kZero:
            if (whole_only) return false;
            if (byte == '.') return go(kPoint);
            return (byte == 'e' || byte == 'E') && go(kExponent);
        case kPoint:
            return is_digit(byte) && go(kFraction);
        case kFraction:
            if (is_digit(byte)) return go(kFraction);
            return (byte == 'e' || byte == 'E') && go(kExponent);
        case kExponent:
            if (byte == '+' || byte == '-') return go(kExponentSign);
            [[fallthrough]];
        case kExponentSign:
            return is_digit(byte) && go(kExponentDigits);
        default:
            return is_digit(byte) && go(kExponentDigits);
    }
}

void JsonMatcher::step_object(Thread thread, unsigned char byte, std::vector<Thread>& out) {
    Frame& f = thread.stack.back();
    const auto& properties = f.node->properties;
    const auto unseen_with_prefix = [&](const std::string& prefix) {
        for (size_t i = 0; i < properties.size(); ++i)
            if (!f.seen[i] && properties[i].key.compare(0, prefix.size(), prefix) == 0) return true;
        return false;
    };
    switch (f.state) {
        case kOpen:
        case kAfterValue:
            if (byte == '}') {
                for (size_t i = 0; i < properties.size(); ++i)
                    if (properties[i].required && !f.seen[i]) return;
                thread.stack.pop_back();
                break;
            }
            if (f.state == kAfterValue && byte == ',' &&
                (f.node->additional != nullptr || unseen_with_prefix(""))) {
                f.state = kComma;
                break;
            }
            if (f.state == kAfterValue) return;
            [[fallthrough]];
        case kComma:
            if (byte != '"' || !(f.node->additional != nullptr || unseen_with_prefix(""))) return;
            f.text.clear();
            f.state = kKey;
            break;
        case kKey: {
            if (byte != '"' || unseen_with_prefix(f.text + "\"")) {
                if (byte < 0x20) return;
                f.text += static_cast<char>(byte);
                const bool plain = byte != '"' && byte != '\\' && f.text.size() <= 256;
                if (!unseen_with_prefix(f.text) && !(plain && f.node->additional != nullptr)) return;
                break;
            }
            const auto named = std::find_if(properties.begin(), properties.end(),
                                            [&](const Property& p) { return p.key == f.text; });
            f.property = named == properties.end() ? -1 : static_cast<int>(named - properties.begin());
            if (f.property < 0 && f.node->additional == nullptr) return;
            if (f.property >= 0 && f.seen[static_cast<size_t>(f.property)]) return;
            if (f.property >= 0) f.seen.set(static_cast<size_t>(f.property));
            f.state = kColon;
            break;
        }
        case kColon:
            if (byte != ':') return;
            f.state = kBeforeValue;
            break;
        default: {
            const Node* node =
                f.property >= 0 ? properties[static_cast<size_t>(f.property)].node : f.node->additional;
            f.state = kAfterValue;
            begin_node(std::move(thread), *node, byte, out);
            return;
        }
    }
    out.push_back(std::move(thread));
}

void JsonMatcher::step_array(Thread thread, unsigned char byte, std::vector<Thread>& out) {
    Frame& f = thread.stack.back();
    const bool fresh = f.state == kOpen;
    if (byte == ']' && f.state != kComma && f.count >= f.node->min_items) {
        thread.stack.pop_back();
        out.push_back(std::move(thread));
        return;
    }
    if (f.state == kAfterValue) {
        if (byte != ',' || f.count >= f.node->max_items) return;
        f.state = kComma;
        out.push_back(std::move(thread));
        return;
    }
    if (fresh && f.node->max_items == 0) return;
    ++f.count;
    f.state = kAfterValue;
    begin_node(std::move(thread), *f.node->items, byte, out);
}

}  // namespace quern
