// libFuzzer: JPEG files.
#include "image_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    return quern::test::fuzz_image("\xff\xd8\xff", data, size);
}
