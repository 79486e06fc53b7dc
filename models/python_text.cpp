// Strings the way the reference template's Python makes them: json.dumps and str.strip.
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "models/chat_format.h"

namespace quern {
namespace {

using Json = nlohmann::ordered_json;

/// repr(float): shortest digits; exponent form below 1e-4 and from 1e16 on.
std::string python_float(double x) {
    if (std::isnan(x)) return "NaN";
    if (std::isinf(x)) return x > 0 ? "Infinity" : "-Infinity";
    char buffer[40];
    const auto end = std::to_chars(buffer, buffer + sizeof buffer, x, std::chars_format::scientific).ptr;
    std::string text(buffer, end);
    const size_t e = text.find('e');
    const int exponent = std::atoi(text.c_str() + e + 1);
    if (exponent < -4 || exponent >= 16) return text;
    const std::string sign = text[0] == '-' ? "-" : "";
    std::string digits;
    for (char c : text.substr(sign.size(), e - sign.size()))
        if (c != '.') digits += c;
    if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
    const auto whole = static_cast<size_t>(exponent) + 1;
    if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
    return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

void write(const Json& value, std::string& out) {
    const auto text = [](const Json& v) { return v.dump(-1, ' ', false, Json::error_handler_t::replace); };
    if (value.is_object()) {
        out += '{';
        bool first = true;
        for (const auto& [key, item] : value.items()) {
            if (!first) out += ", ";
            first = false;
            out += text(Json(key)) + ": ";
            write(item, out);
        }
        out += '}';
    } else if (value.is_array()) {
        out += '[';
        for (size_t i = 0; i < value.size(); ++i) {
            if (i > 0) out += ", ";
            write(value[i], out);
        }
        out += ']';
    } else if (value.is_number_float()) {
        out += python_float(value.get<double>());
    } else {
        out += text(value);
    }
}

/// Length of the whitespace character of Python's str.isspace() that starts at `at`, 0 if it is none.
size_t space_at(std::string_view s, size_t at) {
    const auto byte = [&](size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
    const unsigned a = byte(at), b = byte(at + 1), c = byte(at + 2);
    if ((a >= 0x09 && a <= 0x0d) || (a >= 0x1c && a <= 0x20)) return 1;
    if (a == 0xc2 && (b == 0x85 || b == 0xa0)) return 2;
    if (a == 0xe1 && b == 0x9a && c == 0x80) return 3;  // U+1680
    if (a == 0xe2 && b == 0x80 && ((c >= 0x80 && c <= 0x8a) || c == 0xa8 || c == 0xa9 || c == 0xaf)) return 3;
    if (a == 0xe2 && b == 0x81 && c == 0x9f) return 3;  // U+205F
    if (a == 0xe3 && b == 0x80 && c == 0x80) return 3;  // U+3000
    return 0;
}

}  // namespace

std::string python_json(const Json& value) {
    std::string out;
    write(value, out);
    return out;
}

std::string_view python_strip(std::string_view s) {
    while (!s.empty()) {
        const size_t n = space_at(s, 0);
        if (n == 0) break;
        s.remove_prefix(n);
    }
    while (!s.empty()) {
        size_t n = 0;
        for (size_t length = 1; length <= 3 && length <= s.size(); ++length)
            if (space_at(s, s.size() - length) == length) n = length;
        if (n == 0) break;
        s.remove_suffix(n);
    }
    return s;
}

}  // namespace quern
