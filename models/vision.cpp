#include "models/vision.h"

#include <array>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/sha256.h"

namespace quern {
namespace {

void write_patch(const Image& image, int64_t row, int64_t column, int64_t patch, int64_t frames,
                 uint8_t* to) {
    for (int64_t channel = 0; channel < 3; ++channel)
        for (int64_t frame = 0; frame < frames; ++frame)
            for (int64_t y = 0; y < patch; ++y) {
                const uint8_t* from =
                    image.rgb.data() + 3 * ((row * patch + y) * image.width + column * patch) + channel;
                for (int64_t x = 0; x < patch; ++x) *to++ = from[3 * x];
            }
}

std::vector<int32_t> image_keys(const Image& image, int64_t tokens) {
    Sha256 hash;
    for (const int64_t side : {image.width, image.height}) {
        std::array<uint8_t, 8> bytes;
        std::memcpy(bytes.data(), &side, bytes.size());
        hash.add(bytes);
    }
    hash.add(image.rgb);
    const Sha256::Digest digest = hash.finish();
    std::vector<int32_t> keys;
    for (int64_t i = 0; i < tokens; ++i)
        keys.push_back(static_cast<int32_t>(digest[static_cast<size_t>(i) % digest.size()] | 0x80000000u));
    return keys;
}

}  // namespace

ImagePart make_image_part(const Image& image, const VisionInfo& vision, int64_t patch, int64_t frames) {
    CHECK(image.width % vision.step == 0 && image.height % vision.step == 0 && image.width > 0 &&
              image.height > 0,
          "[vision] an image of {} x {} pixels; the sides should be multiples of {}", image.width,
          image.height, vision.step);
    ImagePart part{.rows = image.height / vision.step, .columns = image.width / vision.step};
    part.keys = image_keys(image, part.tokens());
    const int64_t m = vision.merge, height = part.rows * m, width = part.columns * m;
    part.patches.resize(static_cast<size_t>(height * width * vision.patch_bytes));
    uint8_t* to = part.patches.data();
    for (int64_t i = 0; i < height * width; ++i, to += vision.patch_bytes) {
        const int64_t square = i / (m * m), inside = i % (m * m);
        const int64_t row = square / part.columns * m + inside / m,
                      column = square % part.columns * m + inside % m;
        write_patch(image, row, column, patch, frames, to);
        for (const int64_t number : {row, column, height, width})
            part.place.push_back(static_cast<int32_t>(number));
    }
    return part;
}

}  // namespace quern
