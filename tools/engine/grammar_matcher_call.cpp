// The part of GrammarMatcher that reads tool calls, from behind the marker that begins a block of them. What it accepts the
// chat parser reads as the same call: text ends where the parser sees it end.
//
//   ( <function=NAME> ( <parameter=KEY> VALUE </parameter> )* </function> )+ </tool_call>
//
// Between tags there is one blank at most; a VALUE that is no text stands between one line feed each, or none.
#include <algorithm>

#include "tools/engine/grammar_node.h"

namespace quern {

namespace {

// States of a block: before a function, in its name, behind it.
enum : uint8_t { kStart, kName, kClose };
// States of a call: between parameters, in a key, before a value, behind it; with and without its line feed.
enum : uint8_t { kBody, kKey, kBeforeValue, kInValueLine, kAfterValue, kAfterValueLine };
// States of a text: in it, in what may be the tag of another parameter.
enum : uint8_t { kText, kInnerKey };

constexpr auto key_of = [](const Property& p) -> const std::string& { return p.key; };

constexpr std::string_view text_of(ChatTag tag) { return kChatTagText[static_cast<size_t>(tag)]; }

}  // namespace

bool GrammarMatcher::Frame::between_tags() const {
    return (kind == FrameKind::block && state != kName) || (kind == FrameKind::call && state == kBody);
}

/// The rest of a tag of which `<` has come.
void GrammarMatcher::Step::tag(Thread thread, ChatTag which) {
    thread.stack.push_back({.kind = FrameKind::word, .word = text_of(which).substr(1)});
    go(std::move(thread));
}

void GrammarMatcher::Step::block(Thread thread) {
    Frame& f = thread.stack.back();
    if (f.state == kName) {
        if (byte != '>') {
            if (add_to_key(thread)) go(std::move(thread));
            return;
        }
        if (!end_key(thread)) return;
        const Grammar::Node* tool = f.node->properties[f.value].node;
        thread.stack.push_back({.node = tool, .kind = FrameKind::call});
        return go(std::move(thread));
    }
    if (byte != '<') return;
    if (f.state == kClose) {
        Thread done = thread;
        done.stack.pop_back();
        tag(std::move(done), ChatTag::tool_call_end);
        if (!f.node->repeats) return;
    }
    f.begin_key();
    f.state = kName;
    tag(std::move(thread), ChatTag::function);
}

void GrammarMatcher::Step::call(Thread thread) {
    Frame& f = thread.stack.back();
    switch (f.state) {
        case kBody:
            if (byte != '<') return;
            if (f.all_required()) {
                Thread done = thread;
                close_call(done);
                tag(std::move(done), ChatTag::function_end);
            }
            f.begin_key();
            if (!may_be_key(thread) && !may_be_other_key(thread)) return;
            f.state = kKey;
            return tag(std::move(thread), ChatTag::parameter);
        case kKey:
            if (byte == '>') return begin_parameter(std::move(thread));
            // Of names that are not given, the parser takes space away.
            if (byte != '<' && (!TagWatch::is_space(byte) || f.keys.low < f.keys.high) && add_to_key(thread))
                go(std::move(thread));
            return;
        case kBeforeValue:
        case kInValueLine: {
            const Grammar::Node& node = *f.parameter()->value;
            if (node.may_be_empty) after_value(thread);
            if (byte == '\n' && f.state == kBeforeValue) {
                f.state = kInValueLine;
                return go(std::move(thread));
            }
            f.state = kAfterValue;
            return begin(thread, node);
        }
        default:
            return after_value(std::move(thread));
    }
}

void GrammarMatcher::Step::after_value(Thread thread) {
    Frame& f = thread.stack.back();
    if (byte == '\n' && f.state != kAfterValueLine && f.state != kBeforeValue) {
        f.state = kAfterValueLine;
        return go(std::move(thread));
    }
    if (byte != '<') return;
    f.state = kBody;
    thread.watch = {};
    tag(std::move(thread), ChatTag::parameter_end);
}

void GrammarMatcher::Step::close_call(Thread& thread) {
    thread.stack.pop_back();
    thread.stack.back().state = kClose;
}

const Grammar::Node* GrammarMatcher::Frame::parameter() const {
    return value == kAdditional ? node->additional : node->properties[value].node;
}

void GrammarMatcher::Step::begin_parameter(Thread thread) {
    Frame& f = thread.stack.back();
    if (f.keys.length == 0 || !end_key(thread)) return;
    const Grammar::Node& parameter = *f.parameter();
    thread.watch = {.on = true};
    f.state = kBeforeValue;
    if (parameter.text != nullptr) {
        Thread text = thread;
        text.stack.push_back({.node = parameter.text, .kind = FrameKind::text});
        go(std::move(text));
    }
    if (parameter.value != nullptr) go(std::move(thread));
}

/// `<parameter=` at the start of a line of a text: the parser takes the text for ended if the tool has, or may have, another
/// parameter of this name, space around it not counted.
void GrammarMatcher::Step::inner_key(Thread thread) {
    Frame& f = thread.stack.back();
    const Frame& around = thread.stack[thread.stack.size() - 2];
    const auto& properties = around.node->properties;
    const bool open = around.node->additional != nullptr;
    const bool named = f.keys.low < f.keys.high && properties[f.keys.low].key.size() == f.keys.length;
    if (byte == '<' && !open) {  // no key has one
        f.state = kText;
        return text(std::move(thread));
    }
    ++f.count;
    f.newline = byte == '\n';
    if (f.count - f.leading > f.node->max_length || !utf8_step(f.utf8, byte)) return;
    const bool space = TagWatch::is_space(byte);
    const ChatTag tag = thread.watch.push(byte);
    if (tag != ChatTag::none) {
        thread.watch.ends(tag);
        f.tag_at_line_start = false;
        if (tag == ChatTag::parameter_end && !f.length_fits()) return;
        f.state = kText;
    } else if (f.newline || byte == '>') {
        if (byte == '>' && (open ? f.keys.length > 0 : named && f.keys.low != around.value)) return;
        f.state = kText;
    } else if (!space || f.keys.length > 0) {
        f.keys.push(properties, byte, key_of);
        if (space && named && f.keys.low == f.keys.high && !open) return;
    }
    go(std::move(thread));
}

/// Text up to </parameter> and another tag. Behind </parameter> it may go on, if nothing else is missing, as the
/// parser reads it: text about the format itself.
void GrammarMatcher::Step::text(Thread thread) {
    Frame& f = thread.stack.back();
    if (f.state == kInnerKey) return inner_key(std::move(thread));
    TagWatch& watch = thread.watch;
    const bool closed = watch.after == TagWatch::After::parameter;
    if (watch.after != TagWatch::After::text && (byte == 0xC2 || (byte >= 0xE1 && byte <= 0xE3)))
        return;  // perhaps a space beyond ASCII, which the parser skips
    const bool spaced = std::exchange(f.spaced, TagWatch::is_space(byte));
    if (!add_to_text(thread)) return;
    const ChatTag tag = watch.push(byte);
    if (tag == ChatTag::none) {
        if (closed ? may_follow_text(thread, spaced) : f.has_room(watch)) go(std::move(thread));
        return;
    }
    const bool may_go_on = text_may_go_on(thread);
    if (watch.ends(tag)) return end_text(std::move(thread), closed ? tag : ChatTag::none);
    if (closed && !may_go_on) return;
    if (tag == ChatTag::parameter_end && !f.length_fits()) return;
    if (tag == ChatTag::parameter && f.tag_at_line_start) {
        f.state = kInnerKey;
        f.keys = {0, static_cast<uint16_t>(thread.stack[thread.stack.size() - 2].node->properties.size()), 0};
    }
    go(std::move(thread));
}

/// Counts the byte. False if it is not UTF-8.
bool GrammarMatcher::Step::add_to_text(Thread& thread) const {
    Frame& f = thread.stack.back();
    if (f.utf8 == 0) {
        if (byte == '<') f.tag_at_line_start = f.newline || f.count == 0;
        f.leading = f.leading || (f.count == 0 && byte == '\n');
        if (f.count == std::numeric_limits<int32_t>::max()) return false;
        ++f.count;
    }
    f.newline = byte == '\n';
    return utf8_step(f.utf8, byte);
}

/// Whether the text so far is not too long, without what may become the tag that ends it, and without a line feed before
/// that tag.
bool GrammarMatcher::Frame::has_room(const TagWatch& watch) const {
    const int64_t length = int64_t{count} - leading - watch.length;
    const bool may_end = text_of(ChatTag::parameter_end).starts_with(watch.candidate());
    if (watch.length > 0 && !may_end) return length + watch.length <= node->max_length;
    const bool feed = watch.length > 0 ? tag_at_line_start : newline;
    return length <= node->max_length + feed;
}

/// Behind </parameter>: whether the text that it ends has a length that fits.
bool GrammarMatcher::Frame::length_fits() const {
    const int64_t length =
        int64_t{count} - leading - static_cast<int64_t>(text_of(ChatTag::parameter_end).size());
    const int64_t content = length - (tag_at_line_start && length > 0);
    return content >= node->min_length && content <= node->max_length;
}

bool GrammarMatcher::Step::text_may_go_on(const Thread& thread) {
    const Frame& f = thread.stack.back();
    return f.count < f.node->max_length && thread.stack[thread.stack.size() - 2].all_required();
}

/// Behind </parameter>: whether what follows so far leads somewhere. `spaced`: there is a space already.
bool GrammarMatcher::Step::may_follow_text(const Thread& thread, bool spaced) const {
    if (text_may_go_on(thread)) return true;
    const TagWatch& watch = thread.watch;
    if (watch.after != TagWatch::After::parameter) return false;
    if (watch.length == 0) return is_blank(byte) && !spaced;
    Thread around = thread;
    around.stack.pop_back();
    Frame& call = around.stack.back();
    call.begin_key();
    return (text_of(ChatTag::function_end).starts_with(watch.candidate()) && call.all_required()) ||
           (text_of(ChatTag::parameter).starts_with(watch.candidate()) &&
            (may_be_key(around) || may_be_other_key(around)));
}

/// The text has ended with </parameter>, and this tag follows.
void GrammarMatcher::Step::end_text(Thread thread, ChatTag tag) {
    thread.stack.pop_back();
    thread.watch = {};
    Frame& call = thread.stack.back();
    if (tag == ChatTag::function_end && call.all_required()) {
        close_call(thread);
        return go(std::move(thread));
    }
    if (tag != ChatTag::parameter) return;
    call.begin_key();
    call.state = kKey;
    if (may_be_key(thread) || may_be_other_key(thread)) go(std::move(thread));
}

}  // namespace quern
