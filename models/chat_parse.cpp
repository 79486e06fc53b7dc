#include <algorithm>
#include <random>

#include "models/chat_format.h"
#include "models/tool_arguments.h"

namespace quern {
namespace {

constexpr std::string_view kThinkOpen = "<think>", kThinkClose = "</think>", kCall = "<tool_call>",
                           kCallEnd = "</tool_call>", kFunction = "<function=", kFunctionEnd = "</function>";
constexpr size_t kMaxGap = 64;  // whitespace between tags that belong together

bool is_space(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

enum class Match { no, yes, perhaps };

/// Whether `text` begins with `tag`, or may once more of it is there.
Match begins(std::string_view text, std::string_view tag) {
    if (text.size() >= tag.size()) return text.starts_with(tag) ? Match::yes : Match::no;
    return tag.starts_with(text) ? Match::perhaps : Match::no;
}

/// The same after optional whitespace; `skipped` is how much there was.
Match begins_after_space(std::string_view text, std::string_view tag, size_t& skipped) {
    skipped = 0;
    while (skipped < text.size() && is_space(text[skipped])) ++skipped;
    if (skipped > kMaxGap) return Match::no;
    return begins(text.substr(skipped), tag);
}

std::string new_call_id() {
    static thread_local std::mt19937_64 random{std::random_device{}()};
    constexpr char kDigits[] = "0123456789abcdefghijklmnopqrstuvwxyz";
    std::string id = "call_";
    for (int i = 0; i < 24; ++i) id += kDigits[random() % 36];
    return id;
}

}  // namespace

ChatParser::ChatParser(bool thinking_open, nlohmann::ordered_json tools)
    : tools_(std::move(tools)),
      state_(thinking_open ? State::reasoning : State::content),
      trim_start_(thinking_open) {
    message_.role = "assistant";
}

ChatDelta ChatParser::push(std::string_view text) {
    ChatDelta delta;
    buffer_ += text;
    while (step(false, delta) == Next::more) {
    }
    buffer_.erase(0, at_);
    scan_ -= std::min(scan_, at_);
    at_ = 0;
    return delta;
}

ChatDelta ChatParser::finish() {
    ChatDelta delta;
    while (step(true, delta) == Next::more) {
    }
    buffer_.clear();
    at_ = scan_ = 0;
    space_.clear();
    return delta;
}

ChatParser::Next ChatParser::step(bool last, ChatDelta& delta) {
    if (at_ == buffer_.size()) return Next::wait;
    if (state_ == State::call) return step_call(last, delta);
    if (state_ == State::after_call) return step_after_call(last);
    return step_text(last, delta);
}

void ChatParser::enter_content() {
    state_ = State::content;
    trim_start_ = true;
    space_.clear();
}

/// Thinking or content: up to the next '<', and what that turns out to be.
ChatParser::Next ChatParser::step_text(bool last, ChatDelta& delta) {
    const std::string_view rest = std::string_view(buffer_).substr(at_);
    const size_t open = std::min(rest.find('<'), rest.size());
    if (open > 0) {
        emit(rest.substr(0, open), delta);
        at_ += open;
        return Next::more;
    }
    const bool reasoning = state_ == State::reasoning;
    const Match close = reasoning ? begins(rest, kThinkClose) : Match::no;
    if (close == Match::yes) {
        at_ += kThinkClose.size();
        enter_content();
        return Next::more;
    }
    // One opening tag is allowed at the start: some prompts leave it to the model.
    const bool at_start = reasoning && trim_start_ && !message_.reasoning;
    const Match again = at_start ? begins(rest, kThinkOpen) : Match::no;
    if (again == Match::yes) {
        at_ += kThinkOpen.size();
        message_.reasoning.emplace();
        return Next::more;
    }
    size_t gap = 0;
    Match call = begins(rest, kCall);
    if (call == Match::yes) call = begins_after_space(rest.substr(kCall.size()), kFunction, gap);
    if (call == Match::yes) {  // also ends thinking that was not closed
        scan_ = at_ + kCall.size() + gap + kFunction.size();
        state_ = State::call;
        space_.clear();
        return Next::more;
    }
    const bool undecided = close == Match::perhaps || again == Match::perhaps || call == Match::perhaps;
    if (undecided && !last) return Next::wait;
    emit(rest.substr(0, 1), delta);
    ++at_;
    return Next::more;
}

/// A call runs to a </function> that is followed by </tool_call>, by another function, or by nothing.
ChatParser::Next ChatParser::step_call(bool last, ChatDelta& delta) {
    const std::string_view all = buffer_;
    size_t gap = 0;
    begins_after_space(all.substr(at_).starts_with(kCall) ? all.substr(at_ + kCall.size()) : all.substr(at_),
                       kFunction, gap);
    const size_t tag = all.substr(at_).starts_with(kCall) ? at_ + kCall.size() + gap : at_ + gap;
    const size_t body = tag + kFunction.size();
    for (size_t end = all.find(kFunctionEnd, scan_); end != std::string_view::npos;
         end = all.find(kFunctionEnd, scan_)) {
        const std::string_view after = all.substr(end + kFunctionEnd.size());
        size_t skipped = 0;
        const Match close = begins_after_space(after, kCallEnd, skipped);
        const Match more = begins_after_space(after, kFunction, skipped);
        const bool over = last && skipped == after.size();
        if (close == Match::yes || more == Match::yes || over) {
            if (!emit_call(all.substr(body, end - body), delta))
                emit(all.substr(at_, end + kFunctionEnd.size() - at_), delta);
            at_ = end + kFunctionEnd.size();
            state_ = State::after_call;
            return Next::more;
        }
        if (!last && (close == Match::perhaps || more == Match::perhaps)) {
            scan_ = end;
            return Next::wait;
        }
        scan_ = end + kFunctionEnd.size();
    }
    if (!last) {
        scan_ = std::max(scan_, all.size() - std::min(all.size(), kFunctionEnd.size() - 1));
        return Next::wait;
    }
    // The text ended inside the call. It counts only if its last parameter was closed.
    std::string_view rest = all.substr(body);
    while (!rest.empty() && is_space(rest.back())) rest.remove_suffix(1);
    if (!rest.ends_with("</parameter>") || !emit_call(rest, delta)) {
        enter_content();
        trim_start_ = false;
        emit(all.substr(at_), delta);
    }
    at_ = all.size();
    return Next::more;
}

ChatParser::Next ChatParser::step_after_call(bool last) {
    const std::string_view rest = std::string_view(buffer_).substr(at_);
    size_t gap = 0;
    const Match more = begins_after_space(rest, kFunction, gap),
                close = begins_after_space(rest, kCallEnd, gap);
    if (more == Match::yes) {
        scan_ = at_ + gap + kFunction.size();
        state_ = State::call;
        return Next::more;
    }
    if (!last && close != Match::yes && (more == Match::perhaps || close == Match::perhaps))
        return Next::wait;
    if (close == Match::yes) at_ += gap + kCallEnd.size();
    enter_content();
    return Next::more;
}

/// Text of the current kind. Whitespace waits until something else follows it.
void ChatParser::emit(std::string_view text, ChatDelta& delta) {
    if (trim_start_) {
        while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
        if (text.empty()) return;
        trim_start_ = false;
    }
    size_t end = text.size();
    while (end > 0 && is_space(text[end - 1])) --end;
    if (end > 0) {
        const std::string now = space_ + std::string(text.substr(0, end));
        space_.clear();
        if (state_ == State::reasoning) {
            delta.reasoning += now;
            if (!message_.reasoning) message_.reasoning.emplace();
            *message_.reasoning += now;
        } else {
            delta.content += now;
            message_.content += now;
        }
    }
    space_ += text.substr(end);
}

bool ChatParser::emit_call(std::string_view function, ChatDelta& delta) {
    std::optional<ToolCall> call = parse_function(function, tools_);
    if (!call) return false;
    call->id = new_call_id();
    delta.tool_calls.push_back({static_cast<int>(message_.tool_calls.size()), *call});
    message_.tool_calls.push_back(std::move(*call));
    return true;
}

}  // namespace quern
