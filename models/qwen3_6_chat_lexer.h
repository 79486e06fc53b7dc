// Cuts generated text into tags of the chat format, white space, and everything else, as it arrives.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "models/python_text.h"
#include "models/utf8.h"

namespace quern {

enum class ChatTag {
    none,
    think,
    think_end,
    tool_call,
    tool_call_end,
    function,
    function_end,
    parameter,
    parameter_end,
};

inline constexpr std::array<std::string_view, 9> kChatTagText = {
    "",           "<think>",     "</think>",    "<tool_call>", "</tool_call>",
    "<function=", "</function>", "<parameter=", "</parameter>"};

/// One tag, or one character of UTF-8.
struct ChatUnit {
    std::string_view text;
    ChatTag tag = ChatTag::none;
    bool space = false;
};

/// Holds back what may become a tag, and bytes of an unfinished character. Calls `sink` with the same units wherever
/// the text is cut. Constant time per byte: '<' occurs in tags only as their first byte, so a candidate that
/// fails is text as a whole.
class ChatLexer {
  public:
    template <typename Sink>
    void push(std::string_view bytes, Sink&& sink) {
        std::string text;
        std::swap(text, cut_);
        text += bytes;
        const size_t whole = text.size() - utf8_cut_tail(text);
        cut_ = text.substr(whole);
        text.resize(whole);
        lossy(text, sink);
    }

    template <typename Sink>
    void finish(Sink&& sink) {
        std::string text;
        std::swap(text, cut_);
        lossy(text, sink);
        give_up(sink);
    }

  private:
    template <typename Sink>
    void lossy(const std::string& text, Sink& sink) {
        for (size_t at = 0; at < text.size();) {
            const Utf8Unit unit = utf8_unit(text, at);
            character(unit.valid ? std::string_view(text).substr(at, unit.length) : kReplacementCharacter,
                      sink);
            at += unit.length;
        }
    }

    template <typename Sink>
    void character(std::string_view c, Sink& sink) {
        if (!candidate_.empty()) {
            candidate_ += c;
            const ChatTag tag = match();
            if (tag != ChatTag::none) {
                sink(ChatUnit{kChatTagText[static_cast<size_t>(tag)], tag, false});
                candidate_.clear();
                return;
            }
            if (may_become_tag_) return;
            candidate_.resize(candidate_.size() - c.size());
            give_up(sink);
        }
        if (c == "<") {
            candidate_ = c;
        } else {
            sink(ChatUnit{c, ChatTag::none, python_space_prefix(c) > 0});
        }
    }

    /// The tag that the candidate is, or none; then may_become_tag_ says whether it begins one.
    ChatTag match() {
        may_become_tag_ = false;
        for (size_t i = 1; i < kChatTagText.size(); ++i) {
            if (candidate_ == kChatTagText[i]) return static_cast<ChatTag>(i);
            may_become_tag_ = may_become_tag_ || kChatTagText[i].starts_with(candidate_);
        }
        return ChatTag::none;
    }

    template <typename Sink>
    void give_up(Sink& sink) {
        std::string text;
        std::swap(text, candidate_);
        for (char c : text) sink(ChatUnit{std::string_view(&c, 1), ChatTag::none, false});
    }

    std::string cut_;        // bytes of an unfinished character
    std::string candidate_;  // start of a tag: '<' and ASCII letters, '/' or '_'
    bool may_become_tag_ = false;
};

}  // namespace quern
