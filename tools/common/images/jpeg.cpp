// JPEG, by libjpeg-turbo, with its default transform and upsampling. Its errors leave through longjmp, so functions that
// call it own nothing.
#include <cstdio>
// before jpeglib.h, which needs it
#include <jerror.h>
#include <jpeglib.h>

#include <csetjmp>
#include <cstring>

#include "tools/common/images/formats.h"

namespace quern {
namespace {

constexpr int kMaxScans = 100;
constexpr long kMaxMemory = 512l << 20;
constexpr unsigned kExifMarker = JPEG_APP0 + 1, kMaxMarker = 0xffff;

struct Errors {
    jpeg_error_mgr manager;  // first: the library hands out its address
    std::jmp_buf leave;
};

[[noreturn]] void leave(j_common_ptr jpeg) { std::longjmp(reinterpret_cast<Errors*>(jpeg->err)->leave, 1); }

/// Warnings about missing or impossible data are errors: the library would go on with grey.
void warn(j_common_ptr jpeg, int level) {
    if (level >= 0) return;
    switch (jpeg->err->msg_code) {
        case JWRN_EXTRANEOUS_DATA:
        case JWRN_BOGUS_ICC:
        case JWRN_JFIF_MAJOR:
        case JWRN_ADOBE_XFORM:
            return;
        default:
            leave(jpeg);
    }
}

/// A progressive file may say everything again and again.
void count_scans(j_common_ptr jpeg) {
    if (reinterpret_cast<j_decompress_ptr>(jpeg)->input_scan_number > kMaxScans) leave(jpeg);
}

void be_silent(j_common_ptr) {}

bool read_header(jpeg_decompress_struct& jpeg, Errors& errors, FileBytes file) {
    if (setjmp(errors.leave) != 0) return false;
    jpeg_create_decompress(&jpeg);
    jpeg.mem->max_memory_to_use = kMaxMemory;
    jpeg_mem_src(&jpeg, file.data(), static_cast<unsigned long>(file.size()));
    jpeg_save_markers(&jpeg, static_cast<int>(kExifMarker), kMaxMarker);
    return jpeg_read_header(&jpeg, TRUE) == JPEG_HEADER_OK;
}

bool start(jpeg_decompress_struct& jpeg, Errors& errors) {
    if (setjmp(errors.leave) != 0) return false;
    jpeg.out_color_space = jpeg.num_components == 4 ? JCS_CMYK : JCS_RGB;
    return jpeg_start_decompress(&jpeg) == TRUE;
}

bool read_row(jpeg_decompress_struct& jpeg, Errors& errors, uint8_t* row) {
    if (setjmp(errors.leave) != 0) return false;
    return jpeg_read_scanlines(&jpeg, &row, 1) == 1;
}

bool finish(jpeg_decompress_struct& jpeg, Errors& errors) {
    if (setjmp(errors.leave) != 0) return false;
    return jpeg_finish_decompress(&jpeg) == TRUE;
}

void cmyk_to_rgb(const uint8_t* cmyk, int64_t pixels, bool inverted, uint8_t* rgb) {
    const uint8_t flip = inverted ? 0 : 255;
    for (int64_t i = 0; i < pixels; ++i, cmyk += 4)
        for (int c = 0; c < 3; ++c) {
            const uint32_t t = uint32_t(cmyk[c] ^ flip) * uint32_t(cmyk[3] ^ flip) + 128;
            *rgb++ = static_cast<uint8_t>(((t >> 8) + t) >> 8);
        }
}

int orientation_of(const jpeg_decompress_struct& jpeg) {
    constexpr char kExif[] = "Exif\0";  // and the zero that ends every literal
    for (jpeg_saved_marker_ptr m = jpeg.marker_list; m != nullptr; m = m->next)
        if (m->marker == kExifMarker && m->data_length > sizeof kExif &&
            std::memcmp(m->data, kExif, sizeof kExif) == 0)
            return exif_orientation({m->data + sizeof kExif, m->data_length - sizeof kExif});
    return 1;
}

class JpegDecoder final : public ImageDecoder {
  public:
    explicit JpegDecoder(FileBytes file) {
        jpeg_.err = jpeg_std_error(&errors_.manager);
        errors_.manager.error_exit = leave;
        errors_.manager.emit_message = warn;
        errors_.manager.output_message = be_silent;
        const bool read = read_header(jpeg_, errors_, file);
        progress_.progress_monitor = count_scans;
        jpeg_.progress = &progress_;
        if (read) return;
        jpeg_destroy_decompress(&jpeg_);
        fail_damaged("JPEG");
    }
    ~JpegDecoder() override { jpeg_destroy_decompress(&jpeg_); }
    JpegDecoder(const JpegDecoder&) = delete;
    JpegDecoder& operator=(const JpegDecoder&) = delete;

    ImageSize size() const override { return {jpeg_.image_width, jpeg_.image_height}; }

    Image pixels() override {
        Image image = make_image(size());
        if (!start(jpeg_, errors_)) fail_damaged("JPEG");
        const bool four = jpeg_.output_components == 4;
        if (jpeg_.output_width != image.width || jpeg_.output_height != image.height ||
            (jpeg_.output_components != 3 && !four))
            fail_damaged("JPEG");
        std::vector<uint8_t> cmyk(static_cast<size_t>(four ? 4 * image.width : 0));
        uint8_t* to = image.rgb.data();
        for (int64_t y = 0; y < image.height; ++y, to += 3 * image.width) {
            if (!read_row(jpeg_, errors_, four ? cmyk.data() : to)) fail_damaged("JPEG");
            if (four) cmyk_to_rgb(cmyk.data(), image.width, jpeg_.saw_Adobe_marker == TRUE, to);
        }
        orientation_ = orientation_of(jpeg_);  // finish forgets the markers
        if (!finish(jpeg_, errors_)) fail_damaged("JPEG");
        return image;
    }

    int orientation() const override { return orientation_; }

  private:
    jpeg_decompress_struct jpeg_{};
    jpeg_progress_mgr progress_{};
    Errors errors_{};
    int orientation_ = 1;
};

}  // namespace

std::unique_ptr<ImageDecoder> open_jpeg(FileBytes file) { return std::make_unique<JpegDecoder>(file); }

}  // namespace quern
