// Image files, resizing and data: URLs. The vectors: scripts/make_image_vectors.py, by Pillow and torchvision.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "ggml-like/error.h"
#include "ggml-like/safetensors.h"
#include "ggml-like/sha256.h"
#include "models/image.h"
#include "tools/common/images/data_url.h"
#include "tools/common/images/decode.h"

namespace quern {
namespace {

using Bytes = std::vector<uint8_t>;

SafetensorsFile vectors(const std::string& name) {
    return SafetensorsFile::open(QUERN_SOURCE_DIR "/tests/vectors/images/" + name + ".safetensors");
}

Bytes bytes_of(const SafeTensor& t) {
    const auto* data = reinterpret_cast<const uint8_t*>(t.data);
    return {data, data + t.bytes()};
}

struct Sample {
    std::string name;
    Bytes file;
    Image image;
};

std::vector<Sample> samples() {
    const SafetensorsFile file = vectors("files");
    std::vector<Sample> list;
    for (const SafeTensor& t : file.tensors()) {
        std::string name(t.name);
        if (!name.ends_with(".file")) continue;
        name.resize(name.size() - 5);
        const SafeTensor* rgb = file.find(name + ".rgb");
        REQUIRE(rgb != nullptr);
        list.push_back({name, bytes_of(t), {rgb->shape[1], rgb->shape[0], bytes_of(*rgb)}});
    }
    REQUIRE(list.size() > 30);
    return list;
}

int furthest(const Bytes& a, const Bytes& b) {
    int most = 0;
    for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
    return most;
}

/// Whether reading ends in pixels or in an error of the request, and in nothing else.
bool reads(const Bytes& file) {
    try {
        const Image image = decode_image(file);
        CHECK(image.rgb.size() == static_cast<size_t>(3 * image.width * image.height));
        return true;
    } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::usage);
        return false;
    }
}

std::string error_of(const Bytes& file, const ImageLimits& limits = {}) {
    try {
        decode_image(file, limits);
    } catch (const Error& error) {
        return error.what();
    }
    return "";
}

std::string hex(const Sha256::Digest& digest) {
    std::string text;
    for (const uint32_t word : digest)
        for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
}

}  // namespace

TEST_SUITE("cpu") {
    TEST_CASE("images: every format gives the pixels that Pillow reads") {
        for (const Sample& s : samples()) {
            CAPTURE(s.name);
            const Image image = decode_image(s.file);
            CHECK(image.width == s.image.width);
            CHECK(image.height == s.image.height);
            REQUIRE(image.rgb.size() == s.image.rgb.size());
            CHECK(furthest(image.rgb, s.image.rgb) == 0);
            const ImageSize size = image_size(s.file);
            const bool turned = s.name.starts_with("turned_") && s.name[7] >= '5';
            CHECK(size ==
                  (turned ? ImageSize{image.height, image.width} : ImageSize{image.width, image.height}));
        }
    }

    TEST_CASE("images: a file cut anywhere in its picture is an error") {
        for (const Sample& s : samples()) {
            CAPTURE(s.name);
            // what may be missing without harm: EXIF and further frames behind the first one, and GIF's end
            const bool more =
                s.name.starts_with("animated") || s.name.ends_with(".webp") || s.name.ends_with(".gif");
            size_t readable = 0;
            for (size_t n = 0; n < s.file.size(); ++n)
                readable += reads(Bytes(s.file.begin(), s.file.begin() + static_cast<std::ptrdiff_t>(n)));
            CHECK((more ? readable < s.file.size() / 2 : readable == 0));
        }
    }

    TEST_CASE("images: limits hold before there are pixels") {
        Bytes png, gif;
        for (const Sample& s : samples()) {
            if (s.name == "rgb.png") png = s.file;
            if (s.name == "palette.gif") gif = s.file;
        }
        CHECK(error_of(png, {.bytes = png.size() - 1}).find("bytes; at most") != std::string::npos);
        CHECK(error_of(png, {.side = 18}).find("19 x 13 pixels") != std::string::npos);
        CHECK(error_of(png, {.pixels = 19 * 13 - 1}).find("19 x 13 pixels") != std::string::npos);
        CHECK(error_of(png, {.bytes = png.size(), .side = 19, .pixels = 19 * 13}).empty());
        std::fill_n(gif.begin() + 6, 4, uint8_t{0xff});  // the canvas
        CHECK(error_of(gif).find("65535 x 65535 pixels") != std::string::npos);
        CHECK(error_of({}).find("empty") != std::string::npos);
        CHECK(error_of({'%', 'P', 'D', 'F', '-', '1'}).find("PNG, JPEG, WebP, GIF and BMP") !=
              std::string::npos);
    }

    TEST_CASE("images: resized as torchvision resizes") {
        const SafetensorsFile file = vectors("resized");
        for (int i = 0; file.find(std::to_string(i) + ".from") != nullptr; ++i) {
            CAPTURE(i);
            const SafeTensor &from = *file.find(std::to_string(i) + ".from"),
                             &to = *file.find(std::to_string(i) + ".to");
            const Image out =
                resize({from.shape[1], from.shape[0], bytes_of(from)}, {to.shape[1], to.shape[0]});
            REQUIRE(out.rgb.size() == to.bytes());
            CHECK(furthest(out.rgb, bytes_of(to)) == 0);
        }
        CHECK(file.tensors().size() >= 16);
    }

    TEST_CASE("images: the size to read") {
        const ImageSizes sizes;
        const auto read = [&](int64_t height, int64_t width) {
            return size_to_read({width, height}, 32, sizes);
        };
        CHECK(read(1, 1) == ImageSize{256, 256});
        CHECK(read(16, 3200) == ImageSize{3648, 32});
        CHECK(read(80, 112) == ImageSize{320, 224});
        CHECK(read(336, 720) == ImageSize{704, 320});
        CHECK(read(333, 1001) == ImageSize{992, 320});
        CHECK(read(1040, 1040) == ImageSize{1024, 1024});
        CHECK(read(1080, 1920) == ImageSize{1920, 1088});
        CHECK(read(2160, 3840) == ImageSize{3840, 2176});
        CHECK(read(8000, 8000) == ImageSize{4096, 4096});
        CHECK(read(10, 2000) == ImageSize{3648, 32});  // 200 times as long is allowed
        CHECK_THROWS_AS(read(10, 2001), Error);
        CHECK_THROWS_AS(read(0, 5), Error);
    }

    TEST_CASE("data: URLs and base64") {
        const auto text = [](const Bytes& b) { return std::string(b.begin(), b.end()); };
        CHECK(text(decode_base64("aGVsbG8=", 5)) == "hello");
        CHECK(text(decode_base64("aGV\n sbG8", 5)) == "hello");
        CHECK(decode_base64("", 0).empty());
        CHECK(decode_base64("/+8=", 9) == Bytes{0xff, 0xef});
        for (const char* bad : {"a", "aGVsb", "aG=Vs", "aGVs!", "aGVs%20", "-_8="}) {
            CAPTURE(bad);
            CHECK_THROWS_AS(decode_base64(bad, 100), Error);
        }
        CHECK_THROWS_AS(decode_base64("aGVsbG8=", 4), Error);
        CHECK(text(decode_data_url("data:image/png;base64,aGVsbG8=", 5)) == "hello");
        CHECK(text(decode_data_url("DATA:;x=y;BASE64,aGVsbG8", 5)) == "hello");
        for (const char* bad :
             {"http://a/b.png", "file:///etc/passwd", "data:image/png,aGVs", "data:", "", "data:;base64"}) {
            CAPTURE(bad);
            CHECK_THROWS_AS(decode_data_url(bad, 100), Error);
        }
    }

    TEST_CASE("SHA-256 of the standard's examples") {
        const auto digest = [](const std::string& text) {
            Sha256 hash;
            for (const char c : text) hash.add({reinterpret_cast<const uint8_t*>(&c), 1});
            return hex(hash.finish());
        };
        CHECK(digest("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
        CHECK(digest("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        CHECK(digest("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
        Sha256 million;
        const Bytes some(1000, 'a');
        for (int i = 0; i < 1000; ++i) million.add(some);
        CHECK(hex(million.finish()) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
}

}  // namespace quern
