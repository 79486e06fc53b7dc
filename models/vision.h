// What an engine needs of a model's vision tower: images as patches, and how the tower is built.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-like/graph.h"
#include "models/image.h"

namespace quern {

/// One image as its tower reads it. It takes `keys.size()` tokens of a prompt, the patches of a square of the grid each, in reading
/// order; in the prompt stands, in place of token ids, one key each: negative numbers made of 31 bits each of a SHA-256 of pixels
/// and grid. So prompts with other images differ, and equal ones are equal.
struct ImagePart {
    int64_t rows = 0, columns = 0;  // of its tokens; each is merge * merge patches
    std::vector<int32_t> keys;      // [rows * columns]
    /// U8 [patches, patch_bytes], and I32 [patches, 4] as ops/patches.h has it; both empty if only the size is known.
    std::vector<uint8_t> patches;
    std::vector<int32_t> place;

    int64_t tokens() const { return rows * columns; }
};
using ImagePtr = std::shared_ptr<const ImagePart>;

/// Whether an entry of a prompt stands for a part of an image.
inline bool is_image_key(int32_t id) { return id < 0; }

struct VisionInfo {
    ImageSizes sizes;         // of the checkpoint's preprocessor
    int64_t merge = 0;        // patches along a side of the square that becomes a token
    int64_t step = 0;         // pixels along the same side
    int64_t patch_bytes = 0;  // U8 values of one patch
    int64_t width = 0;        // of a row of features: the text model's
    int32_t token = 0;        // what the vocabulary has for a part of an image

    /// Pixels of one token.
    int64_t token_pixels() const { return step * step; }
};

struct VisionGraph {
    Graph graph;
    Tensor* patches = nullptr;   // U8 [N, patch_bytes], an input
    Tensor* place = nullptr;     // I32 [N, 4], an input
    Tensor* start = nullptr;     // I32 [images + 1], an input: rows of patches
    Tensor* features = nullptr;  // F32 [N / merge^2, width], an output
};

/// An image in its right size (size_to_read, with VisionInfo::step) as patches. Source: Qwen2VLImageProcessor of HF transformers:
/// patches in the order of the squares they belong to; in a patch channel, frame (twice the same), row, column.
ImagePart make_image_part(const Image& image, const VisionInfo& vision, int64_t patch, int64_t frames);

}  // namespace quern
