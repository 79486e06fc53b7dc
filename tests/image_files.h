// Image files of tests/vectors/images, and as the APIs take them.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "engine_harness.h"
#include "ggml-like/safetensors.h"

namespace quern::test {

/// One of 19 x 13 pixels, which the demo's tower reads as 160 x 128 and 20 tokens, where it is not named otherwise.
inline std::string image_file(const std::string& name) {
    const SafetensorsFile files =
        SafetensorsFile::open(source_dir() + "/tests/vectors/images/files.safetensors");
    const SafeTensor* t = files.find(name + ".file");
    REQUIRE(t != nullptr);
    return {reinterpret_cast<const char*>(t->data), t->bytes()};
}

inline std::string base64(const std::string& bytes) {
    constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
        uint32_t bits = 0;
        for (size_t k = 0; k < 3; ++k)
            bits = bits << 8 | (i + k < bytes.size() ? static_cast<uint8_t>(bytes[i + k]) : 0);
        for (size_t k = 0; k < 4; ++k) out += i + k > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * k) & 63];
    }
    return out;
}

}  // namespace quern::test
