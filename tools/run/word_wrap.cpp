#include "tools/run/word_wrap.h"

#include <algorithm>

#include "tools/run/text_width.h"

namespace quern {
namespace {

/// Bytes of the character or colour sequence at the front; 0: more must come.
size_t length_of_first(std::string_view text) {
    const auto lead = static_cast<unsigned char>(text[0]);
    if (lead == 0x1B) {
        if (text.size() < 2) return 0;
        if (text[1] != '[') return 1;
        const size_t end = text.find_first_not_of("0123456789;?", 2);
        return end == std::string_view::npos ? 0 : end + 1;
    }
    const size_t length = lead < 0xC0 ? 1 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    return length <= text.size() ? length : 0;
}

/// Scripts without blanks between words: a line may break before and after each character.
bool stands_alone(std::string_view character) {
    return character.size() >= 3 && character[0] >= '\xE2' && character[0] <= '\xED' &&
           (character >= "\xE3\x80\x80" || character.substr(0, 2) >= "\xE2\xBA") &&
           text_width(character) == 2;
}

bool closes(std::string_view character) {
    static constexpr std::string_view kClosing = "、。，．：；！？」』）】》〉〕…";
    return kClosing.find(character) != std::string_view::npos;
}

std::string without_colors(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const size_t n = std::max<size_t>(length_of_first(text), 1);
        if (text[0] != 0x1B) out += text.substr(0, n);
        text.remove_prefix(n);
    }
    return out;
}

bool is_marker(const std::string& word) {
    if (word == "-" || word == "*" || word == "+" || word == ">" || word == "\xE2\x80\xA2") return true;
    return word.size() >= 2 && word.size() <= 4 && (word.back() == '.' || word.back() == ')') &&
           word.find_first_not_of("0123456789") == word.size() - 1;
}

}  // namespace

std::string WordWrap::push(std::string_view text) {
    if (columns_ <= 0) return std::string(text);
    std::string out;
    part_ += text;
    std::string_view left = part_;
    while (!left.empty()) {
        const size_t n = length_of_first(left);
        if (n == 0) break;
        take(left.substr(0, n), out);
        left.remove_prefix(n);
    }
    part_ = std::string(left);
    return out;
}

void WordWrap::take(std::string_view character, std::string& out) {
    if (character == "\n") return end_line(out);
    if (code_ && !first_) {
        out += character;
        return;
    }
    if (character == " " || character == "\t") {
        end_word(out);
        (code_ && !first_ ? out : blanks_) += character == " " ? " " : "    ";
        return;
    }
    if (stands_alone(character) && !closes(character)) end_word(out);
    word_ += character;
}

void WordWrap::end_word(std::string& out) {
    if (word_.empty()) return;
    const int width = text_width(word_), blank = static_cast<int>(blanks_.size());
    const bool fits = column_ + blank + width <= columns_ || column_ <= indent_ || code_;
    if (first_) {
        column_ = blank;
        out += blanks_;
        note_first_word(width);
    } else if (fits) {
        out += blanks_;
        column_ += blank;
    } else {
        out += "\n" + std::string(static_cast<size_t>(indent_), ' ');
        column_ = indent_;
    }
    out += word_;
    column_ += width;
    if (column_ > columns_) column_ %= columns_;
    blanks_.clear();
    word_.clear();
}

/// The line's indentation, and whether it is code from here on.
void WordWrap::note_first_word(int width) {
    const std::string bare = without_colors(word_);
    if (bare.empty()) return;
    const bool fence = bare.starts_with("```") || bare.starts_with("~~~");
    indent_ = column_ + (is_marker(bare) ? width + 1 : 0);
    indent_ = std::min(std::max(indent_, least_indent_), columns_ / 2);
    if (fence) code_ = !code_;
    first_ = false;
}

void WordWrap::end_line(std::string& out) {
    end_word(out);
    out += "\n";
    blanks_.clear();
    column_ = indent_ = 0;
    first_ = true;
}

std::string WordWrap::finish() {
    std::string out;
    if (columns_ <= 0) return out;
    end_word(out);
    out += blanks_ + part_;
    blanks_.clear();
    part_.clear();
    return out;
}

void WordWrap::resize(int columns) {
    if (columns_ <= 0 || columns <= 0) return;
    columns_ = columns;
    indent_ = std::min(indent_, columns / 2);
}

std::string wrap_text(const std::string& text, int columns, int indent) {
    WordWrap wrap(columns, indent);
    std::string out = wrap.push(text);
    return out + wrap.finish();
}

}  // namespace quern
