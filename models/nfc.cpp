#include "models/nfc.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "models/utf8.h"

namespace quern {
namespace {

/// Code points with a non-zero canonical combining class in Unicode 9 (UCD 9.0.0).
constexpr std::pair<uint32_t, uint32_t> kCombining9[] = {
    {0x300, 0x33f},     {0x342, 0x342},     {0x345, 0x34e},     {0x350, 0x36f},     {0x483, 0x487},
    {0x591, 0x5bd},     {0x5bf, 0x5bf},     {0x5c1, 0x5c2},     {0x5c4, 0x5c5},     {0x5c7, 0x5c7},
    {0x610, 0x61a},     {0x64b, 0x65f},     {0x670, 0x670},     {0x6d6, 0x6dc},     {0x6df, 0x6e4},
    {0x6e7, 0x6e8},     {0x6ea, 0x6ed},     {0x711, 0x711},     {0x730, 0x74a},     {0x7eb, 0x7f3},
    {0x816, 0x819},     {0x81b, 0x823},     {0x825, 0x827},     {0x829, 0x82d},     {0x859, 0x85b},
    {0x8d4, 0x8e1},     {0x8e3, 0x8ff},     {0x93c, 0x93c},     {0x94d, 0x94d},     {0x951, 0x954},
    {0x9bc, 0x9bc},     {0x9cd, 0x9cd},     {0xa3c, 0xa3c},     {0xa4d, 0xa4d},     {0xabc, 0xabc},
    {0xacd, 0xacd},     {0xb3c, 0xb3c},     {0xb4d, 0xb4d},     {0xbcd, 0xbcd},     {0xc4d, 0xc4d},
    {0xc55, 0xc56},     {0xcbc, 0xcbc},     {0xccd, 0xccd},     {0xd4d, 0xd4d},     {0xdca, 0xdca},
    {0xe38, 0xe3a},     {0xe48, 0xe4b},     {0xeb8, 0xeb9},     {0xec8, 0xecb},     {0xf18, 0xf19},
    {0xf35, 0xf35},     {0xf37, 0xf37},     {0xf39, 0xf39},     {0xf71, 0xf72},     {0xf74, 0xf74},
    {0xf7a, 0xf7d},     {0xf80, 0xf80},     {0xf82, 0xf84},     {0xf86, 0xf87},     {0xfc6, 0xfc6},
    {0x1037, 0x1037},   {0x1039, 0x103a},   {0x108d, 0x108d},   {0x135d, 0x135f},   {0x1714, 0x1714},
    {0x1734, 0x1734},   {0x17d2, 0x17d2},   {0x17dd, 0x17dd},   {0x18a9, 0x18a9},   {0x1939, 0x193b},
    {0x1a17, 0x1a18},   {0x1a60, 0x1a60},   {0x1a75, 0x1a7c},   {0x1a7f, 0x1a7f},   {0x1ab0, 0x1abd},
    {0x1b34, 0x1b34},   {0x1b44, 0x1b44},   {0x1b6b, 0x1b73},   {0x1baa, 0x1bab},   {0x1be6, 0x1be6},
    {0x1bf2, 0x1bf3},   {0x1c37, 0x1c37},   {0x1cd0, 0x1cd2},   {0x1cd4, 0x1ce0},   {0x1ce2, 0x1ce8},
    {0x1ced, 0x1ced},   {0x1cf4, 0x1cf4},   {0x1cf8, 0x1cf9},   {0x1dc0, 0x1df5},   {0x1dfb, 0x1dff},
    {0x20d0, 0x20dc},   {0x20e1, 0x20e1},   {0x20e5, 0x20f0},   {0x2cef, 0x2cf1},   {0x2d7f, 0x2d7f},
    {0x2de0, 0x2dff},   {0x302a, 0x302f},   {0x3099, 0x309a},   {0xa66f, 0xa66f},   {0xa674, 0xa67d},
    {0xa69e, 0xa69f},   {0xa6f0, 0xa6f1},   {0xa806, 0xa806},   {0xa8c4, 0xa8c4},   {0xa8e0, 0xa8f1},
    {0xa92b, 0xa92d},   {0xa953, 0xa953},   {0xa9b3, 0xa9b3},   {0xa9c0, 0xa9c0},   {0xaab0, 0xaab0},
    {0xaab2, 0xaab4},   {0xaab7, 0xaab8},   {0xaabe, 0xaabf},   {0xaac1, 0xaac1},   {0xaaf6, 0xaaf6},
    {0xabed, 0xabed},   {0xfb1e, 0xfb1e},   {0xfe20, 0xfe2f},   {0x101fd, 0x101fd}, {0x102e0, 0x102e0},
    {0x10376, 0x1037a}, {0x10a0d, 0x10a0d}, {0x10a0f, 0x10a0f}, {0x10a38, 0x10a3a}, {0x10a3f, 0x10a3f},
    {0x10ae5, 0x10ae6}, {0x11046, 0x11046}, {0x1107f, 0x1107f}, {0x110b9, 0x110ba}, {0x11100, 0x11102},
    {0x11133, 0x11134}, {0x11173, 0x11173}, {0x111c0, 0x111c0}, {0x111ca, 0x111ca}, {0x11235, 0x11236},
    {0x112e9, 0x112ea}, {0x1133c, 0x1133c}, {0x1134d, 0x1134d}, {0x11366, 0x1136c}, {0x11370, 0x11374},
    {0x11442, 0x11442}, {0x11446, 0x11446}, {0x114c2, 0x114c3}, {0x115bf, 0x115c0}, {0x1163f, 0x1163f},
    {0x116b6, 0x116b7}, {0x1172b, 0x1172b}, {0x11c3f, 0x11c3f}, {0x16af0, 0x16af4}, {0x16b30, 0x16b36},
    {0x1bc9e, 0x1bc9e}, {0x1d165, 0x1d169}, {0x1d16d, 0x1d172}, {0x1d17b, 0x1d182}, {0x1d185, 0x1d18b},
    {0x1d1aa, 0x1d1ad}, {0x1d242, 0x1d244}, {0x1e000, 0x1e006}, {0x1e008, 0x1e018}, {0x1e01b, 0x1e021},
    {0x1e023, 0x1e024}, {0x1e026, 0x1e02a}, {0x1e8d0, 0x1e8d6}, {0x1e944, 0x1e94a}};

/// Characters above U+FFFF that canonical composition can make in Unicode 9.
constexpr uint32_t kComposites9[] = {0x1109a, 0x1109c, 0x110ab, 0x1112e, 0x1112f, 0x1134b,
                                     0x1134c, 0x114bb, 0x114bc, 0x114be, 0x115ba, 0x115bb};

bool combines_in_unicode9(uint32_t c) {
    const auto* range = std::lower_bound(std::begin(kCombining9), std::end(kCombining9), c,
                                         [](const auto& r, uint32_t value) { return r.second < value; });
    return range != std::end(kCombining9) && range->first <= c;
}

int combining_class(uint32_t c) {
    if (c < 0x300) return 0;
    const int current = utf8proc_get_property(static_cast<utf8proc_int32_t>(c))->combining_class;
    return current != 0 && combines_in_unicode9(c) ? current : 0;
}

/// No character below U+10000 became composable after Unicode 9, so only the planes above need the list.
bool composable(uint32_t c) {
    return c < 0x10000 ||
           std::find(std::begin(kComposites9), std::end(kComposites9), c) != std::end(kComposites9);
}

/// A few musical symbols and the CJK compatibility ideographs above U+FFFF decompose for good (never
/// recompose).
bool decomposable(uint32_t c) {
    const bool musical = c >= 0x1d15e && c <= 0x1d1c0;
    const bool ideograph = c >= 0x2f800 && c <= 0x2fa1d;
    return composable(c) || musical || ideograph;
}

struct Mark {
    uint32_t code_point;
    int combining_class;
};

/// Canonical decomposition and ordering.
std::vector<Mark> decompose(std::string_view text) {
    std::vector<Mark> out;
    out.reserve(text.size());
    std::array<utf8proc_int32_t, 8> parts{};
    for (size_t at = 0; at < text.size();) {
        const Utf8Unit unit = utf8_unit(text, at);
        at += unit.length;
        if (unit.code_point < 0xc0 || !decomposable(unit.code_point)) {
            out.push_back({unit.code_point, combining_class(unit.code_point)});
            continue;
        }
        int boundary = 0;
        const auto count = utf8proc_decompose_char(static_cast<utf8proc_int32_t>(unit.code_point),
                                                   parts.data(), parts.size(), UTF8PROC_DECOMPOSE, &boundary);
        for (int i = 0; i < count && i < static_cast<int>(parts.size()); ++i) {
            const auto part = static_cast<uint32_t>(parts[i]);
            out.push_back({part, combining_class(part)});
        }
    }
    // Sorting each run of marks, rather than swapping neighbours, keeps a run of a million marks fast.
    const auto is_mark = [](const Mark& mark) { return mark.combining_class != 0; };
    for (auto first = out.begin(); (first = std::find_if(first, out.end(), is_mark)) != out.end();) {
        const auto last = std::find_if_not(first, out.end(), is_mark);
        std::stable_sort(first, last,
                         [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
        first = last;
    }
    return out;
}

/// The primary composite of two characters, or 0.
uint32_t composite_of(uint32_t first, uint32_t second) {
    // Nothing below U+0300 composes backwards. U+11A7 is a vowel that utf8proc, one off, takes for the empty
    // final consonant and swallows.
    if (second < 0x300 || second == 0x11a7) return 0;
    std::array<utf8proc_int32_t, 3> pair = {static_cast<utf8proc_int32_t>(first),
                                            static_cast<utf8proc_int32_t>(second), 0};
    const auto length = utf8proc_normalize_utf32(
        pair.data(), 2, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    const auto composed = static_cast<uint32_t>(pair[0]);
    return length == 1 && composable(composed) ? composed : 0;
}

/// Canonical composition in place: a mark joins the last starter unless a mark of the same or a higher class,
/// or another starter, stands between them.
void compose(std::vector<Mark>& text) {
    constexpr int kAdjacent = -1;
    size_t kept = 0;
    Mark* starter = nullptr;
    int previous = kAdjacent;
    for (const Mark mark : text) {
        if (starter && previous < mark.combining_class) {
            if (const uint32_t joined = composite_of(starter->code_point, mark.code_point)) {
                starter->code_point = joined;
                continue;
            }
        }
        text[kept] = mark;
        if (mark.combining_class == 0) starter = &text[kept];
        previous = mark.combining_class == 0 ? kAdjacent : mark.combining_class;
        ++kept;
    }
    text.resize(kept);
}

}  // namespace

bool is_trivially_nfc(std::string_view text) {
    // 0xcc is the first lead byte of U+0300.
    return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0xcc; });
}

std::string to_nfc(std::string_view text) {
    std::vector<Mark> marks = decompose(text);
    compose(marks);
    std::string out;
    out.reserve(text.size());
    for (const Mark& mark : marks) append_utf8(out, mark.code_point);
    return out;
}

}  // namespace quern
