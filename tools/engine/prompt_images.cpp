#include "tools/engine/prompt_images.h"

#include <algorithm>

#include "ggml-like/check.h"

namespace quern {
namespace {

/// Keys of an image that together are its digest.
constexpr int64_t kDigestKeys = 8;

}  // namespace

PromptImages::PromptImages(std::span<const int32_t> prompt, std::vector<ImagePtr> images) {
    int64_t token = 0, cursor = 0;
    const auto size = static_cast<int64_t>(prompt.size());
    for (ImagePtr& image : images) {
        int64_t first = token;
        while (first < size && !is_image_key(prompt[static_cast<size_t>(first)])) ++first;
        const auto& keys = image->keys;
        if (first + image->tokens() > size || image->tokens() < 1 ||
            !std::equal(keys.begin(), keys.end(), prompt.begin() + first))
            FAIL(usage, "image {} of the prompt is not where its tokens are", items_.size());
        cursor += first - token;
        token = first + image->tokens();
        const int64_t longer = std::max(image->rows, image->columns);
        items_.push_back({.image = std::move(image), .first = first, .cursor = cursor, .features = {}});
        cursor += longer;
    }
    if (std::any_of(prompt.begin() + token, prompt.end(), is_image_key))
        FAIL(usage, "the prompt has tokens of an image that was not given with it");
}

const PromptImages::Item* PromptImages::at(int64_t token) const {
    const auto after = std::upper_bound(items_.begin(), items_.end(), token,
                                        [](int64_t t, const Item& item) { return t < item.first; });
    if (after == items_.begin()) return nullptr;
    return token < std::prev(after)->end() ? &*std::prev(after) : nullptr;
}

PromptImages::Place PromptImages::place(int64_t token) const {
    const auto after = std::upper_bound(items_.begin(), items_.end(), token,
                                        [](int64_t t, const Item& item) { return t < item.first; });
    const auto everywhere = [](int64_t p) {
        const auto at = static_cast<int32_t>(p);
        return Place{at, at, at};
    };
    if (after == items_.begin()) return everywhere(token);
    const Item& item = *std::prev(after);
    const ImagePart& image = *item.image;
    if (token >= item.end())
        return everywhere(item.cursor + std::max(image.rows, image.columns) + token - item.end());
    const int64_t inside = token - item.first;
    return {static_cast<int32_t>(item.cursor), static_cast<int32_t>(item.cursor + inside / image.columns),
            static_cast<int32_t>(item.cursor + inside % image.columns)};
}

const float* PromptImages::row(int64_t token, int64_t width) const {
    const Item* item = at(token);
    if (item == nullptr) return nullptr;
    const auto rows = item->features != nullptr ? static_cast<int64_t>(item->features->size()) / width : 0;
    CHECK(rows == item->image->tokens(), "[vision] {} rows of features for an image of {} tokens", rows,
          item->image->tokens());
    return item->features->data() + (token - item->first) * width;
}

std::vector<int64_t> PromptImages::ends() const {
    std::vector<int64_t> ends;
    for (const Item& item : items_) ends.push_back(item.end());
    return ends;
}

bool PromptImages::tells_apart(int64_t tokens) const {
    const Item* item = tokens > 0 ? at(tokens - 1) : nullptr;
    return item == nullptr || tokens - item->first >= std::min(kDigestKeys, item->image->tokens());
}

}  // namespace quern
