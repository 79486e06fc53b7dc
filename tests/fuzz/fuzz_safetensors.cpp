// libFuzzer: the safetensors header. Either an Error or a header whose tensors lie inside the file.
#include <cstdlib>

#include "ggml-like/error.h"
#include "ggml-like/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        quern::parse_safetensors_header({reinterpret_cast<const std::byte*>(data), size}, size, "fuzz");
    } catch (const quern::Error&) {
    }
    return 0;
}
