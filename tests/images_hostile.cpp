// Image files that say more than they have, or unpack to more than anyone wants: errors or pictures, in little memory.
#include <doctest/doctest.h>
#include <zlib.h>

#include <fstream>
#include <map>
#include <random>
#include <string>

#include "ggml-like/error.h"
#include "ggml-like/safetensors.h"
#include "tools/common/images/decode.h"

namespace quern {
namespace {

std::string number(uint64_t value, int bytes, bool big_endian) {
    std::string out;
    for (int i = 0; i < bytes; ++i)
        out += static_cast<char>(value >> 8 * (big_endian ? bytes - 1 - i : i) & 255);
    return out;
}
std::string big(uint64_t value, int bytes) { return number(value, bytes, true); }
std::string little(uint64_t value, int bytes) { return number(value, bytes, false); }

std::string deflated(const std::string& text) {
    uLongf size = compressBound(text.size());
    std::string out(size, '\0');
    REQUIRE(compress2(reinterpret_cast<Bytef*>(out.data()), &size,
                      reinterpret_cast<const Bytef*>(text.data()), text.size(), 1) == Z_OK);
    out.resize(size);
    return out;
}

std::string png_chunk(const std::string& type, const std::string& data) {
    const std::string checked = type + data;
    const uLong sum =
        crc32(0, reinterpret_cast<const Bytef*>(checked.data()), static_cast<uInt>(checked.size()));
    return big(data.size(), 4) + checked + big(sum, 4);
}

/// Grey, 8 bits; `before`: chunks between header and pixels.
std::string png(uint64_t width, uint64_t height, const std::string& pixels, const std::string& before = "") {
    return "\x89PNG\r\n\x1a\n" +
           png_chunk("IHDR", big(width, 4) + big(height, 4) + std::string("\x08\0\0\0\0", 5)) + before +
           png_chunk("IDAT", deflated(pixels)) + png_chunk("IEND", "");
}

std::string riff(const std::string& chunks) {
    return "RIFF" + little(chunks.size() + 4, 4) + "WEBP" + chunks;
}
std::string riff_chunk(const std::string& type, const std::string& data) {
    return type + little(data.size(), 4) + data + std::string(data.size() % 2, '\0');
}

/// Bytes of a line of /proc/self/status.
int64_t memory(const std::string& line) {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        int64_t kib = 0;
        if (word == line + ":" && status >> kib) return kib * 1024;
    }
    FAIL("no such line");
    return 0;
}

struct Outcome {
    std::string error;
    Image image;
    int64_t grown = 0;  // bytes that were in use beyond what was before
};

Outcome read(const std::string& file) {
    Outcome out;
    std::ofstream("/proc/self/clear_refs") << "5";  // forgets the most that was in use
    const int64_t before = memory("VmRSS");
    try {
        out.image = decode_image({reinterpret_cast<const uint8_t*>(file.data()), file.size()});
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::usage);
        out.error = error.what();
        CHECK(!out.error.empty());
    }
    out.grown = memory("VmHWM") - before;
    return out;
}

constexpr int64_t kLittle = 40 << 20;  // bytes, with what sanitizers add

/// An error, in little memory.
void refused(const std::string& file, const std::string& words) {
    const Outcome out = read(file);
    CAPTURE(out.error);
    CHECK(out.error.find(words) != std::string::npos);
    CHECK(out.grown < kLittle);
}

/// A picture of that size, in little memory.
void seen(const std::string& file, int64_t width, int64_t height) {
    const Outcome out = read(file);
    CAPTURE(out.error);
    CHECK(out.image.width == width);
    CHECK(out.image.height == height);
    CHECK(out.grown < kLittle);
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("hostile images: sizes beyond the limits are refused by the header alone") {
        refused(png(65535, 65535, std::string(1 << 20, '\0')), "65535 x 65535 pixels");
        refused(png(0x7fffffff, 1, "\0\0"), "2147483647 x 1 pixels");
        refused(png(16385, 1, "\0\0"), "16385 x 1 pixels");
        refused("GIF89a" + little(65535, 2) + little(65535, 2) + std::string("\x70\0\0", 3), "65535 x 65535");
        refused("BM" + little(54, 4) + little(0, 4) + little(54, 4) + little(40, 4) + little(65535, 4) +
                    little(65535, 4) + little(1, 2) + little(24, 2) + std::string(24, '\0'),
                "65535 x 65535");
        std::string canvas = std::string("\x02\0\0\0", 4) + little(16383, 3) + little(16383, 3);
        refused(riff(riff_chunk("VP8X", canvas) + riff_chunk("ANIM", std::string(6, '\0'))), "16384 x 16384");
    }

    TEST_CASE("hostile images: a header that promises more pixels than follow") {
        refused(png(1000, 2000, std::string(1000, '\0')), "damaged");
        const Outcome most = read(png(8000, 8000, std::string(1000, '\0')));  // as many as are read
        CHECK(most.error.find("damaged") != std::string::npos);
        CHECK(most.grown < 3 * 64'000'000 + kLittle);
    }

    TEST_CASE("hostile images: PNG's profiles and texts that unpack to very much") {
        const std::string pixels(4 * 5, '\0'), bomb = deflated(std::string(64 << 20, 'x'));
        const std::string nested = deflated(bomb);
        for (const std::string& packed : {bomb, nested}) {
            const std::string icc = png_chunk("iCCP", std::string("icc\0\0", 5) + packed);
            seen(png(4, 4, pixels, icc), 4, 4);
            const std::string text = png_chunk("zTXt", std::string("Comment\0\0", 9) + packed);
            std::string many;
            for (int i = 0; i < 100; ++i) many += text;
            const Outcome out = read(png(4, 4, pixels, many));  // seen or refused: more chunks than are kept
            CHECK(out.grown < kLittle);
        }
        const Outcome more =
            read(png(4, 4, std::string(32 << 20, '\0')));  // pixels behind the picture's last
        CHECK(more.grown < kLittle);
    }

    TEST_CASE("hostile images: profiles of JPEG that claim parts of parts") {
        const SafetensorsFile files =
            SafetensorsFile::open(QUERN_SOURCE_DIR "/tests/vectors/images/files.safetensors");
        const SafeTensor* t = files.find("rgb.jpg.file");
        REQUIRE(t != nullptr);
        const std::string jpeg(reinterpret_cast<const char*>(t->data), t->bytes());
        std::string profiles;
        for (int i = 0; i < 255; ++i) {
            const std::string data = std::string("ICC_PROFILE\0", 12) + static_cast<char>(i) + "\xff" +
                                     std::string(60000, static_cast<char>(i));
            profiles += "\xff\xe2" + big(data.size() + 2, 2) + data;
        }
        seen(jpeg.substr(0, 2) + profiles + jpeg.substr(2), 19, 13);
    }

    TEST_CASE("hostile images: of 100,000 frames the first one is read") {
        std::string gif =
            "GIF89a" + little(1, 2) + little(1, 2) + std::string("\x80\0\0\0\0\0\xff\xff\xff", 9);
        const std::string frame = std::string("\x21\xf9\x04\0\0\0\0\0", 8) +
                                  std::string("\x2c\0\0\0\0\x01\0\x01\0\0", 10) +
                                  std::string("\x02\x02\x44\x01\0", 5);
        for (int i = 0; i < 100'000; ++i) gif += frame;
        seen(gif + ";", 1, 1);
        std::string comments = gif.substr(0, 22);
        for (int i = 0; i < 100'000; ++i) comments += std::string("\x21\xfe\x01x\0", 5);
        refused(comments + frame + ";", "damaged");  // nothing but comments for very long

        const std::string pixel =
            riff_chunk("VP8L", std::string("\x2f\0\0\0\0\x88\x88\x08", 8));  // one, black
        std::string webp = riff_chunk("VP8X", std::string("\x02\0\0\0\0\0\0\0\0\0", 10)) +
                           riff_chunk("ANIM", std::string(6, '\0'));
        const std::string part = riff_chunk("ANMF", std::string(16, '\0') + pixel);
        for (int i = 0; i < 100'000; ++i) webp += part;
        seen(riff(webp), 1, 1);
    }

    TEST_CASE("hostile images: 1,000 damaged files of each format") {
        const SafetensorsFile files =
            SafetensorsFile::open(QUERN_SOURCE_DIR "/tests/vectors/images/files.safetensors");
        std::map<std::string, std::vector<std::string>> formats;
        for (const SafeTensor& t : files.tensors()) {
            const std::string name(t.name);
            if (!name.ends_with(".file")) continue;
            const size_t dot = name.find('.');
            formats[name.substr(dot + 1, name.size() - 5 - dot - 1)].emplace_back(
                reinterpret_cast<const char*>(t.data), t.bytes());
        }
        REQUIRE(formats.size() == 5);
        std::mt19937 random(11);
        for (const auto& [format, samples] : formats) {
            const std::string name = format;  // what a lambda may name
            CAPTURE(name);
            int readable = 0;
            for (size_t i = 0; i < 1000; ++i) {
                std::string file = samples[i % samples.size()];
                for (size_t k = 0; k < 1 + i % 5; ++k) {
                    const size_t at = random() % file.size();
                    switch (random() % 4) {
                        case 0:
                            file[at] = static_cast<char>(random());
                            break;
                        case 1:
                            file[at] = static_cast<char>(file[at] ^ 1 << random() % 8);
                            break;
                        case 2:
                            file.insert(at, file.substr(random() % file.size(), random() % 40));
                            break;
                        default:
                            file.erase(at, random() % 8);
                    }
                    if (file.empty()) file = "x";
                }
                const Outcome out = read(file);
                readable += out.error.empty();
                if (out.error.empty())
                    CHECK(out.image.rgb.size() ==
                          static_cast<size_t>(3 * out.image.width * out.image.height));
            }
            CHECK(readable < 1000);  // the damage is noticed at all
        }
    }
}

}  // namespace quern
