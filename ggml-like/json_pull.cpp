#include "ggml-like/json_pull.h"

#include <cstring>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr int kMaxDepth = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// How many characters at the start of `text` are plain: ASCII, no quote, backslash or control character.
/// Counted eight at a time, so up to seven more may follow.
size_t plain_run(std::string_view text) {
    constexpr uint64_t kOnes = 0x0101010101010101u, kHigh = 0x80 * kOnes;
    const auto below = [](uint64_t w, uint64_t limit) { return (w - limit * kOnes) & ~w; };  // in kHigh
    size_t n = 0;
    for (; n + 8 <= text.size(); n += 8) {
        uint64_t w;
        memcpy(&w, text.data() + n, sizeof w);
        const uint64_t quotes = below(w ^ ('"' * kOnes), 1), slashes = below(w ^ ('\\' * kOnes), 1);
        if (((w | below(w, 0x20) | quotes | slashes) & kHigh) != 0) break;
    }
    return n;
}

void append_utf8(std::string& out, uint32_t c) {
    if (c < 0x80) {
        out += static_cast<char>(c);
    } else if (c < 0x800) {
        out += static_cast<char>(0xc0 | (c >> 6));
        out += static_cast<char>(0x80 | (c & 63));
    } else if (c < 0x10000) {
        out += static_cast<char>(0xe0 | (c >> 12));
        out += static_cast<char>(0x80 | ((c >> 6) & 63));
        out += static_cast<char>(0x80 | (c & 63));
    } else {
        out += static_cast<char>(0xf0 | (c >> 18));
        out += static_cast<char>(0x80 | ((c >> 12) & 63));
        out += static_cast<char>(0x80 | ((c >> 6) & 63));
        out += static_cast<char>(0x80 | (c & 63));
    }
}

}  // namespace

bool valid_utf8(std::string_view s) {
    size_t i = 0;
    while (i < s.size()) {
        const auto byte = [&](size_t k) { return k < s.size() ? static_cast<uint8_t>(s[k]) : uint8_t{0}; };
        const uint8_t a = byte(i);
        if (a < 0x80) {
            ++i;
            continue;
        }
        const int extra = a >= 0xc2 && a <= 0xdf   ? 1
                          : (a & 0xf0) == 0xe0     ? 2
                          : a >= 0xf0 && a <= 0xf4 ? 3
                                                   : 0;
        if (extra == 0) return false;
        const uint8_t b = byte(i + 1);
        if ((a == 0xe0 && b < 0xa0) || (a == 0xed && b > 0x9f)) return false;  // overlong, surrogate
        if ((a == 0xf0 && b < 0x90) || (a == 0xf4 && b > 0x8f)) return false;  // overlong, above U+10FFFF
        for (int k = 1; k <= extra; ++k) {
            if ((byte(i + static_cast<size_t>(k)) & 0xc0) != 0x80) return false;
        }
        i += static_cast<size_t>(extra) + 1;
    }
    return true;
}

std::string escaped(std::string_view s, size_t limit) {
    std::string out;
    for (const char c : s.substr(0, limit)) {
        if (c >= 0x20 && c < 0x7f)
            out += c;
        else
            out += fmt::format("\\x{:02x}", static_cast<uint8_t>(c));
    }
    if (s.size() > limit) out += fmt::format("... ({} bytes)", s.size());
    return out;
}

void JsonPull::fail(const std::string& message) const {
    const std::string_view rest = at_ < text_.size() ? text_.substr(at_, 24) : std::string_view();
    FAIL(model, "{}: JSON error at byte {}: {}; found {}", what_, at_, message,
         rest.empty() ? "the end" : "'" + escaped(rest) + "'");
}

void JsonPull::skip_space() {
    while (at_ < text_.size()) {
        const char c = text_[at_];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
        ++at_;
    }
}

char JsonPull::peek() {
    skip_space();
    return at_ < text_.size() ? text_[at_] : '\0';
}

bool JsonPull::accept(char c) {
    if (peek() != c || at_ >= text_.size()) return false;
    ++at_;
    return true;
}

void JsonPull::expect(char c, const char* where) {
    if (!accept(c)) fail(fmt::format("expected '{}' {}", c, where));
}

uint32_t JsonPull::hex4() {
    uint32_t v = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
        const char c = at_ < text_.size() ? text_[at_] : '\0';
        const int digit = is_digit(c)            ? c - '0'
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                                 : -1;
        if (digit < 0) fail("expected four hexadecimal digits after \\u");
        v = v * 16 + static_cast<uint32_t>(digit);
    }
    return v;
}

void JsonPull::unescape(std::string& out) {  // at_ is behind the backslash
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    switch (c) {
        case '"':
        case '\\':
        case '/':
            out += c;
            return;
        case 'b':
            out += '\b';
            return;
        case 'f':
            out += '\f';
            return;
        case 'n':
            out += '\n';
            return;
        case 'r':
            out += '\r';
            return;
        case 't':
            out += '\t';
            return;
        case 'u':
            break;
        default:
            fail("unknown escape in a string");
    }
    uint32_t code = hex4();
    if (code >= 0xdc00 && code <= 0xdfff) fail("lone surrogate in a string");
    if (code >= 0xd800 && code <= 0xdbff) {
        if (text_.substr(at_, 2) != "\\u") fail("lone surrogate in a string");
        at_ += 2;
        const uint32_t low = hex4();
        if (low < 0xdc00 || low > 0xdfff) fail("lone surrogate in a string");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(out, code);
}

std::string_view JsonPull::string(std::string& scratch, const char* where) {
    expect('"', where);
    const size_t start = at_;
    at_ += plain_run(text_.substr(at_));
    bool ascii = true;
    while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '\\') {
        const auto c = static_cast<uint8_t>(text_[at_]);
        if (c < 0x20) fail("control character in a string");
        ascii = ascii && c < 0x80;
        ++at_;
    }
    std::string_view value = text_.substr(start, at_ - start);
    if (at_ < text_.size() && text_[at_] == '\\') {
        scratch.assign(value);
        while (at_ < text_.size() && text_[at_] != '"') {
            const auto c = static_cast<uint8_t>(text_[at_++]);
            if (c < 0x20) fail("control character in a string");
            if (c == '\\')
                unescape(scratch);
            else
                scratch += static_cast<char>(c);
        }
        value = scratch;
        ascii = false;
    }
    if (at_ >= text_.size()) fail("a string does not end");
    if (!ascii && !valid_utf8(value)) fail("a string is not valid UTF-8");
    ++at_;
    return value;
}

uint64_t JsonPull::integer(uint64_t limit, const char* where) {
    const char first = peek();
    if (!is_digit(first)) fail(fmt::format("expected a whole number >= 0 {}", where));
    uint64_t v = 0;
    const size_t start = at_;
    while (at_ < text_.size() && is_digit(text_[at_])) {
        const auto digit = static_cast<uint64_t>(text_[at_] - '0');
        if (v > (limit - digit) / 10 || digit > limit) fail(fmt::format("number above {} {}", limit, where));
        v = v * 10 + digit;
        ++at_;
    }
    if (first == '0' && at_ - start > 1) fail(fmt::format("leading zero in a number {}", where));
    const char next = at_ < text_.size() ? text_[at_] : '\0';
    if (next == '.' || next == 'e' || next == 'E')
        fail(fmt::format("expected a whole number in digits {}", where));
    return v;
}

std::optional<uint64_t> JsonPull::accept_integer(uint64_t limit) {
    if (!is_digit(peek())) return std::nullopt;
    const size_t start = at_;
    uint64_t v = 0;
    bool fits = true;
    for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
        const auto digit = static_cast<uint64_t>(text_[at_] - '0');
        fits = fits && digit <= limit && v <= (limit - digit) / 10;
        if (fits) v = v * 10 + digit;
    }
    const char next = at_ < text_.size() ? text_[at_] : '\0';
    const bool plain = next != '.' && next != 'e' && next != 'E' && (text_[start] != '0' || at_ - start == 1);
    if (fits && plain) return v;
    at_ = start;
    return std::nullopt;
}

void JsonPull::skip_scalar(const char* where) {
    const char c = peek();
    for (const std::string_view word : {"true", "false", "null"}) {
        if (text_.substr(at_, word.size()) == word) {
            at_ += word.size();
            return;
        }
    }
    if (!is_digit(c) && c != '-') fail(fmt::format("expected a value {}", where));
    const auto digits = [&] {
        if (at_ >= text_.size() || !is_digit(text_[at_])) fail("malformed number");
        while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    };
    if (c == '-') ++at_;
    if (at_ < text_.size() && text_[at_] == '0')
        ++at_;
    else
        digits();
    if (at_ < text_.size() && text_[at_] == '.') {
        ++at_;
        digits();
    }
    if (at_ < text_.size() && (text_[at_] == 'e' || text_[at_] == 'E')) {
        ++at_;
        if (at_ < text_.size() && (text_[at_] == '+' || text_[at_] == '-')) ++at_;
        digits();
    }
}

void JsonPull::skip_value(const char* where) {
    std::string scratch;
    char open[kMaxDepth];  // the brackets we are inside of
    int depth = 0;
    const auto key = [&] {
        string(scratch, "as an object's key");
        expect(':', "after an object's key");
    };
    for (;;) {
        const char c = peek();
        bool empty = false;
        if (c == '{' || c == '[') {
            if (depth == kMaxDepth) fail(fmt::format("nested deeper than {} levels", kMaxDepth));
            ++at_;
            open[depth++] = c;
            empty = peek() == (c == '{' ? '}' : ']');
            if (!empty) {
                if (c == '{') key();
                continue;
            }
        } else if (c == '"') {
            string(scratch, where);
        } else {
            skip_scalar(where);
        }
        // A value ended: close all brackets that end here, or continue after a comma.
        while (depth > 0 && (empty || !accept(','))) {
            empty = false;
            expect(open[depth - 1] == '{' ? '}' : ']', "or ','");
            --depth;
        }
        if (depth == 0) return;
        if (open[depth - 1] == '{') key();
    }
}

void JsonPull::end() {
    skip_space();
    if (at_ < text_.size()) fail("expected the end of the text");
}

}  // namespace quern
