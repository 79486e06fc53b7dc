// libFuzzer: data: URLs and base64. Either an Error of the request, or no more bytes than the limit.
#include <cstdlib>
#include <string_view>

#include "ggml-like/error.h"
#include "tools/common/images/data_url.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const size_t limit = size / 2;
    for (const auto read : {quern::decode_data_url, quern::decode_base64}) try {
            if (read(text, limit).size() > limit) std::abort();
        } catch (const quern::Error& error) {
            if (error.kind() != quern::ErrorKind::usage) std::abort();
        }
    return 0;
}
