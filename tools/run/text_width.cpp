#include "tools/run/text_width.h"

#include <sys/ioctl.h>
#include <utf8proc.h>

#include <string>

namespace quern {
namespace {

constexpr wchar_t kEmojiStyle = 0xFE0F;

bool is_regional(wchar_t c) { return c >= 0x1F1E6 && c <= 0x1F1FF; }

/// A flag is two regional letters, each of one cell or of two together; emoji style makes a narrow symbol wide.
int cluster_width(std::wstring_view cluster) {
    if (is_regional(cluster[0]) || cluster.find(kEmojiStyle) != std::wstring_view::npos) return 2;
    for (const wchar_t c : cluster)
        if (const int width = utf8proc_charwidth(c); width > 0) return width;
    return 0;
}

std::wstring code_points(std::string_view text) {
    std::wstring out;
    for (size_t at = 0; at < text.size();) {
        utf8proc_int32_t c = 0;
        const auto n = utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data() + at),
                                        static_cast<utf8proc_ssize_t>(text.size() - at), &c);
        out += n > 0 ? static_cast<wchar_t>(c) : L'?';
        at += n > 0 ? static_cast<size_t>(n) : 1;
    }
    return out;
}

/// The end of the colour sequence that begins at `at`, or `at`.
size_t skip_color(std::wstring_view text, size_t at) {
    if (text.substr(at, 2) != L"\033[") return at;
    const size_t end = text.find_first_not_of(L"0123456789;", at + 2);
    return end != std::wstring_view::npos && text[end] == L'm' ? end + 1 : at;
}

}  // namespace

int terminal_columns(int fd) {
    winsize size{};
    return ::ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

int text_width(std::string_view text) {
    const std::wstring wide = code_points(text);
    int width = 0;
    for (size_t at = 0; at < wide.size();) {
        if (const size_t end = skip_color(wide, at); end != at) {
            at = end;
            continue;
        }
        const size_t end = next_grapheme(wide, at);
        width += cluster_width(std::wstring_view(wide).substr(at, end - at));
        at = end;
    }
    return width;
}

size_t next_grapheme(std::wstring_view text, size_t at) {
    if (at >= text.size()) return text.size();
    utf8proc_int32_t state = 0;
    for (++at; at < text.size(); ++at)
        if (utf8proc_grapheme_break_stateful(text[at - 1], text[at], &state)) break;
    return at;
}

size_t previous_grapheme(std::wstring_view text, size_t at) {
    size_t before = 0;
    for (size_t next = 0; next < at && next < text.size(); next = next_grapheme(text, next)) before = next;
    return before;
}

}  // namespace quern
