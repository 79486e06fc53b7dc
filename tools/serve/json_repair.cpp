#include "tools/serve/json_repair.h"

#include <charconv>

#include "models/utf8.h"

namespace quern {
namespace {

constexpr size_t kEscape = 6;  // bytes of \uXXXX

/// The code unit of an escape \uXXXX at text[at]; -1: there is none.
int code_unit(std::string_view text, size_t at) {
    if (text.size() - at < kEscape || text[at] != '\\' || text[at + 1] != 'u') return -1;
    int value = 0;
    const char* end = text.data() + at + kEscape;
    const auto [stop, failed] = std::from_chars(text.data() + at + 2, end, value, 16);
    return failed == std::errc{} && stop == end && value >= 0 ? value : -1;
}

bool is_high(int unit) { return unit >= 0xd800 && unit < 0xdc00; }
bool is_low(int unit) { return unit >= 0xdc00 && unit < 0xe000; }

}  // namespace

std::string repaired_json(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    append_utf8_lossy(out, text);
    for (size_t at = out.find('\\'); at != std::string::npos && at + 1 < out.size();
         at = out.find('\\', at)) {
        const int unit = code_unit(out, at);
        if (unit < 0) {
            at += 2;
        } else if (is_high(unit) && is_low(code_unit(out, at + kEscape))) {
            at += 2 * kEscape;
        } else {
            if (is_high(unit) || is_low(unit)) out.replace(at, kEscape, "\\ufffd");
            at += kEscape;
        }
    }
    return out;
}

}  // namespace quern
