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

Tower::Tower(const Model& model, Backend& backend, Workspace& workspace, const MemoryPlan& memory)
    : model_(model),
      backend_(backend),
      workspace_(workspace),
      step_patches_(model.info().vision ? tower_step_patches(*model.info().vision, memory.steps) : 0),
      budget_(memory.features),
      between_bytes_(memory.between) {
    if (memory.between > 0)
        between_ = static_cast<std::byte*>(backend.alloc(memory.between, "large images between steps"));
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
    std::optional<Begun> begun = std::exchange(begun_, {});
    if (begun && awaited(*begun->image)) return go_on(std::move(*begun), items);
    const ImagePtr& first = items[0]->image;
    if (patches_of(*first) <= step_patches_) return encode_together(items);
    go_on({first, tower_steps(*model_.info().vision, patches_of(*first), step_patches_)}, items);
}

/// As many of the images as fit a step.
void Tower::encode_together(Items items) {
    std::vector<const ImagePart*> images;
    VisionShape shape;
    for (const PromptImages::Item* item : items) {
        const int64_t patches = patches_of(*item->image);
        if (shape.patches + patches > step_patches_) break;
        images.push_back(item->image.get());
        shape.patches += patches;
    }
    shape.images = static_cast<int64_t>(images.size());
    std::vector<float> rows;
    run(shape, images, rows);
    const float* from = rows.data();
    for (PromptImages::Item* item : items.first(images.size())) {
        const int64_t values = item->image->tokens() * model_.info().vision->width;
        item->features = images.size() == 1 ? std::make_shared<const std::vector<float>>(std::move(rows))
                                            : std::make_shared<const std::vector<float>>(from, from + values);
        from += values;
        remember(*item->image, item->features);
    }
}

/// What the blocks before `block` leave: rows of one never go where it still reads.
Tensor Tower::between(int64_t patches, int64_t block) const {
    Tensor t = make_tensor("between", DType::F32, Place::state, {patches, model_.info().vision->inner_width});
    t.data = between_ + block % 2 * (between_bytes_ / 2);
    return t;
}

/// The next step of a large image.
void Tower::go_on(Begun begun, Items items) {
    const ImagePart& image = *begun.image;
    const TowerStep step = begun.steps[begun.done];
    VisionShape shape{.patches = patches_of(image),
                      .images = 1,
                      .begin = step.begin,
                      .end = step.end,
                      .first = step.first,
                      .rows = step.rows};
    if (begun.done > 0) shape.from = between(shape.patches, step.begin);
    if (step.end < model_.info().vision->blocks) shape.to = between(shape.patches, step.end);
    const ImagePart* const images[] = {&image};
    run(shape, images, begun.features);
    if (++begun.done < begun.steps.size()) {
        begun_ = std::move(begun);
        return;
    }
    const auto features = std::make_shared<const std::vector<float>>(std::move(begun.features));
    for (PromptImages::Item* item : items)
        if (key_of(*item->image) == key_of(image)) item->features = features;
    remember(image, features);
}

/// Adds the features to `features`, if the part ends with any.
void Tower::run(const VisionShape& shape, std::span<const ImagePart* const> images,
                std::vector<float>& features) {
    CHECK(shape.patches > 0, "[vision] an image without pixels");
    VisionGraph v = model_.build_vision(shape, backend_.activation_dtype());
    const Tensor *pixels = v.patches, *place = v.place, *start = v.start, *out = v.features;
    Plan plan(std::move(v.graph), backend_, workspace_, PlanUse::sometimes);
    plan.await_inputs();
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
    if (out == nullptr) return backend_.synchronize();
    const size_t before = features.size();
    const int64_t tokens = shape.patches / (model_.info().vision->merge * model_.info().vision->merge);
    features.reserve(static_cast<size_t>(tokens * out->shape[1]));
    features.resize(before + static_cast<size_t>(out->elements()));
    backend_.download(features.data() + before, out->data, out->bytes());
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
