// decode_image: the bytes of an image file as pixels.
//
// PNG, JPEG, WebP, GIF and BMP, told apart by their first bytes. Of animations the first frame, on its canvas. Grey and palettes
// become RGB, 16 bits a channel their high byte; what is transparent lies on white; CMYK becomes RGB without a profile; profiles and
// gamma are ignored. EXIF orientation is applied. Other metadata is dropped. A file that ends early or is damaged is an error,
// never a picture with holes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "models/image.h"

namespace quern {

/// Checked in the file's header, before there is memory for any pixel.
struct ImageLimits {
    size_t bytes = 20 << 20;
    int64_t side = 16384, pixels = 64'000'000;
};

/// The size of the picture before it is turned as its EXIF orientation says. Reads the header only. Throws Error(usage) if
/// it is none of these formats, damaged, or beyond the limits.
ImageSize image_size(std::span<const uint8_t> file, const ImageLimits& limits = {});

/// Throws as image_size. Two images are decoded at the same time at most; others wait.
Image decode_image(std::span<const uint8_t> file, const ImageLimits& limits = {});

}  // namespace quern
