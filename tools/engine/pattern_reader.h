// What regular expressions and GBNF have in common: classes of characters, escapes, repetitions. Internal to grammar*.cpp.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "ggml-like/check.h"
#include "models/utf8.h"
#include "tools/engine/automaton.h"

namespace quern {

class PatternReader {
  protected:
    using Ranges = AutomatonBuilder::Ranges;
    using Part = AutomatonBuilder::Part;
    static constexpr int kMaxDepth = 100, kMaxRepeat = 10000;

    PatternReader(std::string_view text, const char* what, bool json = false)
        : text_(text), build_(json), what_(what) {}

    bool at_end() const { return at_ >= text_.size(); }
    char peek() const { return at_end() ? '\0' : text_[at_]; }
    bool take(std::string_view word) {
        if (!text_.substr(at_).starts_with(word)) return false;
        at_ += word.size();
        return true;
    }
    [[noreturn]] void fail(const std::string& why) const {
        FAIL(usage, "{}: at byte {}: {}", what_, at_, why);
    }

    char32_t code_point() {
        if (at_end()) fail("it ends too soon");
        const Utf8Unit unit = utf8_unit(text_, at_);
        if (!unit.valid) fail("not UTF-8");
        char32_t c = static_cast<unsigned char>(text_[at_]);
        if (unit.length > 1) c &= 0x7Fu >> unit.length;
        for (size_t i = 1; i < unit.length; ++i)
            c = c << 6 | (static_cast<unsigned char>(text_[at_ + i]) & 0x3F);
        at_ += unit.length;
        return c;
    }

    char32_t hex(int digits) {
        char32_t c = 0;
        for (int i = 0; i < digits; ++i, ++at_) {
            const size_t digit = std::string_view("0123456789abcdef").find(static_cast<char>(peek() | 0x20));
            if (at_end() || digit == std::string_view::npos) fail("hex digits are missing");
            c = c * 16 + static_cast<char32_t>(digit);
        }
        if (c > 0x10FFFF) fail("no such character");
        return c;
    }

    /// Behind a backslash: one character, or none if the letter means something else.
    std::optional<char32_t> escaped() {
        const char c = peek();
        const size_t known = std::string_view("nrtfv0").find(c);
        if (!at_end() && known != std::string_view::npos) return ++at_, U"\n\r\t\f\v\0"[known];
        if (take("x")) return hex(2);
        if (take("u")) return hex(4);
        if (take("U")) return hex(8);
        if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9')) return {};
        return code_point();
    }

    /// \d, \w, \s and what they leave; nothing for another letter.
    bool named_class(Ranges& ranges, bool& inverted) {
        const char c = static_cast<char>(peek() | 0x20);
        inverted = peek() >= 'A' && peek() <= 'Z';
        if (c == 'd') ranges = {{'0', '9'}};
        if (c == 'w') ranges = {{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
        if (c == 's') ranges = {{'\t', '\r'}, {' ', ' '}};
        at_ += !ranges.empty();
        return !ranges.empty();
    }

    /// Behind [.
    Part char_class() {
        Ranges ranges;
        const bool inverted = take("^");
        for (bool first = true; first || peek() != ']'; first = false) {
            if (at_end()) fail("']' is missing");
            Ranges named;
            bool others = false;
            const size_t begun = at_;
            if (take("\\") && named_class(named, others)) {
                if (others) fail("\\D, \\W and \\S inside a class are not supported");
                ranges.insert(ranges.end(), named.begin(), named.end());
                continue;
            }
            at_ = begun;
            const char32_t low = class_character();
            const bool range = peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']';
            at_ += range;
            const char32_t high = range ? class_character() : low;
            if (high < low) fail("a range that goes down");
            ranges.emplace_back(low, high);
        }
        ++at_;
        return build_.character(std::move(ranges), inverted);
    }

    /// *, +, ? and {m,n} behind a part.
    Part repeated(Part part) {
        if (take("*")) return build_.repeat(part, 0, AutomatonBuilder::kMany);
        if (take("+")) return build_.repeat(part, 1, AutomatonBuilder::kMany);
        if (take("?")) return build_.repeat(part, 0, 1);
        if (!take("{")) return part;
        const int least = number().value_or(0);
        int most = least;
        if (take(",")) most = number().value_or(AutomatonBuilder::kMany);
        if (!take("}")) fail("'}' is missing");
        if (most != AutomatonBuilder::kMany && most < least) fail("a repetition that goes down");
        return build_.repeat(part, least, most);
    }

    std::string_view text_;
    size_t at_ = 0;
    AutomatonBuilder build_;

  private:
    char32_t class_character() {
        if (!take("\\")) return code_point();
        const auto c = escaped();
        if (!c) fail("an escape that is not supported");
        return *c;
    }

    std::optional<int> number() {
        if (peek() < '0' || peek() > '9') return {};
        int n = 0;
        for (; peek() >= '0' && peek() <= '9'; ++at_)
            if ((n = n * 10 + (peek() - '0')) > kMaxRepeat)
                fail(fmt::format("more than {} repetitions", kMaxRepeat));
        return n;
    }

    const char* what_;
};

}  // namespace quern
