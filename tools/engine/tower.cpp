#include "tools/engine/tower.h"

#include <algorithm>

#include "ggml-like/backend.h"
#include "ggml-like/check.h"
#include "tools/engine/tower_plan.h"

namespace quern {
namespace {

constexpr size_t kDigestKeys = 8;

int64_t bytes_of(const FeaturesPtr& f) { return static_cast<int64_t>(f->size() * sizeof(float)); }

int64_t patches_of(const ImagePart& image) { return static_cast<int64_t>(image.place.size()) / 4; }

}  // namespace

Tower::Tower(const Model& model, Backend& backend, Workspace& workspace, const MemoryPlan& memory)
    : model_(model),
      backend_(backend),
      workspace_(workspace),
      step_patches_(model.info().vision ? tower_step_patches(*model.info().vision, memory.steps) : 0),
      budget_(memory.features) {
    if (memory.between > 0) between_ = backend.alloc(memory.between, "large images between steps");
}

Tower::~Tower() {
    if (between_ != nullptr) backend_.free(between_);
}

/// Digest and grid.
Tower::Key Tower::key_of(const ImagePart& image) {
    Key key(image.keys.begin(),
            image.keys.begin() + static_cast<std::ptrdiff_t>(std::min(image.keys.size(), kDigestKeys)));
    key.push_back(static_cast<int32_t>(image.rows));
    key.push_back(static_cast<int32_t>(image.columns));
    return key;
}

void Tower::recall(Items items) {
    for (PromptImages::Item* item : items) {
        const auto found = by_key_.find(key_of(*item->image));
        if (found == by_key_.end()) continue;
        kept_.splice(kept_.begin(), kept_, found->second);
        item->features = kept_.front().features;
    }
}

void Tower::encode(Items items) {
    CHECK(!items.empty(), "[vision] no image to encode");
    const auto awaited = [&](const ImagePart& image) {
        return std::any_of(items.begin(), items.end(), [&](const PromptImages::Item* item) {
            return key_of(*item->image) == key_of(image);
        });
    };
    const std::optional<Begun> begun = std::exchange(begun_, {});
    if (begun && awaited(*begun->image)) return go_on(*begun, items);
    if (patches_of(*items[0]->image) > step_patches_) return go_on({items[0]->image, 0}, items);
    std::vector<const ImagePart*> images;
    VisionShape shape;
    for (const PromptImages::Item* item : items) {
        const int64_t patches = patches_of(*item->image);
        if (shape.patches + patches > step_patches_) break;
        images.push_back(item->image.get());
        shape.patches += patches;
    }
    shape.images = static_cast<int64_t>(images.size());
    const std::vector<float> rows = run(shape, images);
    const float* from = rows.data();
    for (PromptImages::Item* item : items.first(images.size())) {
        const int64_t values = item->image->tokens() * model_.info().vision->width;
        item->features = std::make_shared<const std::vector<float>>(from, from + values);
        from += values;
        remember(*item->image, item->features);
    }
}

/// The next blocks of a large image.
void Tower::go_on(Begun begun, Items items) {
    const VisionInfo& vision = *model_.info().vision;
    const ImagePart& image = *begun.image;
    VisionShape shape{.patches = patches_of(image), .images = 1, .begin = begun.blocks};
    shape.end =
        std::min(vision.blocks, shape.begin + tower_step_blocks(vision, shape.patches, step_patches_));
    shape.between = make_tensor("between", DType::F32, Place::state, {shape.patches, vision.inner_width});
    shape.between.data = between_;
    const ImagePart* const images[] = {&image};
    std::vector<float> rows = run(shape, images);
    begun.blocks = shape.end;
    if (shape.end < vision.blocks) {
        begun_ = std::move(begun);
        return;
    }
    const auto features = std::make_shared<const std::vector<float>>(std::move(rows));
    for (PromptImages::Item* item : items)
        if (key_of(*item->image) == key_of(image)) item->features = features;
    remember(image, features);
}

/// The features; of a part that is not the last one nothing.
std::vector<float> Tower::run(const VisionShape& shape, std::span<const ImagePart* const> images) {
    CHECK(shape.patches > 0, "[vision] an image without pixels");
    VisionGraph v = model_.build_vision(shape, backend_.activation_dtype());
    const Tensor *pixels = v.patches, *place = v.place, *start = v.start, *features = v.features;
    Plan plan(std::move(v.graph), backend_, workspace_, PlanUse::sometimes);
    auto* to_pixels = pixels != nullptr ? plan.input<uint8_t>(pixels) : nullptr;
    auto *to_place = plan.input<int32_t>(place), *to_start = plan.input<int32_t>(start);
    *to_start++ = 0;
    for (const ImagePart* image : images) {
        if (to_pixels != nullptr)
            to_pixels = std::copy(image->patches.begin(), image->patches.end(), to_pixels);
        to_place = std::copy(image->place.begin(), image->place.end(), to_place);
        *to_start = to_start[-1] + static_cast<int32_t>(patches_of(*image));
        ++to_start;
    }
    plan.run();
    if (features == nullptr) {
        backend_.synchronize();
        return {};
    }
    std::vector<float> rows(static_cast<size_t>(features->elements()));
    backend_.download(rows.data(), features->data, features->bytes());
    return rows;
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
