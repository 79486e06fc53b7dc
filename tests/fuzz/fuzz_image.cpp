// libFuzzer: image files, and the same bytes as a data: URL. Either an Error, or as many pixels as the header says.
#include <cstdlib>
#include <string_view>

#include "ggml-like/error.h"
#include "tools/common/images/data_url.h"
#include "tools/common/images/decode.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const quern::ImageLimits limits{.side = 4096, .pixels = 1 << 20};
    try {
        const quern::ImageSize said = quern::image_size({data, size}, limits);
        const quern::Image image = quern::decode_image({data, size}, limits);
        if (image.width * image.height != said.width * said.height) std::abort();
        if (image.rgb.size() != static_cast<size_t>(3 * image.width * image.height)) std::abort();
    } catch (const quern::Error&) {
    }
    try {
        quern::decode_data_url({reinterpret_cast<const char*>(data), size}, size);
    } catch (const quern::Error&) {
    }
    return 0;
}
