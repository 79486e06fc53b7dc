#include "models/python_text.h"

#include <charconv>
#include <cmath>
#include <vector>

namespace quern {
namespace {

using nlohmann::ordered_json;

bool is_ascii_space(unsigned char c) { return (c >= 9 && c <= 13) || (c >= 28 && c <= 32); }

bool is_two_byte_space(std::string_view s) { return s[0] == '\xc2' && (s[1] == '\x85' || s[1] == '\xa0'); }

bool is_three_byte_space(std::string_view s) {
    const auto last = static_cast<unsigned char>(s[2]);
    if (s[0] == '\xe1') return s[1] == '\x9a' && last == 0x80;
    if (s[0] == '\xe3') return s[1] == '\x80' && last == 0x80;
    if (s[0] != '\xe2') return false;
    if (s[1] == '\x81') return last == 0x9f;
    return s[1] == '\x80' && ((last >= 0x80 && last <= 0x8a) || last == 0xa8 || last == 0xa9 || last == 0xaf);
}

size_t space_suffix(std::string_view text) {
    const size_t n = text.size();
    if (n >= 1 && is_ascii_space(static_cast<unsigned char>(text[n - 1]))) return 1;
    if (n >= 2 && is_two_byte_space(text.substr(n - 2))) return 2;
    if (n >= 3 && is_three_byte_space(text.substr(n - 3))) return 3;
    return 0;
}

/// Writes JSON without recursion: `open_` holds the containers that are being written.
class JsonWriter {
  public:
    std::string write(const ordered_json& root) {
        value(root);
        while (!open_.empty()) step();
        return std::move(out_);
    }

  private:
    struct Frame {
        const ordered_json* container;
        ordered_json::const_iterator next;
    };

    void step() {
        Frame& frame = open_.back();
        const bool object = frame.container->is_object();
        if (frame.next == frame.container->end()) {
            out_ += object ? '}' : ']';
            open_.pop_back();
            return;
        }
        if (frame.next != frame.container->begin()) out_ += ", ";
        if (object) {
            append_python_json_string(out_, frame.next.key());
            out_ += ": ";
        }
        const ordered_json& item = *frame.next;
        ++frame.next;
        value(item);  // may push a frame: `frame` is not valid after this
    }

    void value(const ordered_json& v) {
        switch (v.type()) {
            case ordered_json::value_t::object:
            case ordered_json::value_t::array:
                out_ += v.is_object() ? '{' : '[';
                open_.push_back({&v, v.begin()});
                return;
            case ordered_json::value_t::string:
                return append_python_json_string(out_, v.get_ref<const std::string&>());
            case ordered_json::value_t::boolean:
                out_ += v.get<bool>() ? "true" : "false";
                return;
            case ordered_json::value_t::number_integer:
                out_ += std::to_string(v.get<int64_t>());
                return;
            case ordered_json::value_t::number_unsigned:
                out_ += std::to_string(v.get<uint64_t>());
                return;
            case ordered_json::value_t::number_float:
                out_ += python_float(v.get<double>());
                return;
            default:
                out_ += "null";
                return;  // null; binary and discarded never come from text
        }
    }

    std::string out_;
    std::vector<Frame> open_;
};

}  // namespace

size_t python_space_prefix(std::string_view text) {
    if (text.empty()) return 0;
    if (is_ascii_space(static_cast<unsigned char>(text[0]))) return 1;
    if (text.size() >= 2 && is_two_byte_space(text)) return 2;
    if (text.size() >= 3 && is_three_byte_space(text)) return 3;
    return 0;
}

std::string_view python_lstrip(std::string_view text) {
    while (const size_t n = python_space_prefix(text)) text.remove_prefix(n);
    return text;
}

std::string_view python_rstrip(std::string_view text) {
    while (const size_t n = space_suffix(text)) text.remove_suffix(n);
    return text;
}

std::string_view python_strip(std::string_view text) { return python_rstrip(python_lstrip(text)); }

std::string python_json(const ordered_json& value) { return JsonWriter().write(value); }

std::string python_float(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    char buffer[40];
    const auto result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
    const std::string_view text(buffer, static_cast<size_t>(result.ptr - buffer));
    const size_t e = text.find('e');
    int exponent = 0;
    const char* first = text.data() + e + (text[e + 1] == '+' ? 2 : 1);
    std::from_chars(first, text.data() + text.size(), exponent);
    if (exponent < -4 || exponent >= 16) return std::string(text);  // the same form in both languages

    std::string out = value < 0 || std::signbit(value) ? "-" : "";
    std::string digits;
    for (char c : text.substr(0, e))
        if (c >= '0' && c <= '9') digits += c;
    if (exponent < 0) return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
    const auto whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() < whole) digits.append(whole - digits.size(), '0');
    const std::string fraction = digits.substr(whole);
    return out + digits.substr(0, whole) + "." + (fraction.empty() ? "0" : fraction);
}

void append_python_json_string(std::string& out, std::string_view text) {
    static constexpr char kHex[] = "0123456789abcdef";
    out += '"';
    for (char c : text) {
        switch (c) {
            case '"':
                out += "\\\"";
                break;
            case '\\':
                out += "\\\\";
                break;
            case '\n':
                out += "\\n";
                break;
            case '\r':
                out += "\\r";
                break;
            case '\t':
                out += "\\t";
                break;
            case '\b':
                out += "\\b";
                break;
            case '\f':
                out += "\\f";
                break;
            default:
                if (static_cast<unsigned char>(c) < 0x20) {
                    out += "\\u00";
                    out += kHex[c >> 4];
                    out += kHex[c & 15];
                } else {
                    out += c;
                }
        }
    }
    out += '"';
}

}  // namespace quern
