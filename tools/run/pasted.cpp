#include "tools/run/pasted.h"

#include <fmt/format.h>

#include <algorithm>

namespace quern {
namespace {

constexpr int64_t kFoldedLines = 10;
constexpr size_t kFoldedBytes = 4000;

}  // namespace

std::string PastedTexts::fold(const std::string& text) {
    const int64_t lines = std::count(text.begin(), text.end(), '\n') + (text.ends_with('\n') ? 0 : 1);
    if (lines < kFoldedLines && text.size() < kFoldedBytes) return text;
    const std::string what =
        lines > 1 ? fmt::format("pasted {} lines", lines) : fmt::format("pasted {} characters", text.size());
    std::string label = "[" + what + "]";
    const auto taken = [&](const auto& one) { return one.first == label; };
    for (int more = 2; std::any_of(texts_.begin(), texts_.end(), taken); ++more)
        label = fmt::format("[{}, text {}]", what, more);
    texts_.emplace_back(label, text);
    return label;
}

size_t PastedTexts::label_at_end(std::string_view text) const {
    for (const auto& one : texts_)
        if (text.ends_with(one.first)) return one.first.size();
    return 0;
}

std::string PastedTexts::unfold(std::string line) const {
    // From the end on: a text that holds another's label stays as it is.
    std::vector<std::pair<size_t, const std::pair<std::string, std::string>*>> places;
    for (const auto& one : texts_)
        if (const size_t at = line.find(one.first); at != std::string::npos) places.emplace_back(at, &one);
    std::sort(places.rbegin(), places.rend());
    for (const auto& [at, one] : places) line.replace(at, one->first.size(), one->second);
    return line;
}

}  // namespace quern
