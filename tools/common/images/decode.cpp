#include "tools/common/images/decode.h"

#include <cstring>
#include <semaphore>
#include <string_view>

#include "ggml-like/check.h"
#include "tools/common/images/formats.h"

namespace quern {
namespace {

std::counting_semaphore<2> decoders{2};

class Turn {
  public:
    Turn() { decoders.acquire(); }
    ~Turn() { decoders.release(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
};

std::unique_ptr<ImageDecoder> open(FileBytes file, const ImageLimits& limits) {
    if (file.empty()) FAIL(usage, "the image is empty");
    if (file.size() > limits.bytes)
        FAIL(usage, "the image has {} bytes; at most {} are read", file.size(), limits.bytes);
    const std::string_view text(reinterpret_cast<const char*>(file.data()), file.size());
    std::unique_ptr<ImageDecoder> decoder;
    if (text.starts_with("\x89PNG\r\n\x1a\n"))
        decoder = open_png(file);
    else if (text.starts_with("\xff\xd8\xff"))
        decoder = open_jpeg(file);
    else if (text.starts_with("RIFF") && text.size() >= 12 && text.substr(8, 4) == "WEBP")
        decoder = open_webp(file);
    else if (text.starts_with("GIF87a") || text.starts_with("GIF89a"))
        decoder = open_gif(file);
    else if (text.starts_with("BM"))
        decoder = open_bmp(file);
    else
        FAIL(usage, "the image is in an unknown format; PNG, JPEG, WebP, GIF and BMP are read");
    const auto [width, height] = decoder->size();
    if (width < 1 || height < 1 || width > limits.side || height > limits.side ||
        width * height > limits.pixels)
        FAIL(usage, "the image has {} x {} pixels; each side may have 1 to {}, and all together {}", width,
             height, limits.side, limits.pixels);
    return decoder;
}

/// Turns the picture so that it is seen as its orientation says: 2 to 8, of which 5 to 8 swap the sides.
Image turned(const Image& in, int orientation) {
    const bool swaps = orientation >= 5;
    Image out = make_image(swaps ? ImageSize{in.height, in.width} : ImageSize{in.width, in.height});
    const bool from_right = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    const bool from_below = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    uint8_t* to = out.rgb.data();
    for (int64_t r = 0; r < out.height; ++r)
        for (int64_t c = 0; c < out.width; ++c, to += 3) {
            const int64_t x = swaps ? r : c, y = swaps ? c : r;
            const int64_t column = from_right ? in.width - 1 - x : x,
                          row = from_below ? in.height - 1 - y : y;
            std::memcpy(to, in.rgb.data() + 3 * (row * in.width + column), 3);
        }
    return out;
}

}  // namespace

ImageSize image_size(std::span<const uint8_t> file, const ImageLimits& limits) {
    return open(file, limits)->size();
}

Image decode_image(std::span<const uint8_t> file, const ImageLimits& limits) {
    const Turn turn;
    const auto decoder = open(file, limits);
    Image image = decoder->pixels();
    const int orientation = decoder->orientation();
    return orientation == 1 ? std::move(image) : turned(image, orientation);
}

void rgba_over_white(const uint8_t* rgba, int64_t pixels, uint8_t* rgb) {
    for (int64_t i = 0; i < pixels; ++i, rgba += 4, rgb += 3) {
        const uint8_t pixel[4] = {rgba[0], rgba[1], rgba[2], rgba[3]};  // rgb may begin where rgba does
        for (int c = 0; c < 3; ++c) rgb[c] = over_white(pixel[c], pixel[3]);
    }
}

void fail_damaged(const char* format) { FAIL(usage, "the {} image is damaged or ends early", format); }

Image make_image(ImageSize size) {
    return {size.width, size.height, std::vector<uint8_t>(static_cast<size_t>(3 * size.width * size.height))};
}

}  // namespace quern
