#include "models/utf8.h"

#include <algorithm>

namespace quern {
namespace {

struct Lead {
    uint8_t length;       // of the whole character; 0 = cannot start one
    uint8_t first, last;  // allowed range of the second byte (excludes overlong forms and surrogates)
};

Lead lead_of(unsigned char byte) {
    if (byte < 0x80) return {1, 0, 0};
    if (byte < 0xc2) return {0, 0, 0};
    if (byte < 0xe0) return {2, 0x80, 0xbf};
    if (byte == 0xe0) return {3, 0xa0, 0xbf};
    if (byte == 0xed) return {3, 0x80, 0x9f};
    if (byte < 0xf0) return {3, 0x80, 0xbf};
    if (byte == 0xf0) return {4, 0x90, 0xbf};
    if (byte < 0xf4) return {4, 0x80, 0xbf};
    if (byte == 0xf4) return {4, 0x80, 0x8f};
    return {0, 0, 0};
}

}  // namespace

Utf8Unit utf8_unit(std::string_view text, size_t at) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[at + i]); };
    const Lead lead = lead_of(byte(0));
    if (lead.length == 1) return {byte(0), 1, true, false};
    if (lead.length == 0) return {0, 1, false, false};
    uint32_t code_point = byte(0) & (0xffu >> (lead.length + 1));
    for (uint8_t i = 1; i < lead.length; ++i) {
        if (at + i == text.size()) return {0, i, false, true};
        const unsigned char next = byte(i);
        const bool good = i == 1 ? next >= lead.first && next <= lead.last : (next & 0xc0) == 0x80;
        if (!good) return {0, i, false, false};
        code_point = code_point << 6 | (next & 0x3fu);
    }
    return {code_point, lead.length, true, false};
}

void append_utf8_lossy(std::string& out, std::string_view text) {
    size_t kept = 0;  // text[kept, at) is valid and not yet copied
    for (size_t at = 0; at < text.size();) {
        const Utf8Unit unit = utf8_unit(text, at);
        if (!unit.valid) {
            out.append(text.substr(kept, at - kept)).append(kReplacementCharacter);
            kept = at + unit.length;
        }
        at += unit.length;
    }
    out.append(text.substr(kept));
}

bool is_valid_utf8(std::string_view text) {
    for (size_t at = 0; at < text.size();) {
        const Utf8Unit unit = utf8_unit(text, at);
        if (!unit.valid) return false;
        at += unit.length;
    }
    return true;
}

size_t utf8_cut_tail(std::string_view text) {
    for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
        const auto byte = static_cast<unsigned char>(text[text.size() - back]);
        if ((byte & 0xc0) == 0x80) continue;  // not a first byte
        return utf8_unit(text, text.size() - back).cut ? back : 0;
    }
    return 0;
}

void append_utf8(std::string& out, uint32_t c) {
    const auto put = [&](uint32_t byte) { out.push_back(static_cast<char>(byte)); };
    const auto tail = [&](int shift) { put(0x80 | (c >> shift & 0x3f)); };
    if (c < 0x80) {
        put(c);
    } else if (c < 0x800) {
        put(0xc0 | c >> 6), tail(0);
    } else if (c < 0x10000) {
        put(0xe0 | c >> 12), tail(6), tail(0);
    } else {
        put(0xf0 | c >> 18), tail(12), tail(6), tail(0);
    }
}

}  // namespace quern
