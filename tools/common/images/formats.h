// The decoders of decode.h, one a format.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "models/image.h"

namespace quern {

/// Two steps: the header first, then, if its size is acceptable, the pixels. Each throws Error(usage).
class ImageDecoder {
  public:
    virtual ~ImageDecoder() = default;
    virtual ImageSize size() const = 0;
    /// In the file's own orientation. Once.
    virtual Image pixels() = 0;
    /// EXIF orientation, 1 to 8. After pixels().
    virtual int orientation() const { return 1; }
};

using FileBytes = std::span<const uint8_t>;

std::unique_ptr<ImageDecoder> open_png(FileBytes file);
std::unique_ptr<ImageDecoder> open_jpeg(FileBytes file);
std::unique_ptr<ImageDecoder> open_webp(FileBytes file);
std::unique_ptr<ImageDecoder> open_gif(FileBytes file);
std::unique_ptr<ImageDecoder> open_bmp(FileBytes file);

/// The orientation in a TIFF block (what follows "Exif\0\0"); 1 if it says none or makes no sense.
int exif_orientation(FileBytes tiff);

/// One channel over white: c * a + 255 * (255 - a), divided by 255 and rounded.
inline uint8_t over_white(uint32_t c, uint32_t alpha) {
    const uint32_t t = c * alpha + 255 * (255 - alpha) + 128;
    return static_cast<uint8_t>(((t >> 8) + t) >> 8);
}

/// RGBA, 4 bytes a pixel, over white.
void rgba_over_white(const uint8_t* rgba, int64_t pixels, uint8_t* rgb);

/// Throws Error(usage): the file is damaged or ends early.
[[noreturn]] void fail_damaged(const char* format);

/// Memory for all pixels.
Image make_image(ImageSize size);

}  // namespace quern
