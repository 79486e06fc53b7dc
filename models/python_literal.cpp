// Python literals as JSON: models sometimes write {'a': True} where a JSON object is due.
#include <charconv>
#include <string>
#include <system_error>

#include "models/python_text.h"
#include "models/utf8.h"

namespace quern {
namespace {

using nlohmann::ordered_json;

constexpr int kMaxDepth = 64;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

int hex_value(char c) {
    if (is_digit(c)) return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/// Rewrites the literal as JSON text, so that duplicates and numbers get the rules of the JSON reader.
/// Recursive, at most kMaxDepth deep. Every function: true and the text advanced, or false for "not that".
class LiteralReader {
  public:
    explicit LiteralReader(std::string_view text) : text_(text) {}

    std::optional<ordered_json> read() {
        if (!value(0)) return {};
        skip_space();
        if (at_ != text_.size()) return {};
        return parse_ordered_json(json_);
    }

  private:
    char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
    bool take(char c) {
        if (peek() != c || at_ >= text_.size()) return false;
        ++at_;
        return true;
    }
    void skip_space() {
        while (const size_t n = python_space_prefix(text_.substr(at_))) at_ += n;
    }

    bool value(int depth) {
        if (depth > kMaxDepth) return false;
        skip_space();
        switch (peek()) {
            case '{':
                return dict(depth);
            case '[':
                return ++at_, sequence(']', depth);
            case '(':
                return ++at_, sequence(')', depth);
            case '\'':
            case '"':
                return strings();
            default:
                return word() || number();
        }
    }

    bool dict(int depth) {
        ++at_;
        json_ += '{';
        for (bool first = true;; first = false) {
            skip_space();
            if (take('}')) break;
            if (!first) json_ += ',';
            if (!key()) return false;
            skip_space();
            if (!take(':')) return false;
            json_ += ':';
            if (!value(depth + 1)) return false;
            skip_space();
            if (!take(',') && peek() != '}') return false;
        }
        json_ += '}';
        return true;
    }

    /// Keys of JSON are strings: numbers and words are put between quotes as they come out as JSON.
    bool key() {
        if (peek() == '\'' || peek() == '"') return strings();
        json_ += '"';
        if (!word() && !number()) return false;
        json_ += '"';
        return true;
    }

    bool sequence(char close, int depth) {
        json_ += '[';
        for (bool first = true;; first = false) {
            skip_space();
            if (take(close)) break;
            if (!first) json_ += ',';
            if (!value(depth + 1)) return false;
            skip_space();
            if (!take(',') && peek() != close) return false;
        }
        json_ += ']';
        return true;
    }

    bool word() {
        static constexpr std::pair<std::string_view, std::string_view> kWords[] = {
            {"True", "true"}, {"False", "false"}, {"None", "null"},
            {"true", "true"}, {"false", "false"}, {"null", "null"}};
        for (const auto& [python, json] : kWords) {
            if (text_.substr(at_, python.size()) != python) continue;
            at_ += python.size();
            json_ += json;
            return true;
        }
        return false;
    }

    bool number() {
        const size_t first = at_;
        if (!take('-')) take('+');
        const size_t digits = at_;
        while (is_digit(peek()) || peek() == '.' || peek() == 'e' || peek() == 'E' ||
               ((peek() == '-' || peek() == '+') && (text_[at_ - 1] == 'e' || text_[at_ - 1] == 'E')))
            ++at_;
        const std::string_view body = text_.substr(digits, at_ - digits);
        double value = 0;
        const auto result = std::from_chars(body.data(), body.data() + body.size(), value);
        if (body.empty() || result.ec != std::errc() || result.ptr != body.data() + body.size()) return false;
        if (text_[first] == '-') json_ += '-';
        const bool integer = body.find_first_not_of("0123456789") == std::string_view::npos;
        if (integer && body.size() > 1 && body[0] == '0') return false;  // not Python either
        json_ += integer ? std::string(body) : python_float(value);
        return true;
    }

    /// Adjacent strings are one string, as in Python.
    bool strings() {
        std::string out;
        do {
            if (!string(out)) return false;
            skip_space();
        } while (peek() == '\'' || peek() == '"');
        append_python_json_string(json_, out);
        return true;
    }

    bool string(std::string& out) {
        const char quote = text_[at_++];
        while (at_ < text_.size()) {
            const char c = text_[at_++];
            if (c == quote) return true;
            if (c == '\n') return false;
            if (c != '\\') {
                out += c;
            } else if (!escape(out)) {
                return false;
            }
        }
        return false;
    }

    bool escape(std::string& out) {
        if (at_ >= text_.size()) return false;
        const char c = text_[at_++];
        switch (c) {
            case '\n':
                return true;
            case 'n':
                out += '\n';
                return true;
            case 't':
                out += '\t';
                return true;
            case 'r':
                out += '\r';
                return true;
            case 'b':
                out += '\b';
                return true;
            case 'f':
                out += '\f';
                return true;
            case 'v':
                out += '\v';
                return true;
            case 'a':
                out += '\a';
                return true;
            case '0':
                out += '\0';
                return true;
            case '\\':
            case '\'':
            case '"':
                out += c;
                return true;
            case 'x':
                return code_point(2, out);
            case 'u':
                return code_point(4, out);
            case 'U':
                return code_point(8, out);
            default:
                out += '\\', out += c;
                return true;
        }
    }

    bool code_point(int digits, std::string& out) {
        uint32_t code = 0;
        for (int i = 0; i < digits; ++i) {
            const int digit = hex_value(peek());
            if (digit < 0) return false;
            code = code * 16 + static_cast<uint32_t>(digit);
            ++at_;
        }
        if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return false;
        append_utf8(out, code);
        return true;
    }

    std::string_view text_;
    size_t at_ = 0;
    std::string json_;
};

}  // namespace

std::optional<ordered_json> parse_python_literal(std::string_view text) { return LiteralReader(text).read(); }

}  // namespace quern
