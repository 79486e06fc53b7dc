#include "tools/common/images/data_url.h"

#include <algorithm>
#include <array>
#include <string>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr uint8_t kNone = 64, kSpace = 65;

constexpr std::array<uint8_t, 256> make_values() {
    std::array<uint8_t, 256> values{};
    values.fill(kNone);
    constexpr std::string_view kAlphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < kAlphabet.size(); ++i)
        values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<uint8_t>(i);
    for (const char c : {' ', '\t', '\r', '\n'}) values[static_cast<uint8_t>(c)] = kSpace;
    return values;
}
constexpr std::array<uint8_t, 256> kValues = make_values();

bool begins_with(std::string_view text, std::string_view lower) {
    const auto same = [](char a, char b) { return (a >= 'A' && a <= 'Z' ? a - 'A' + 'a' : a) == b; };
    return text.size() >= lower.size() &&
           std::equal(lower.begin(), lower.end(), text.begin(), [&](char b, char a) { return same(a, b); });
}

/// The scheme of a URL, for messages: letters only, and not many.
std::string scheme_of(std::string_view url) {
    std::string scheme;
    for (const char c : url.substr(0, 10)) {
        if (c == ':') return scheme + ':';
        if ((c < 'a' || c > 'z') && (c < 'A' || c > 'Z')) break;
        scheme += c;
    }
    return "none";
}

}  // namespace

std::vector<uint8_t> decode_base64(std::string_view text, size_t most) {
    std::vector<uint8_t> bytes;
    bytes.reserve(std::min(most, text.size() / 4 * 3 + 3));
    uint32_t bits = 0;
    size_t digits = 0;
    bool padded = false;
    for (const char c : text) {
        const uint8_t value = kValues[static_cast<uint8_t>(c)];
        if (value == kSpace) continue;
        if (c == '=') {
            padded = true;
            continue;
        }
        if (value == kNone || padded) FAIL(usage, "the image is not valid base64");
        bits = bits << 6 | value;
        if (++digits % 4 == 1) continue;
        if (bytes.size() >= most) FAIL(usage, "the image has more than {} bytes", most);
        bytes.push_back(static_cast<uint8_t>(bits >> (6 - 2 * ((digits - 1) % 4))));
    }
    if (digits % 4 == 1) FAIL(usage, "the image is not valid base64: it ends early");
    return bytes;
}

std::vector<uint8_t> decode_data_url(std::string_view url, size_t most) {
    if (!begins_with(url, "data:"))
        FAIL(usage,
             "images are read from data: URLs only (data:image/png;base64,...), this one's scheme is {}; "
             "nothing is fetched",
             scheme_of(url));
    const size_t comma = url.find(',');
    constexpr std::string_view kMark = ";base64";
    if (comma == std::string_view::npos || comma < kMark.size() ||
        !begins_with(url.substr(comma - kMark.size()), kMark))
        FAIL(usage, "the data: URL of an image should look like data:image/png;base64,...");
    return decode_base64(url.substr(comma + 1), most);
}

}  // namespace quern
