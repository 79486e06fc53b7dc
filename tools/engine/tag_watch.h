// TagWatch: where the chat parser would see the value of a tool's parameter end. Reads tags as ChatLexer does.
#pragma once

#include "models/qwen3_6_chat_lexer.h"

namespace quern {

struct TagWatch {
    /// What came last but for white space, where that matters to the next tag.
    enum class After : uint8_t { text, parameter, function, block };

    bool on = false;
    After after = After::text;
    uint8_t tag = 0, length = 0;  // what there is of a tag: the beginning of this one, and of others

    std::string_view candidate() const { return kChatTagText[tag].substr(0, length); }

    /// The tag that this byte completes, or none.
    ChatTag push(unsigned char byte) {
        if (length > 0) {
            for (size_t i = 1; i < kChatTagText.size(); ++i) {
                const std::string_view text = kChatTagText[i];
                if (!text.starts_with(candidate()) || static_cast<unsigned char>(text[length]) != byte)
                    continue;
                tag = static_cast<uint8_t>(i);
                if (++length < text.size()) return ChatTag::none;
                length = 0;
                return static_cast<ChatTag>(i);
            }
            length = 0;
            after = After::text;
        }
        if (byte == '<') {
            tag = 1;
            length = 1;
        } else if (!is_space(byte)) {
            after = After::text;
        }
        return ChatTag::none;
    }

    /// Whether the value ends before this tag, which push returned; if not, the tag is part of it.
    bool ends(ChatTag t) {
        const bool end =
            (after == After::parameter &&
             (t == ChatTag::parameter || t == ChatTag::function_end || t == ChatTag::tool_call_end)) ||
            (after == After::function && t == ChatTag::tool_call_end) ||
            (after == After::block && t == ChatTag::tool_call);
        after = t == ChatTag::parameter_end   ? After::parameter
                : t == ChatTag::function_end  ? After::function
                : t == ChatTag::tool_call_end ? After::block
                                              : After::text;
        return end;
    }

    /// ASCII only: other white space is left to whoever asks.
    static bool is_space(unsigned char byte) {
        return (byte >= 9 && byte <= 13) || (byte >= 28 && byte <= 32);
    }

    bool operator==(const TagWatch&) const = default;
};

}  // namespace quern
