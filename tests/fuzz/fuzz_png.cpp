// libFuzzer: PNG files. Their chunks get right checksums again after each change: else nothing behind the first one would be read.
#include <zlib.h>

#include "image_target.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

constexpr size_t kMagic = 8, kFrame = 12;  // of a chunk: length, type and checksum

uint32_t read_number(const uint8_t* at) {
    return uint32_t{at[0]} << 24 | uint32_t{at[1]} << 16 | uint32_t{at[2]} << 8 | uint32_t{at[3]};
}

void write_number(uint8_t* at, uint32_t value) {
    for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

}  // namespace

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned) {
    size = LLVMFuzzerMutate(data, size, max_size);
    for (size_t at = kMagic; at + kFrame <= size;) {
        const size_t length = read_number(data + at);
        if (length > size - at - kFrame) break;
        const uLong sum = crc32(0, data + at + 4, static_cast<uInt>(length + 4));
        write_number(data + at + 8 + length, static_cast<uint32_t>(sum));
        at += kFrame + length;
    }
    return size;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    return quern::test::fuzz_image("\x89PNG\r\n\x1a\n", data, size);
}
