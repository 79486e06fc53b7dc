// What an engine needs of a model's vision tower: images as patches, and how the tower is built.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ggml-like/graph.h"
#include "ggml-like/requantize.h"
#include "models/image.h"

namespace quern {

/// One image as its tower reads it, or the frames of a video that share their patches. It takes `keys.size()` tokens of a prompt, the patches of a square of the grid each, in reading
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

/// Frames of a video that are one image of a prompt, after the time that is said before them.
struct FramePair {
    std::string time;  // "<0.2 seconds>"
    ImagePtr image;
};

/// Whether an entry of a prompt stands for a part of an image.
inline bool is_image_key(int32_t id) { return id < 0; }

struct VisionInfo {
    ImageSizes sizes;  // of the checkpoint's preprocessors
    VideoSizes video_sizes;
    int64_t merge = 0;                            // patches along a side of the square that becomes a token
    int64_t step = 0;                             // pixels along the same side
    int64_t patch_bytes = 0;                      // U8 values of one patch
    int64_t frames = 0;                           // of a patch
    int64_t blocks = 0;                           // of the tower
    int64_t inner_width = 0;                      // of a patch between blocks
    int64_t width = 0;                            // of a row of features: the text model's
    int32_t token = 0;                            // what the vocabulary has for a part of an image
    int32_t video_token = 0;                      // and for one of a video
    DenseFormat format = DenseFormat::as_stored;  // OpenOptions::vision_format

    /// Pixels of one token.
    int64_t token_pixels() const { return step * step; }
};

/// A part of the tower, so that a large image can be read in several steps: what is before the blocks, blocks begin .. end-1, and
/// what is behind the last one; or one block for some of the patches, which look at all of them.
struct VisionShape {
    int64_t patches = 0, images = 0;
    int64_t begin = 0, end = -1;  // -1: all from `begin` on
    int64_t first = 0, rows = 0;  // the patches that one block is computed for; 0 rows: all
    /// F32 [patches, inner_width]: what the parts before have left, and where this one leaves its own rows. Without memory: it begins
    /// with the images; it ends with features. They may be the same if all rows are computed.
    Tensor from = {}, to = {};
};

struct VisionGraph {
    Graph graph;
    Tensor* patches = nullptr;   // U8 [N, patch_bytes], an input, if it begins with the images
    Tensor* place = nullptr;     // I32 [N, 4], an input
    Tensor* start = nullptr;     // I32 [images + 1], an input: rows of patches
    Tensor* features = nullptr;  // F32 [rows / merge^2, width], an output, if it ends with them
};

/// Images in their right size (size_to_read or frame_size_to_read, with VisionInfo::step), all of one size, as patches: one image, or
/// VisionInfo::frames of a video. Source: Qwen2VLImageProcessor of HF transformers: patches in the order of the squares they belong
/// to; in a patch channel, frame (of an image all the same), row, column.
ImagePart make_image_part(std::span<const Image> images, const VisionInfo& vision);

/// The pairs of a video from its frames, one or more, in their right size: the last one stands twice if the number is odd. `fps`:
/// frames a second. Source: Qwen3VLProcessor of HF transformers, to 5.9.
std::vector<FramePair> make_frame_pairs(const std::vector<Image>& frames, double fps,
                                        const VisionInfo& vision);

}  // namespace quern
