// Tower: runs a model's vision tower, and remembers what it made of the images it has seen.
//
// It takes the place of prompt steps, and each of its steps does no more than one of them: several small images together, or some
// blocks of the tower for a large one, or some rows of a block (tower_plan.h). So answers wait no longer for images than for prompts.
// The parts are the same operations in the same order, so features do not depend on them.
#pragma once

#include <list>
#include <map>
#include <optional>
#include <span>

#include "ggml-like/plan.h"
#include "models/model.h"
#include "tools/engine/memory_plan.h"
#include "tools/engine/prompt_images.h"
#include "tools/engine/tower_plan.h"

namespace quern {

class Backend;

class Tower {
  public:
    /// Does nothing for a model that reads text only. Throws Error(memory).
    Tower(const Model& model, Backend& backend, Workspace& workspace, const MemoryPlan& memory);
    ~Tower();
    Tower(const Tower&) = delete;
    Tower& operator=(const Tower&) = delete;

    /// Fills the features of those items that are remembered.
    void recall(std::span<PromptImages::Item* const> items);
    /// One step. Fills the features of one or more of the items, unless a large image needs further steps: call it again, with that
    /// image among the items.
    void encode(std::span<PromptImages::Item* const> items);

  private:
    using Key = std::vector<int32_t>;
    using Items = std::span<PromptImages::Item* const>;
    struct Kept {
        Key key;
        FeaturesPtr features;
    };
    /// An image of which some steps have run.
    struct Begun {
        ImagePtr image;
        std::vector<TowerStep> steps;
        size_t done = 0;
        std::vector<float> features = {};  // of the rows so far
    };
    static Key key_of(const ImagePart& image);
    void remember(const ImagePart& image, const FeaturesPtr& features);
    void encode_together(Items items);
    void go_on(Begun begun, Items items);
    Tensor between(int64_t patches, int64_t block) const;
    void run(const VisionShape& shape, std::span<const ImagePart* const> images,
             std::vector<float>& features);

    const Model& model_;
    Backend& backend_;
    Workspace& workspace_;
    const int64_t step_patches_, budget_, between_bytes_;
    std::byte* between_ = nullptr;  // what blocks have left of `begun_`, twice: a row goes where none is read
    std::optional<Begun> begun_;
    int64_t bytes_ = 0;
    std::list<Kept> kept_;  // used last first
    std::map<Key, std::list<Kept>::iterator> by_key_;
};

}  // namespace quern
