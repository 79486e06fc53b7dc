#include "tools/engine/tower.h"

#include <algorithm>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr size_t kDigestKeys = 8;

int64_t bytes_of(const FeaturesPtr& f) { return static_cast<int64_t>(f->size() * sizeof(float)); }

int64_t patches_of(const ImagePart& image) { return static_cast<int64_t>(image.place.size()) / 4; }

}  // namespace

/// Digest and grid.
Tower::Key Tower::key_of(const ImagePart& image) {
    Key key(image.keys.begin(),
            image.keys.begin() + static_cast<std::ptrdiff_t>(std::min(image.keys.size(), kDigestKeys)));
    key.push_back(static_cast<int32_t>(image.rows));
    key.push_back(static_cast<int32_t>(image.columns));
    return key;
}

void Tower::recall(std::span<PromptImages::Item* const> items) {
    for (PromptImages::Item* item : items) {
        const auto found = by_key_.find(key_of(*item->image));
        if (found == by_key_.end()) continue;
        kept_.splice(kept_.begin(), kept_, found->second);
        item->features = kept_.front().features;
    }
}

void Tower::encode(std::span<PromptImages::Item* const> items) {
    int64_t patches = 0;
    size_t count = 0;
    while (count < items.size() &&
           (count == 0 || patches + patches_of(*items[count]->image) <= kTowerPatches))
        patches += patches_of(*items[count++]->image);
    items = items.first(count);
    CHECK(patches > 0, "[vision] an image without pixels");
    VisionGraph v = model_.build_vision(patches, static_cast<int64_t>(count), backend_.activation_dtype());
    const Tensor *pixels = v.patches, *place = v.place, *start = v.start, *features = v.features;
    Plan plan(std::move(v.graph), backend_, workspace_, PlanUse::sometimes);
    auto* to_pixels = plan.input<uint8_t>(pixels);
    auto *to_place = plan.input<int32_t>(place), *to_start = plan.input<int32_t>(start);
    *to_start++ = 0;
    for (const PromptImages::Item* item : items) {
        to_pixels = std::copy(item->image->patches.begin(), item->image->patches.end(), to_pixels);
        to_place = std::copy(item->image->place.begin(), item->image->place.end(), to_place);
        *to_start = to_start[-1] + static_cast<int32_t>(patches_of(*item->image));
        ++to_start;
    }
    plan.run();
    std::vector<float> rows(static_cast<size_t>(features->elements()));
    backend_.download(rows.data(), features->data, features->bytes());
    const auto* from = rows.data();
    for (PromptImages::Item* item : items) {
        const int64_t values = item->image->tokens() * features->shape[1];
        item->features = std::make_shared<const std::vector<float>>(from, from + values);
        from += values;
        remember(*item->image, item->features);
    }
}

void Tower::remember(const ImagePart& image, const FeaturesPtr& features) {
    if (bytes_of(features) > budget_ || by_key_.contains(key_of(image))) return;
    kept_.push_front({key_of(image), features});
    by_key_[kept_.front().key] = kept_.begin();
    bytes_ += bytes_of(features);
    while (bytes_ > budget_) {
        bytes_ -= bytes_of(kept_.back().features);
        by_key_.erase(kept_.back().key);
        kept_.pop_back();
    }
}

}  // namespace quern
