#include "models/vision.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/sha256.h"

namespace quern {
namespace {

/// `frames`: of a patch; one image stands for all of them.
void write_patch(std::span<const Image> images, int64_t row, int64_t column, int64_t patch, int64_t frames,
                 uint8_t* to) {
    for (int64_t channel = 0; channel < 3; ++channel)
        for (int64_t frame = 0; frame < frames; ++frame)
            for (int64_t y = 0; y < patch; ++y) {
                const Image& image = images[images.size() == 1 ? 0 : static_cast<size_t>(frame)];
                const uint8_t* from =
                    image.rgb.data() + 3 * ((row * patch + y) * image.width + column * patch) + channel;
                for (int64_t x = 0; x < patch; ++x) *to++ = from[3 * x];
            }
}

/// Of an image, and of several: no list of frames has the digest of an image, whose bytes are fewer.
std::vector<int32_t> image_keys(std::span<const Image> images, int64_t tokens) {
    Sha256 hash;
    for (const int64_t side : {images[0].width, images[0].height}) {
        std::array<uint8_t, 8> bytes;
        std::memcpy(bytes.data(), &side, bytes.size());
        hash.add(bytes);
    }
    for (const Image& image : images) hash.add(image.rgb);
    const Sha256::Digest digest = hash.finish();
    std::vector<int32_t> keys;
    for (int64_t i = 0; i < tokens; ++i)
        keys.push_back(static_cast<int32_t>(digest[static_cast<size_t>(i) % digest.size()] | 0x80000000u));
    return keys;
}

}  // namespace

ImagePart make_image_part(std::span<const Image> images, const VisionInfo& vision) {
    CHECK(images.size() == 1 || static_cast<int64_t>(images.size()) == vision.frames,
          "[vision] {} frames; a patch has {}", images.size(), vision.frames);
    const Image& image = images[0];
    for (const Image& other : images)
        CHECK(other.width == image.width && other.height == image.height, "[vision] frames of several sizes");
    CHECK(image.width % vision.step == 0 && image.height % vision.step == 0 && image.width > 0 &&
              image.height > 0,
          "[vision] an image of {} x {} pixels; the sides should be multiples of {}", image.width,
          image.height, vision.step);
    ImagePart part{.rows = image.height / vision.step, .columns = image.width / vision.step};
    part.keys = image_keys(images, part.tokens());
    const int64_t m = vision.merge, patch = vision.step / m, height = part.rows * m, width = part.columns * m;
    part.patches.resize(static_cast<size_t>(height * width * vision.patch_bytes));
    uint8_t* to = part.patches.data();
    for (int64_t i = 0; i < height * width; ++i, to += vision.patch_bytes) {
        const int64_t square = i / (m * m), inside = i % (m * m);
        const int64_t row = square / part.columns * m + inside / m,
                      column = square % part.columns * m + inside % m;
        write_patch(images, row, column, patch, vision.frames, to);
        for (const int64_t number : {row, column, height, width})
            part.place.push_back(static_cast<int32_t>(number));
    }
    return part;
}

std::vector<FramePair> make_frame_pairs(const std::vector<Image>& frames, double fps,
                                        const VisionInfo& vision) {
    CHECK(!frames.empty() && fps > 0, "[vision] {} frames, {} a second", frames.size(), fps);
    const auto count = static_cast<int64_t>(frames.size()), each = vision.frames;
    std::vector<FramePair> pairs;
    for (int64_t first = 0; first < count; first += each) {
        std::vector<Image> some;
        double indices = 0;
        for (int64_t i = first; i < first + each; ++i) {
            const int64_t at = std::min(i, count - 1);
            some.push_back(frames[static_cast<size_t>(at)]);
            if (i == first || i == first + each - 1) indices += static_cast<double>(at);
        }
        pairs.push_back({fmt::format("<{:.1f} seconds>", indices / 2 / fps),
                         std::make_shared<const ImagePart>(make_image_part(some, vision))});
    }
    return pairs;
}

}  // namespace quern
