// PNG, by libpng. Its errors leave through longjmp, so functions that call it own nothing.
#include <png.h>

#include <csetjmp>
#include <cstring>

#include "tools/common/images/formats.h"

namespace quern {
namespace {

constexpr png_alloc_size_t kMaxChunk = 8 << 20;
constexpr png_uint_32 kMaxChunks = 64;

struct Source {
    FileBytes left;
};

void read_bytes(png_structp png, png_bytep to, size_t count) {
    auto* source = static_cast<Source*>(png_get_io_ptr(png));
    if (count > source->left.size()) png_error(png, "");
    std::memcpy(to, source->left.data(), count);
    source->left = source->left.subspan(count);
}

[[noreturn]] void leave(png_structp png, png_const_charp) { png_longjmp(png, 1); }
void ignore(png_structp, png_const_charp) {}

/// Everything as 8-bit RGB or RGBA.
void choose_output(png_structp png) {
    png_set_expand(png);
    png_set_strip_16(png);
    png_set_gray_to_rgb(png);
    png_set_interlace_handling(png);
}

bool read_header(png_structp png, png_infop info) {
    if (setjmp(png_jmpbuf(png)) != 0) return false;
    png_set_user_limits(png, PNG_UINT_31_MAX, PNG_UINT_31_MAX);
    png_set_chunk_malloc_max(png, kMaxChunk);
    png_set_chunk_cache_max(png, kMaxChunks);
    png_read_info(png, info);
    return true;
}

/// Takes memory for rows: only for sizes within the limits.
bool start_rows(png_structp png, png_infop info) {
    if (setjmp(png_jmpbuf(png)) != 0) return false;
    choose_output(png);
    png_read_update_info(png, info);
    return true;
}

/// All rows, and what follows them up to the end of the file.
bool read_rows(png_structp png, png_infop info, png_bytepp rows) {
    if (setjmp(png_jmpbuf(png)) != 0) return false;
    png_read_image(png, rows);
    png_read_end(png, info);
    return true;
}

int orientation_of(png_structp png, png_infop info) {
    png_uint_32 size = 0;
    png_bytep exif = nullptr;
    if (png_get_eXIf_1(png, info, &size, &exif) == 0) return 1;
    return exif_orientation({exif, size});
}

class PngDecoder final : public ImageDecoder {
  public:
    explicit PngDecoder(FileBytes file) : source_{file} {
        png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, nullptr, leave, ignore);
        info_ = png_ != nullptr ? png_create_info_struct(png_) : nullptr;
        if (info_ == nullptr) close_and_fail();
        png_set_read_fn(png_, &source_, read_bytes);
        if (!read_header(png_, info_)) close_and_fail();
    }
    ~PngDecoder() override { png_destroy_read_struct(&png_, &info_, nullptr); }
    PngDecoder(const PngDecoder&) = delete;
    PngDecoder& operator=(const PngDecoder&) = delete;

    ImageSize size() const override {
        return {png_get_image_width(png_, info_), png_get_image_height(png_, info_)};
    }

    Image pixels() override {
        if (!start_rows(png_, info_)) fail_damaged("PNG");
        const auto [width, height] = size();
        const int64_t channels = png_get_channels(png_, info_);
        if ((channels != 3 && channels != 4) || png_get_bit_depth(png_, info_) != 8 ||
            png_get_rowbytes(png_, info_) != static_cast<size_t>(width * channels))
            fail_damaged("PNG");
        Image image{width, height, std::vector<uint8_t>(static_cast<size_t>(channels * width * height))};
        std::vector<png_bytep> rows;
        for (int64_t y = 0; y < height; ++y) rows.push_back(image.rgb.data() + y * width * channels);
        if (!read_rows(png_, info_, rows.data())) fail_damaged("PNG");
        if (channels == 4) {
            rgba_over_white(image.rgb.data(), width * height, image.rgb.data());
            image.rgb.resize(static_cast<size_t>(3 * width * height));
        }
        return image;
    }

    int orientation() const override { return orientation_of(png_, info_); }

  private:
    [[noreturn]] void close_and_fail() {
        png_destroy_read_struct(&png_, &info_, nullptr);
        fail_damaged("PNG");
    }

    Source source_;
    png_structp png_ = nullptr;
    png_infop info_ = nullptr;
};

}  // namespace

std::unique_ptr<ImageDecoder> open_png(FileBytes file) { return std::make_unique<PngDecoder>(file); }

}  // namespace quern
