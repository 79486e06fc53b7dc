// libFuzzer: compressed request bodies, in pieces as they come from a socket. Either they are refused or they end; of what they
// become no more is taken than the limit.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "tools/common/httplib.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    constexpr size_t kLimit = 1 << 20;
    if (size == 0) return 0;
    const size_t piece = 1 + data[0];
    httplib::detail::gzip_decompressor unpacked;
    if (!unpacked.is_valid()) std::abort();
    std::string body;
    for (size_t at = 1; at < size; at += piece) {
        const bool good =
            unpacked.decompress(reinterpret_cast<const char*>(data) + at, std::min(piece, size - at),
                                [&](const char* bytes, size_t count) {
                                    if (body.size() + count > kLimit) return false;
                                    body.append(bytes, count);
                                    return true;
                                });
        if (!good) break;
    }
    if (body.size() > kLimit) std::abort();
    return 0;
}
