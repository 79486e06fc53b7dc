// PromptImages: the images of a prompt, where they lie in it, and the positions of all tokens. Pure host code.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/vision.h"

namespace quern {

/// What the tower makes of an image: a row for each of its tokens, F32, and the tokens' width.
using FeaturesPtr = std::shared_ptr<const std::vector<float>>;

class PromptImages {
  public:
    struct Item {
        ImagePtr image;
        int64_t first = 0;     // token
        int64_t cursor = 0;    // the position of its first token on all three axes
        FeaturesPtr features;  // null until somebody needs them

        int64_t end() const { return first + image->tokens(); }
    };
    /// By what a token's queries and keys rotate.
    struct Place {
        int32_t time, row, column;
        friend bool operator==(const Place&, const Place&) = default;
    };

    PromptImages() = default;
    /// Throws Error(usage) unless the image keys of the prompt are those of the images, in order.
    PromptImages(std::span<const int32_t> prompt, std::vector<ImagePtr> images);

    bool empty() const { return items_.empty(); }
    std::vector<Item>& items() { return items_; }
    /// A token, an answer's as well. An image counts as many positions as its longer side has tokens; those in it stand at its first
    /// position in time, and at their row and column beyond it. Source: get_rope_index of HF transformers, Qwen2-VL.
    Place place(int64_t token) const;
    /// The features of a token of an image; null for other tokens. They must be there.
    const float* row(int64_t token, int64_t width) const;
    /// The image that the token belongs to, or null.
    const Item* at(int64_t token) const;
    /// Where states are kept beside the ends of messages: behind each image.
    std::vector<int64_t> ends() const;
    /// Whether a state of so many tokens says which image it has seen: not after the first few tokens of one, whose keys are too
    /// few bits.
    bool tells_apart(int64_t tokens) const;

  private:
    std::vector<Item> items_;
};

}  // namespace quern
