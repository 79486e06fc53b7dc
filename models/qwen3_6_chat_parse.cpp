// The state machine of the parser. It works on units (one tag or one character), never looks back and moves
// each unit at most from one buffer to the next, so any cut of the stream gives the same result in linear
// time. A decision that needs what follows is a state of its own, with the undecided text in `held_`.
#include <random>
#include <utility>

#include "models/python_text.h"
#include "models/qwen3_6_chat.h"
#include "models/qwen3_6_chat_lexer.h"
#include "models/tool_call_writer.h"
#include "models/tool_schema.h"

namespace quern {
namespace {

enum class State {
    think_start,      // nothing yet but white space; one <think> is skipped
    thinking,         // reasoning
    think_call,       // reasoning, then <tool_call> and white space: is it a call?
    content_start,    // after </think>: white space is dropped
    content,          // content
    content_call,     // content, then <tool_call> and white space: is it a call?
    name,             // in <function=
    body,             // between the tags of a function
    key,              // in <parameter=
    value,            // in a value
    after_parameter,  // value, </parameter>, white space: did the value end?
    after_function,   // value, </function>, white space: did the value end?
    after_block,      // value, </tool_call>, white space: did the value end?
    inner_key,        // value, <parameter= at the start of a line: is it a tag?
    between,          // after </function>, still in the block
};

/// One leading and one trailing line feed belong to the format.
std::string_view without_line_feeds(std::string_view value) {
    if (value.starts_with('\n')) value.remove_prefix(1);
    if (value.ends_with('\n')) value.remove_suffix(1);
    return value;
}

uint64_t random_seed() {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
}

class Parser final : public ChatParser {
  public:
    Parser(bool thinking_open, const nlohmann::ordered_json& tools, uint64_t id_seed)
        : schemas_(tools), random_(id_seed ? id_seed : random_seed()) {
        state_ = thinking_open ? State::think_start : State::content;
        message_.role = "assistant";
        if (thinking_open) message_.reasoning = "";
    }

    ChatDelta push(std::string_view text) override {
        lexer_.push(text, [this](const ChatUnit& unit) { accept(unit); });
        return take_delta();
    }

    ChatDelta finish(bool truncated) override {
        lexer_.finish([this](const ChatUnit& unit) { accept(unit); });
        end(truncated);
        return take_delta();
    }

    const Message& message() const override { return message_; }

    bool in_reasoning() const override {
        return state_ == State::think_start || state_ == State::thinking || state_ == State::think_call;
    }

  private:
    // Each handler takes the unit and returns true, or moves to another state that must take it instead and
    // returns false. No two states hand a unit back and forth.
    void accept(const ChatUnit& unit) {
        // The model only thought about a call, and then ended its thinking.
        if (unit.tag == ChatTag::think_end && in_thinking_ && in_call()) broken();
        while (!step(unit)) {
        }
    }

    bool step(const ChatUnit& unit) {
        switch (state_) {
            case State::think_start:
                return on_think_start(unit);
            case State::thinking:
                return on_thinking(unit);
            case State::think_call:
            case State::content_call:
                return on_call(unit);
            case State::content_start:
                return unit.space || go_on(State::content);
            case State::content:
                return on_content(unit);
            case State::name:
                return on_name(unit);
            case State::body:
                return on_body(unit);
            case State::key:
                return on_key(unit);
            case State::value:
                return on_value(unit);
            case State::after_parameter:
                return on_after_parameter(unit);
            case State::after_function:
                return on_after_tag(unit, ChatTag::tool_call_end);
            case State::after_block:
                return on_after_tag(unit, ChatTag::tool_call);
            case State::inner_key:
                return on_inner_key(unit);
            case State::between:
                return on_between(unit);
        }
        return true;
    }

    bool go(State state) { return state_ = state, true; }
    bool go_on(State state) { return state_ = state, false; }

    // --- thinking and content

    bool on_think_start(const ChatUnit& unit) {
        if (unit.space) return true;
        if (unit.tag == ChatTag::think && !think_skipped_) return think_skipped_ = true;
        return go_on(State::thinking);
    }

    bool on_thinking(const ChatUnit& unit) {
        if (unit.space) return space_ += unit.text, true;
        if (unit.tag == ChatTag::think_end) return space_.clear(), go(State::content_start);
        if (unit.tag == ChatTag::tool_call && schemas_.any()) return hold(unit, State::think_call);
        emit(delta_.reasoning, unit.text);
        return true;
    }

    bool on_content(const ChatUnit& unit) {
        if (unit.space) return space_ += unit.text, true;
        if (unit.tag == ChatTag::tool_call && schemas_.any()) return hold(unit, State::content_call);
        // The tag that was missing before a call may come after it.
        if (unit.tag == ChatTag::think_end && late_think_end_) {
            late_think_end_ = false;
            space_.clear();
            return true;
        }
        emit_content(unit.text);
        return true;
    }

    void emit_content(std::string_view text) {
        // Space between a call and text after it is worth something only as a separator.
        if (after_call_ && message_.content.empty() && delta_.content.empty()) space_.clear();
        after_call_ = late_think_end_ = false;
        emit(delta_.content, text);
    }

    bool hold(const ChatUnit& unit, State state) {
        held_ = unit.text;
        held_space_.clear();
        return go(state);
    }

    /// <tool_call> has been seen, in thinking or in content.
    bool on_call(const ChatUnit& unit) {
        if (unit.space) return held_space_ += unit.text, true;
        if (unit.tag == ChatTag::function) {
            in_thinking_ = state_ == State::think_call;
            space_before_call_ = std::exchange(space_, {});
            raw_ = std::exchange(held_, {}) + std::exchange(held_space_, {});
            return start_function(unit);
        }
        release_held();
        return false;
    }

    /// The <tool_call> that was held opens no call: it is text.
    void release_held() {
        const std::string tag = std::exchange(held_, {});
        if (state_ == State::think_call)
            emit(delta_.reasoning, tag);
        else
            emit_content(tag);
        space_ = std::exchange(held_space_, {});
        state_ = state_ == State::think_call ? State::thinking : State::content;
    }

    /// Appends text that does not end in space, after the space that was held back for it.
    void emit(std::string& out, std::string_view text) {
        out += space_;
        out += text;
        space_.clear();
    }

    // --- a call. raw_ is all of its text so far, for the case that it turns out not to be one.

    bool start_function(const ChatUnit& unit) {
        raw_ += unit.text;
        name_.clear();
        arguments_ = {};
        pieces_.reset();
        return go(State::name);
    }

    /// Not a call after all: its text goes where it came from; the unit is not part of it.
    bool broken() {
        space_ = std::exchange(space_before_call_, {});
        const std::string raw = std::exchange(raw_, {});
        const std::string_view text = python_rstrip(raw);
        if (in_thinking_)
            emit(delta_.reasoning, text);
        else
            emit_content(text);
        space_ = raw.substr(text.size());
        return go_on(in_thinking_ ? State::thinking : State::content);
    }

    bool on_name(const ChatUnit& unit) {
        if (unit.text == ">" && !python_strip(name_).empty()) {
            name_ = std::string(python_strip(name_));
            raw_ += unit.text;
            return go(State::body);
        }
        return collect(name_, unit) || broken();
    }

    bool on_key(const ChatUnit& unit) {
        if (unit.text == ">" && !python_strip(key_).empty()) {
            key_ = std::string(python_strip(key_));
            raw_ += unit.text;
            value_.clear();
            begin_value();
            return go(State::value);
        }
        return collect(key_, unit) || broken();
    }

    /// One more character of a name or key, unless none can have it.
    bool collect(std::string& word, const ChatUnit& unit) {
        if (unit.tag != ChatTag::none || unit.text == "\n" || unit.text == ">") return false;
        word += unit.text;
        raw_ += unit.text;
        return true;
    }

    bool on_body(const ChatUnit& unit) {
        if (unit.space) return raw_ += unit.text, true;
        switch (unit.tag) {
            case ChatTag::parameter:
                return start_key(unit);
            case ChatTag::function_end:
                return call_done(), go(State::between);
            case ChatTag::tool_call_end:
                return call_done(), block_done();
            default:
                return broken();
        }
    }

    bool start_key(const ChatUnit& unit) {
        raw_ += unit.text;
        key_.clear();
        return go(State::key);
    }

    bool on_value(const ChatUnit& unit) {
        raw_ += unit.text;
        switch (unit.tag) {
            case ChatTag::parameter_end:
                return hold(unit, State::after_parameter);
            case ChatTag::function_end:
                return hold(unit, State::after_function);
            case ChatTag::tool_call_end:
                return hold(unit, State::after_block);
            case ChatTag::parameter:
                if (!value_.empty() && value_.back() != '\n') break;
                inner_key_.clear();
                return hold(unit, State::inner_key);
            default:
                break;
        }
        value_ += unit.text;
        return true;
    }

    bool on_after_parameter(const ChatUnit& unit) {
        if (unit.space) return hold_space(unit);
        if (unit.tag != ChatTag::parameter && unit.tag != ChatTag::function_end &&
            unit.tag != ChatTag::tool_call_end)
            return back_to_value();
        value_done();
        return go_on(State::body);
    }

    /// After an end tag other than the parameter's own: it counts if `follower` comes next.
    bool on_after_tag(const ChatUnit& unit, ChatTag follower) {
        if (unit.space) return hold_space(unit);
        if (unit.tag != follower) return back_to_value();
        value_done();
        call_done();
        block_done();
        return follower == ChatTag::tool_call_end || go_on(State::content);
    }

    bool on_inner_key(const ChatUnit& unit) {
        if (unit.text == ">") {
            std::string next(python_strip(inner_key_));
            if (next.empty() || next == key_ || !schemas_.may_have(name_, next)) return back_to_value();
            value_done();
            key_ = std::move(next);
            raw_ += unit.text;
            begin_value();
            return go(State::value);
        }
        return collect(inner_key_, unit) || back_to_value();
    }

    bool hold_space(const ChatUnit& unit) {
        held_space_ += unit.text;
        raw_ += unit.text;
        return true;
    }

    bool back_to_value() {
        value_ += std::exchange(held_, {});
        value_ += std::exchange(held_space_, {});
        value_ += std::exchange(inner_key_, {});
        return go_on(State::value);
    }

    void value_done() {
        held_.clear();
        held_space_.clear();
        inner_key_.clear();
        const std::string value = std::exchange(value_, {});
        const std::string_view text = without_line_feeds(value);
        std::string json = coerce_parameter(text, schemas_.type(name_, key_));
        if (pieces_.begun()) pieces_.end_value(text, json);
        arguments_.set(key_, std::move(json));
    }

    /// A call that is written while thinking may turn out to be only thought of: it has no pieces before it ends.
    void begin_value() {
        if (in_thinking_) return;
        if (!pieces_.begun()) pieces_.begin_call(new_id(), name_);
        pieces_.begin_value(key_, schemas_.type(name_, key_) == ParameterType::string);
    }

    /// The line feed at the end may belong to the format.
    void stream_value() {
        if (state_ < State::value || state_ > State::inner_key || !pieces_.takes_text()) return;
        pieces_.grow_text(without_line_feeds(value_));
    }

    void call_done() {
        if (!pieces_.begun()) {
            pieces_.begin_call(new_id(), name_);
            for (const auto& [key, value] : arguments_.items()) {
                pieces_.begin_value(key, false);
                pieces_.end_value({}, value);
            }
        }
        pieces_.end_call();
        ToolCall call{pieces_.id(), std::exchange(name_, {}), arguments_.json()};
        pieces_.reset();
        delta_.tool_calls.push_back({static_cast<int>(message_.tool_calls.size()), call});
        message_.tool_calls.push_back(std::move(call));
        arguments_ = {};
        raw_.clear();
        space_before_call_.clear();
        late_think_end_ = late_think_end_ || in_thinking_;
        in_thinking_ = false;
    }

    bool block_done() {
        after_call_ = true;
        return go(State::content);
    }

    bool on_between(const ChatUnit& unit) {
        if (unit.space) return space_ += unit.text, true;
        if (unit.tag == ChatTag::function) return space_.clear(), start_function(unit);
        block_done();
        return unit.tag == ChatTag::tool_call_end ? (space_.clear(), true) : false;
    }

    std::string new_id() {
        static constexpr std::string_view kLetters =
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
        std::string id = "call_";
        for (int i = 0; i < 24; ++i) id += kLetters[random_() % kLetters.size()];
        return id;
    }

    // --- the end

    void end(bool truncated) {
        if (truncated && in_call())
            broken();
        else
            end_call();
        if (state_ == State::think_call || state_ == State::content_call) release_held();
        space_.clear();
    }

    bool in_call() const { return state_ >= State::name && state_ <= State::inner_key; }

    /// Forgives end tags that are missing at the end of the text, but not in the middle of a value.
    void end_call() {
        switch (state_) {
            case State::name:
            case State::key:
            case State::inner_key:
            case State::value:
                broken();
                return;
            case State::after_parameter:
            case State::after_function:
            case State::after_block:
                value_done();
                [[fallthrough]];
            case State::body:
                call_done();
                block_done();
                return;
            case State::between:
                block_done();
                return;
            default:
                return;
        }
    }

    ChatDelta take_delta() {
        stream_value();
        if (message_.reasoning) *message_.reasoning += delta_.reasoning;
        message_.content += delta_.content;
        delta_.call_pieces = pieces_.take();
        return std::exchange(delta_, {});
    }

    const ToolSchemas schemas_;
    std::mt19937_64 random_;
    ChatLexer lexer_;
    State state_;
    ChatDelta delta_;
    Message message_;

    std::string space_;       // white space that text may still follow
    std::string held_;        // a tag whose meaning the next unit decides
    std::string held_space_;  // white space after it
    bool think_skipped_ = false;
    bool in_thinking_ = false;     // the call that is being read was written while thinking
    bool late_think_end_ = false;  // a call ended the thinking: </think> may follow
    bool after_call_ = false;      // nothing but white space since a call

    std::string raw_, space_before_call_;
    std::string name_, key_, inner_key_, value_;
    ArgumentList arguments_;
    CallPieces pieces_;
};

}  // namespace

std::unique_ptr<ChatParser> make_qwen3_6_parser(bool thinking_open, const nlohmann::ordered_json& tools,
                                                uint64_t id_seed) {
    return std::make_unique<Parser>(thinking_open, tools, id_seed);
}

}  // namespace quern
