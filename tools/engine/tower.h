// Tower: runs a model's vision tower, and remembers what it made of the images it has seen.
#pragma once

#include <list>
#include <map>
#include <span>

#include "ggml-like/plan.h"
#include "models/model.h"
#include "tools/engine/prompt_images.h"

namespace quern {

class Backend;

/// Images that one step encodes together have so many patches at most; a larger one is encoded alone.
inline constexpr int64_t kTowerPatches = 4096;

class Tower {
  public:
    /// `bytes`: of host memory for features of earlier images.
    Tower(const Model& model, Backend& backend, Workspace& workspace, int64_t bytes)
        : model_(model), backend_(backend), workspace_(workspace), budget_(bytes) {}

    /// Fills the features of those items that are remembered.
    void recall(std::span<PromptImages::Item* const> items);
    /// Encodes the first of the items, as many as kTowerPatches allows, one at least.
    void encode(std::span<PromptImages::Item* const> items);

  private:
    using Key = std::vector<int32_t>;
    struct Kept {
        Key key;
        FeaturesPtr features;
    };
    static Key key_of(const ImagePart& image);
    void remember(const ImagePart& image, const FeaturesPtr& features);

    const Model& model_;
    Backend& backend_;
    Workspace& workspace_;
    const int64_t budget_;
    int64_t bytes_ = 0;
    std::list<Kept> kept_;  // used last first
    std::map<Key, std::list<Kept>::iterator> by_key_;
};

}  // namespace quern
