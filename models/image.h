// Image: pixels as people see them, and the sizes that a vision tower reads them in.
#pragma once

#include <cstdint>
#include <vector>

namespace quern {

/// 8 bits a channel, red, green, blue, row by row from the top: 3 * width * height bytes.
struct Image {
    int64_t width = 0, height = 0;
    std::vector<uint8_t> rgb;
};

/// Numbers of pixels between which images are read.
struct ImageSizes {
    int64_t fewest = 65536, most = 16777216;
};

/// Numbers of pixels of all frames of a video together between which they are read.
struct VideoSizes {
    int64_t fewest = 4096, most = 25165824;
};

struct ImageSize {
    int64_t width = 0, height = 0;
    friend bool operator==(const ImageSize&, const ImageSize&) = default;
};

/// The size in which an image is read: sides that are multiples of `step`, close to its own, with as many pixels as
/// `sizes` allows. In FP64; halves are rounded to even multiples. Throws Error(usage) if a side is 0 or one more than 200
/// times the other. Source: smart_resize of HF transformers, Qwen2-VL.
ImageSize size_to_read(ImageSize image, int64_t step, const ImageSizes& sizes);

/// The size in which each of `frames` >= 1 frames is read, as size_to_read; `step_frames` of them become one patch. The fewer frames,
/// the more pixels each may have: its share of sizes.most, but no more than 768 squares of `step` pixels, and than `frame_most`. Throws
/// Error(usage). Source: smart_resize of HF transformers, Qwen3-VL (videos), with the share of qwen-vl-utils.
ImageSize frame_size_to_read(int64_t frames, ImageSize frame, int64_t step, int64_t step_frames,
                             const VideoSizes& sizes, int64_t frame_most);

/// Resamples with the cubic kernel a = -0.5, widened where it shrinks; columns first, then rows, each pass rounded to 8 bits;
/// an axis that keeps its size is left alone. Fixed point, the same bits as torchvision's resize of 8-bit images
/// (bicubic, antialias).
Image resize(Image image, ImageSize to);

}  // namespace quern
