// What the fuzz targets of image formats share: one decoder each.
#pragma once

#include <cstdlib>
#include <string_view>

#include "ggml-like/error.h"
#include "tools/common/images/decode.h"

namespace quern::test {

/// Files that begin as the format does; others are of no use to the target. Either an Error of the request, or as many pixels as the
/// header says.
inline int fuzz_image(std::string_view magic, const uint8_t* data, size_t size) {
    if (!std::string_view(reinterpret_cast<const char*>(data), size).starts_with(magic)) return -1;
    const ImageLimits limits{.side = 4096, .pixels = 1 << 17};
    try {
        const ImageSize said = image_size({data, size}, limits);
        const Image image = decode_image({data, size}, limits);
        if (image.width * image.height != said.width * said.height) std::abort();
        if (image.rgb.size() != static_cast<size_t>(3 * image.width * image.height)) std::abort();
    } catch (const Error& error) {
        if (error.kind() != ErrorKind::usage) std::abort();
    }
    return 0;
}

}  // namespace quern::test
