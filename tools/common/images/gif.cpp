// GIF, by giflib: records up to the first picture, which lies on its canvas; what it does not cover, or leaves
// transparent, is white.
#include <gif_lib.h>

#include <algorithm>
#include <cstring>

#include "tools/common/images/formats.h"

namespace quern {
namespace {

constexpr int kMaxRecords = 1000;  // before the first picture

int read_bytes(GifFileType* gif, GifByteType* to, int count) {
    auto* left = static_cast<FileBytes*>(gif->UserData);
    const size_t n = std::min(left->size(), static_cast<size_t>(std::max(count, 0)));
    std::memcpy(to, left->data(), n);
    *left = left->subspan(n);
    return static_cast<int>(n);
}

/// The row of the picture that comes as number i: as they are, or in four passes.
int64_t row_of(int64_t i, int64_t height, bool interlaced) {
    if (!interlaced) return i;
    for (const auto& [first, step] : {std::pair<int64_t, int64_t>{0, 8}, {4, 8}, {2, 4}, {1, 2}}) {
        const int64_t rows = first < height ? (height - first + step - 1) / step : 0;
        if (i < rows) return first + i * step;
        i -= rows;
    }
    return 0;
}

class GifDecoder final : public ImageDecoder {
  public:
    explicit GifDecoder(FileBytes file) : left_(file), gif_(nullptr, close) {
        int error = 0;
        gif_.reset(DGifOpen(&left_, read_bytes, &error));
        if (gif_ == nullptr) fail_damaged("GIF");
    }

    ImageSize size() const override { return {gif_->SWidth, gif_->SHeight}; }

    Image pixels() override {
        go_to_picture();
        const GifImageDesc& frame = gif_->Image;
        const ColorMapObject* colors = frame.ColorMap != nullptr ? frame.ColorMap : gif_->SColorMap;
        if (colors == nullptr || frame.Left < 0 || frame.Top < 0 || frame.Width < 1 || frame.Height < 1 ||
            frame.Left + frame.Width > gif_->SWidth || frame.Top + frame.Height > gif_->SHeight)
            fail_damaged("GIF");
        Image image = make_image(size());
        std::fill(image.rgb.begin(), image.rgb.end(), uint8_t{255});
        std::vector<GifPixelType> line(static_cast<size_t>(frame.Width));
        for (int64_t i = 0; i < frame.Height; ++i) {
            if (DGifGetLine(gif_.get(), line.data(), frame.Width) != GIF_OK) fail_damaged("GIF");
            const int64_t y = frame.Top + row_of(i, frame.Height, frame.Interlace);
            write_row(line, *colors, image.rgb.data() + 3 * (y * image.width + frame.Left));
        }
        return image;
    }

  private:
    static void close(GifFileType* gif) {
        int error = 0;
        if (gif != nullptr) DGifCloseFile(gif, &error);
    }

    void go_to_picture() {
        for (int i = 0; i < kMaxRecords; ++i) {
            GifRecordType type;
            if (DGifGetRecordType(gif_.get(), &type) != GIF_OK) break;
            if (type == IMAGE_DESC_RECORD_TYPE) {
                if (DGifGetImageDesc(gif_.get()) != GIF_OK) break;
                return;
            }
            if (type != EXTENSION_RECORD_TYPE || !read_extension()) break;
        }
        fail_damaged("GIF");
    }

    bool read_extension() {
        int code = 0;
        GifByteType* block = nullptr;
        if (DGifGetExtension(gif_.get(), &code, &block) != GIF_OK) return false;
        if (code == GRAPHICS_EXT_FUNC_CODE && block != nullptr && block[0] >= 4)
            transparent_ = (block[1] & 1) != 0 ? block[4] : -1;
        while (block != nullptr)
            if (DGifGetExtensionNext(gif_.get(), &block) != GIF_OK) return false;
        return true;
    }

    void write_row(const std::vector<GifPixelType>& line, const ColorMapObject& colors, uint8_t* to) const {
        for (const GifPixelType index : line) {
            if (index != transparent_) {
                if (index >= colors.ColorCount) fail_damaged("GIF");
                const GifColorType& c = colors.Colors[index];
                to[0] = c.Red, to[1] = c.Green, to[2] = c.Blue;
            }
            to += 3;
        }
    }

    FileBytes left_;
    std::unique_ptr<GifFileType, void (*)(GifFileType*)> gif_;
    int transparent_ = -1;
};

}  // namespace

std::unique_ptr<ImageDecoder> open_gif(FileBytes file) { return std::make_unique<GifDecoder>(file); }

}  // namespace quern
