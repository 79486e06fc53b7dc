// libFuzzer: GIF files.
#include "image_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    return quern::test::fuzz_image("GIF8", data, size);
}
