#include "tools/common/cli_values.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr size_t kLongestWord = 64;  // edit distance is quadratic

struct Suffix {
    std::string_view text;
    int64_t factor;
};
constexpr std::array<Suffix, 6> kSuffixes = {
    {{"Ki", 1024}, {"Mi", 1024 * 1024}, {"k", 1000}, {"K", 1000}, {"M", 1000 * 1000}, {"", 1}}};

const Suffix* suffix_of(std::string_view rest) {
    const auto* found =
        std::find_if(kSuffixes.begin(), kSuffixes.end(), [&](const Suffix& s) { return s.text == rest; });
    return found == kSuffixes.end() ? nullptr : found;
}

/// A whole number that 64 bits do not hold.
bool is_too_large(std::string_view text) {
    const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
    const size_t end = std::min(text.find_first_not_of("0123456789", sign), text.size());
    return end > sign && suffix_of(text.substr(end)) != nullptr && !integer_of(text);
}

/// `all`: limits that 64 bits set are told, too.
std::string range_text(int64_t min, int64_t max, bool all) {
    const bool low = all || min != std::numeric_limits<int64_t>::min();
    const bool high = all || max != std::numeric_limits<int64_t>::max();
    if (low && high) return fmt::format(" from {} to {}", min, max);
    if (low) return fmt::format(" of at least {}", min);
    if (high) return fmt::format(" of at most {}", max);
    return "";
}

std::string_view without_plus(std::string_view digits) {
    if (digits.size() > 1 && digits[0] == '+' && digits[1] != '-') digits.remove_prefix(1);
    return digits;
}

std::string_view without_dashes(std::string_view word) {
    const size_t first = word.find_first_not_of('-');
    return first == std::string_view::npos ? std::string_view{} : word.substr(first);
}

// Damerau-Levenshtein distance in its restricted form (a swap is one edit, nothing is edited twice).
size_t edit_distance(std::string_view a, std::string_view b) {
    std::vector<size_t> before(b.size() + 1), above(b.size() + 1), row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) above[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
        row[0] = i;
        for (size_t j = 1; j <= b.size(); ++j) {
            row[j] = std::min({above[j] + 1, row[j - 1] + 1, above[j - 1] + (a[i - 1] != b[j - 1])});
            const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
            if (swapped) row[j] = std::min(row[j], before[j - 2] + 1);
        }
        std::swap(before, above);
        std::swap(above, row);
    }
    return above[b.size()];
}

// Length of the well-formed sequence at the start of `text`, 0 if there is none.
size_t utf8_length(std::string_view text) {
    const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
    const auto tail = [&](size_t i) { return (byte(i) & 0xC0u) == 0x80u; };
    const unsigned lead = byte(0);
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF) return tail(1) ? 2 : 0;
    if (lead >= 0xE0 && lead <= 0xEF) {
        if (!tail(1) || !tail(2)) return 0;
        if (lead == 0xE0 && byte(1) < 0xA0) return 0;   // overlong
        if (lead == 0xED && byte(1) >= 0xA0) return 0;  // surrogates
        return 3;
    }
    if (lead >= 0xF0 && lead <= 0xF4) {
        if (!tail(1) || !tail(2) || !tail(3)) return 0;
        if (lead == 0xF0 && byte(1) < 0x90) return 0;
        if (lead == 0xF4 && byte(1) >= 0x90) return 0;
        return 4;
    }
    return 0;
}

}  // namespace

std::optional<int64_t> integer_of(std::string_view text) {
    const std::string_view digits = without_plus(text);
    int64_t value = 0;
    const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const std::string_view rest(end, static_cast<size_t>(digits.data() + digits.size() - end));
    const Suffix* suffix = suffix_of(rest);
    if (code != std::errc{} || suffix == nullptr) return {};
    if (__builtin_mul_overflow(value, suffix->factor, &value)) return {};
    return value;
}

int64_t parse_integer(std::string_view text, const std::string& what, int64_t min, int64_t max) {
    const auto value = integer_of(text);
    if (!value || *value < min || *value > max)
        FAIL(usage, "{}: expected a whole number{} (suffixes k, M, Ki, Mi), found '{}'", what,
             range_text(min, max, is_too_large(text)), printable(text));
    return *value;
}

std::optional<double> number_of(std::string_view text) {
    const std::string_view digits = without_plus(text);
    double value = 0;
    const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool all = end == digits.data() + digits.size();
    if (code != std::errc{} || !all || !std::isfinite(value)) return {};
    return value;
}

double parse_number(std::string_view text, const std::string& what, double min, double max) {
    const auto value = number_of(text);
    if (!value || *value < min || *value > max)
        FAIL(usage, "{}: expected a number from {} to {}, found '{}'", what, min, max, printable(text));
    return *value;
}

bool parse_switch(std::string_view text, const std::string& what) {
    for (std::string_view yes : {"on", "true", "yes", "1"}) {
        if (text == yes) return true;
    }
    for (std::string_view no : {"off", "false", "no", "0"}) {
        if (text == no) return false;
    }
    FAIL(usage, "{}: expected on or off, found '{}'", what, printable(text));
}

std::string nearest_match(std::string_view word, const std::vector<std::string>& candidates) {
    const std::string_view core = without_dashes(word);
    if (core.empty() || core.size() > kLongestWord) return "";
    std::string best;
    size_t best_distance = 1 + core.size() / 3;  // one edit in short words, a third of long ones
    for (const std::string& candidate : candidates) {
        const std::string_view other = without_dashes(candidate);
        if (other.empty() || other.size() > kLongestWord) continue;
        size_t distance = edit_distance(core, other);
        // A word cut short is the commonest slip: --temperatur, --reasoning-b.
        if (core.size() >= 3 && other.substr(0, core.size()) == core)
            distance = std::min<size_t>(distance, 1);
        const bool closer = distance < best_distance || (distance == best_distance && best.empty());
        if (closer && distance < other.size()) {
            best = candidate;
            best_distance = distance;
        }
    }
    return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& candidates) {
    const std::string best = nearest_match(word, candidates);
    return best.empty() ? "" : fmt::format("; did you mean '{}'?", best);
}

std::string printable(std::string_view text, size_t max_bytes) {
    std::string out;
    while (!text.empty()) {
        if (out.size() >= max_bytes) return out + "...";
        const size_t length = utf8_length(text);
        const auto lead = static_cast<unsigned char>(text[0]);
        const bool c1 = length == 2 && lead == 0xC2 && static_cast<unsigned char>(text[1]) < 0xA0;
        if (length == 0 || lead < 0x20 || lead == 0x7F || c1) {
            out += '?';
        } else {
            out.append(text.substr(0, length));
        }
        text.remove_prefix(std::max<size_t>(length, 1));
    }
    return out;
}

std::string printable_lines(std::string_view text, size_t max_bytes) {
    std::string out;
    for (bool first = true; first || !text.empty(); first = false) {
        if (out.size() >= max_bytes) return out + "\n  ...";
        const std::string_view line = text.substr(0, text.find('\n'));
        if (!first) out += line.starts_with("  ") ? "\n" : "\n  ";
        out += printable(line, max_bytes - std::min(max_bytes, out.size()));
        text.remove_prefix(std::min(text.size(), line.size() + 1));
    }
    return out;
}

bool is_utf8(std::string_view text, size_t* bad_offset) {
    size_t offset = 0;
    while (offset < text.size()) {
        const size_t length = utf8_length(text.substr(offset));
        if (length == 0) {
            if (bad_offset != nullptr) *bad_offset = offset;
            return false;
        }
        offset += length;
    }
    return true;
}

}  // namespace quern
