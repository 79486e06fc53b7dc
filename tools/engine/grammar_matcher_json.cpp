// The part of GrammarMatcher that reads values of JSON.
#include <algorithm>
#include <cstring>

#include "tools/engine/grammar_node.h"

namespace quern {

namespace {

constexpr int32_t kMaxDigits = 40, kMaxKey = 256;
constexpr uint16_t kMaxExponent = 250;  // with all digits still a double

// States of a string: between characters, after a backslash, before hex digits. \uD800 to \uDBFF must be followed by
// \uDC00 to \uDFFF; neither may stand alone.
enum : uint8_t {
    kPlain,
    kEscape,
    kHexFirst,
    kHex3,
    kHex2,
    kHex1,
    kHexD,
    kHigh2,
    kHigh1,
    kLowEscape,
    kLowU,
    kLowD,
    kLowC
};
// States of a number.
enum : uint8_t { kMinus = 1, kZero, kDigits, kPoint, kFraction, kExponent, kExponentSign, kExponentDigits };
// States of an object: after {, in a key, after a key, before a value, after a value, after a comma.
enum : uint8_t { kOpen, kKey, kColon, kBeforeValue, kAfterValue, kComma };

bool is_digit(unsigned char c) { return c >= '0' && c <= '9'; }
bool is_hex(unsigned char c) { return is_digit(c) || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F'); }

/// The state after one more byte of an escape; nothing if it cannot follow.
std::optional<uint8_t> escape_step(uint8_t state, unsigned char byte) {
    const auto lower = static_cast<unsigned char>(byte | 0x20);
    const auto when = [](bool fits, uint8_t next) {
        return fits ? std::optional<uint8_t>(next) : std::nullopt;
    };
    switch (state) {
        case kEscape:
            if (byte == 'u') return kHexFirst;
            return when(std::memchr("\"\\/bfnrt", byte, 8) != nullptr, kPlain);
        case kHexFirst:
            return when(is_hex(byte), lower == 'd' ? kHexD : kHex3);
        case kHexD:
            if (lower == '8' || lower == '9' || lower == 'a' || lower == 'b') return kHigh2;
            return when(is_digit(byte), kHex2);
        case kHex3:
        case kHex2:
        case kHigh2:
            return when(is_hex(byte), static_cast<uint8_t>(state + 1));
        case kHex1:
            return when(is_hex(byte), kPlain);
        case kHigh1:
            return when(is_hex(byte), kLowEscape);
        case kLowEscape:
            return when(byte == '\\', kLowU);
        case kLowU:
            return when(byte == 'u', kLowD);
        case kLowD:
            return when(lower == 'd', kLowC);
        default:
            return when(lower >= 'c' && lower <= 'f', kHex2);
    }
}

}  // namespace

bool is_blank(unsigned char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

bool GrammarMatcher::Frame::between_tokens() const {
    return (kind == FrameKind::object && state != kKey) || kind == FrameKind::array;
}

bool GrammarMatcher::Frame::number_complete() const {
    return kind == FrameKind::number &&
           (state == kZero || state == kDigits || state == kFraction || state == kExponentDigits) &&
           (!node->bounds || node->bounds->holds(written));
}

/// One more byte of a string.
GrammarMatcher::Frame::Goes GrammarMatcher::Frame::string_goes(unsigned char byte) {
    if (state != kPlain) {
        const auto next = escape_step(state, byte);
        if (!next) return Goes::nowhere;
        state = *next;
        return Goes::on;
    }
    if (utf8 == 0) {
        if (byte == '"') return count >= node->min_length ? Goes::to_end : Goes::nowhere;
        if (byte < 0x20 || count >= node->max_length) return Goes::nowhere;
        ++count;
    }
    if (!utf8_step(utf8, byte)) return Goes::nowhere;
    if (byte == '\\') state = kEscape;
    return Goes::on;
}

void GrammarMatcher::Step::string(Thread thread) {
    switch (thread.stack.back().string_goes(byte)) {
        case Frame::Goes::on:
            return go(std::move(thread));
        case Frame::Goes::to_end:
            return end(std::move(thread));
        case Frame::Goes::nowhere:
            break;
    }
}

/// Of a text that can only be read as an open string, without copies of all that is open: most bytes of most documents.
std::optional<bool> GrammarMatcher::stays_in_string(std::string_view bytes) const {
    if (threads_.size() != 1 || threads_[0].stack.empty() || threads_[0].watch.on) return {};
    const Frame& open = threads_[0].stack.back();
    if (open.kind != FrameKind::string) return {};
    Frame f{
        .node = open.node, .kind = open.kind, .state = open.state, .utf8 = open.utf8, .count = open.count};
    for (const char c : bytes) switch (f.string_goes(static_cast<unsigned char>(c))) {
            case Frame::Goes::on:
                break;
            case Frame::Goes::to_end:
                return {};
            case Frame::Goes::nowhere:
                return false;
        }
    return true;
}

/// Adds a digit, a sign, a point or an e; false if it cannot follow.
bool GrammarMatcher::Frame::add_to_number(unsigned char byte) {
    const bool whole_only = (node->types & kNumber) == 0;
    const auto to = [&](uint8_t next) {
        state = next;
        return ++count <= kMaxDigits;
    };
    switch (state) {
        case 0:
            if (byte == '-') return to(kMinus);
            [[fallthrough]];
        case kMinus:
            return byte == '0' ? to(kZero) : is_digit(byte) && to(kDigits);
        case kDigits:
            if (is_digit(byte)) return to(kDigits);
            [[fallthrough]];
        case kZero:
            if (whole_only) return false;
            if (byte == '.') return to(kPoint);
            return (byte == 'e' || byte == 'E') && to(kExponent);
        case kPoint:
            return is_digit(byte) && to(kFraction);
        case kFraction:
            if (is_digit(byte)) return to(kFraction);
            return (byte == 'e' || byte == 'E') && to(kExponent);
        case kExponent:
            if (byte == '+' || byte == '-') return to(kExponentSign);
            [[fallthrough]];
        default:
            if (!is_digit(byte)) return false;
            value = static_cast<uint16_t>(value * 10 + (byte - '0'));
            return value <= kMaxExponent && to(kExponentDigits);
    }
}

/// Whether the number with its last byte may still become one within the bounds. Those have no exponent.
bool GrammarMatcher::Frame::keeps_bounds(unsigned char byte) {
    const bool integer = (node->types & kNumber) == 0;
    if (byte == '-') {
        written.negative = true;
        return node->bounds->may_be_negative(integer);
    }
    if (byte == '.') {
        written.point = true;
    } else if (is_digit(byte)) {
        if (++written.length > NumberBounds::kMaxDigits) return false;
        written.digits = written.digits * 10 + (byte - '0');
        written.fraction = static_cast<uint8_t>(written.fraction + written.point);
    } else {
        return false;
    }
    return node->bounds->reachable(written, integer);
}

void GrammarMatcher::Step::number(Thread thread) {
    Frame& f = thread.stack.back();
    const bool ends = f.number_complete();
    if (f.add_to_number(byte) && (!f.node->bounds || f.keeps_bounds(byte))) return go(std::move(thread));
    if (!ends) return;
    thread.stack.pop_back();  // a number ends where something else begins
    step(std::move(thread));
}

/// Whether some property may still come that begins like the key so far.
bool GrammarMatcher::Step::may_be_key(const Thread& around) {
    const Frame& f = around.stack.back();
    for (size_t i = f.keys.low; i < f.keys.high; ++i)
        if (!f.has(i) && room(around, f.node->properties[i].node->height)) return true;
    return false;
}

bool GrammarMatcher::Step::may_be_other_key(const Thread& around) {
    const Grammar::Node* additional = around.stack.back().node->additional;
    return additional != nullptr && room(around, additional->height);
}

bool GrammarMatcher::Step::may_be_pattern(const Thread& around, const PropertyPattern& pattern) {
    return room(around, pattern.node->height);
}

/// Behind the quote that begins a key: ways to read it as one that a pattern matches.
void GrammarMatcher::Step::begin_patterns(const Thread& around) {
    const auto& patterns = around.stack.back().node->patterns;
    for (size_t i = 0; i < patterns.size(); ++i) {
        if (!may_be_pattern(around, patterns[i])) continue;
        Thread t = around;
        t.stack.back().state = kColon;
        t.stack.back().value = static_cast<uint16_t>(kPatterns + i);
        const Grammar::Node* key = patterns[i].key;
        t.stack.push_back({.node = key, .kind = FrameKind::automaton, .count = key->automaton->start});
        settle(std::move(t));
    }
}

/// The key is complete: whose value comes? False if none may.
bool GrammarMatcher::Step::end_key(Thread& thread) {
    Frame& f = thread.stack.back();
    const auto& properties = f.node->properties;
    const bool known = f.keys.low < f.keys.high && properties[f.keys.low].key.size() == f.keys.length;
    if (!known) {
        f.value = kAdditional;
        return f.utf8 == 0 && may_be_other_key(thread);
    }
    f.value = f.keys.low;
    if (f.has(f.value) || !room(thread, properties[f.value].node->height)) return false;
    if (f.kind != FrameKind::block) f.seen.set(f.value);
    return true;
}

/// One more byte of a key. False if no key goes on like that.
bool GrammarMatcher::Step::add_to_key(Thread& thread) {
    Frame& f = thread.stack.back();
    const bool whole = f.utf8 != 0 || f.keys.length < kMaxKey;  // characters are not cut
    f.keys.push(f.node->properties, byte, [](const Property& p) -> const std::string& { return p.key; });
    const bool text = whole && byte >= 0x20 && byte != '\\' && utf8_step(f.utf8, byte);
    return may_be_key(thread) || (text && may_be_other_key(thread));
}

bool GrammarMatcher::Frame::all_required() const {
    for (size_t i = 0; i < node->properties.size(); ++i)
        if (node->properties[i].required && !seen[i]) return false;
    return true;
}

void GrammarMatcher::Frame::begin_key() {
    keys = {0, static_cast<uint16_t>(node->properties.size()), 0};
    utf8 = 0;
}

void GrammarMatcher::Step::object(Thread thread) {
    Frame& f = thread.stack.back();
    switch (f.state) {
        case kOpen:
        case kAfterValue:
        case kComma:
            if (byte == '}' && f.state != kComma) {
                if (f.all_required()) end(std::move(thread));
                return;
            }
            if (byte != (f.state == kAfterValue ? ',' : '"')) return;
            f.begin_key();
            if (f.state == kAfterValue) {
                const auto fits = [&](const PropertyPattern& p) { return may_be_pattern(thread, p); };
                const auto& patterns = f.node->patterns;
                if (!may_be_key(thread) && !may_be_other_key(thread) &&
                    std::none_of(patterns.begin(), patterns.end(), fits))
                    return;
                f.state = kComma;
                return go(std::move(thread));
            }
            begin_patterns(thread);
            if (!may_be_key(thread) && !may_be_other_key(thread)) return;
            f.state = kKey;
            return go(std::move(thread));
        case kKey:
            // A quote that belongs to the key is written with a backslash.
            if (byte == '"' && !f.escaped) {
                if (!end_key(thread)) return;
                f.state = kColon;
                return go(std::move(thread));
            }
            f.escaped = byte == '\\' && !f.escaped;
            if (add_to_key(thread)) go(std::move(thread));
            return;
        case kColon:
            if (byte != ':') return;
            f.state = kBeforeValue;
            return go(std::move(thread));
        default: {
            f.state = kAfterValue;
            const Grammar::Node* node = f.value == kAdditional ? f.node->additional
                                        : f.value >= kPatterns ? f.node->patterns[f.value - kPatterns].node
                                                               : f.node->properties[f.value].node;
            return begin(thread, *node);
        }
    }
}

void GrammarMatcher::Step::array(Thread thread) {
    Frame& f = thread.stack.back();
    if (byte == ']' && f.state != kComma && f.count >= f.node->min_items) return end(std::move(thread));
    const Grammar::Node* item = f.node->item(f.count);
    const bool may_go_on = f.count < f.node->max_items && item != nullptr && room(thread, item->height);
    if (!may_go_on) return;
    if (f.state == kAfterValue) {
        if (byte != ',') return;
        f.state = kComma;
        return go(std::move(thread));
    }
    ++f.count;
    f.state = kAfterValue;
    begin(thread, *item);
}

}  // namespace quern
