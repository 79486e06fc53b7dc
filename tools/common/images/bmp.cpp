// BMP: pixels of 1, 4, 8, 16, 24 or 32 bits, uncompressed. Source: the structures BITMAPINFOHEADER to BITMAPV5HEADER of the
// Windows API.
#include <algorithm>
#include <array>
#include <bit>

#include "ggml-like/check.h"
#include "tools/common/images/formats.h"

namespace quern {
namespace {

constexpr uint32_t kFileHeader = 14, kCoreHeader = 12, kInfoHeader = 40;
enum Compression : uint32_t { kPlain = 0, kMasks = 3, kAlphaMasks = 6 };

/// A channel of a pixel of 16 or 32 bits.
struct Mask {
    uint32_t bits = 0;
    uint32_t of(uint32_t pixel) const {
        if (bits == 0) return 0;
        const int shift = std::countr_zero(bits);
        const uint64_t most = bits >> shift;
        return static_cast<uint32_t>((uint64_t{(pixel & bits) >> shift} * 255 + most / 2) / most);
    }
};

class BmpDecoder final : public ImageDecoder {
  public:
    explicit BmpDecoder(FileBytes file) : file_(file) {
        pixels_at_ = number(10, 4);
        header_ = number(kFileHeader, 4);
        if (header_ == kCoreHeader)
            read_core();
        else if (header_ >= kInfoHeader && header_ <= 124)
            read_info();
        else
            fail_damaged("BMP");
        if (bits_ <= 8) read_colors();
    }

    ImageSize size() const override { return size_; }

    Image pixels() override {
        const int64_t row_bytes = (size_.width * bits_ + 31) / 32 * 4;
        if (pixels_at_ > file_.size() ||
            (file_.size() - pixels_at_) / static_cast<size_t>(row_bytes) < static_cast<size_t>(size_.height))
            fail_damaged("BMP");
        Image image = make_image(size_);
        for (int64_t i = 0; i < size_.height; ++i) {
            const int64_t y = top_down_ ? i : size_.height - 1 - i;
            read_row(file_.data() + pixels_at_ + i * row_bytes, image.rgb.data() + 3 * y * size_.width);
        }
        return image;
    }

  private:
    uint32_t number(size_t at, size_t bytes) const {
        if (at + bytes > file_.size()) fail_damaged("BMP");
        uint32_t value = 0;
        for (size_t i = bytes; i-- > 0;) value = value << 8 | file_[at + i];
        return value;
    }

    void read_core() {
        size_ = {number(18, 2), number(20, 2)};
        bits_ = number(24, 2);
        color_bytes_ = 3;
        set_masks(kPlain);
    }

    void read_info() {
        const auto height = static_cast<int32_t>(number(22, 4));
        top_down_ = height < 0;
        size_ = {static_cast<int32_t>(number(18, 4)), std::abs(int64_t{height})};
        bits_ = number(28, 2);
        colors_ = number(46, 4);
        set_masks(number(30, 4));
    }

    void set_masks(uint32_t compression) {
        if (!std::ranges::count(std::array{1u, 4u, 8u, 16u, 24u, 32u}, bits_)) fail_damaged("BMP");
        if (bits_ == 16) masks_ = {Mask{0x7c00}, Mask{0x3e0}, Mask{0x1f}, Mask{}};
        if (bits_ == 32) masks_ = {Mask{0xff0000}, Mask{0xff00}, Mask{0xff}, Mask{}};
        if (compression == kPlain) return;
        if ((compression != kMasks && compression != kAlphaMasks) || (bits_ != 16 && bits_ != 32))
            FAIL(usage, "the BMP image is compressed, which is not read; save it as PNG");
        const bool alpha = compression == kAlphaMasks || header_ > 52;
        for (size_t c = 0; c < (alpha ? 4 : 3); ++c)
            masks_[c].bits = number(kFileHeader + kInfoHeader + 4 * c, 4);
        if (header_ == kInfoHeader) masks_bytes_ = alpha ? 16 : 12;
    }

    void read_colors() {
        const uint32_t most = 1u << bits_;
        const uint32_t count = colors_ == 0 ? most : std::min(colors_, most);
        const size_t begin = kFileHeader + header_ + masks_bytes_;
        for (uint32_t i = 0; i < count; ++i) {
            const size_t at = begin + i * color_bytes_;
            if (at + color_bytes_ > pixels_at_) fail_damaged("BMP");
            for (size_t c = 0; c < 3; ++c) palette_.push_back(static_cast<uint8_t>(number(at + 2 - c, 1)));
        }
    }

    void read_row(const uint8_t* from, uint8_t* to) const {
        for (int64_t x = 0; x < size_.width; ++x, to += 3) {
            if (bits_ <= 8) {
                const uint32_t per_byte = 8 / bits_, place = static_cast<uint32_t>(x) % per_byte;
                const size_t index = from[x / per_byte] >> (8 - bits_ * (place + 1)) & ((1u << bits_) - 1);
                if (3 * index >= palette_.size()) fail_damaged("BMP");
                std::copy_n(palette_.data() + 3 * index, 3, to);
            } else if (bits_ == 24) {
                for (int c = 0; c < 3; ++c) to[c] = from[3 * x + 2 - c];
            } else {
                read_masked(from + x * (bits_ / 8), to);
            }
        }
    }

    void read_masked(const uint8_t* from, uint8_t* to) const {
        uint32_t pixel = 0;
        for (uint32_t i = bits_ / 8; i-- > 0;) pixel = pixel << 8 | from[i];
        const uint32_t alpha = masks_[3].bits == 0 ? 255 : masks_[3].of(pixel);
        for (size_t c = 0; c < 3; ++c) to[c] = over_white(masks_[c].of(pixel), alpha);
    }

    FileBytes file_;
    uint32_t pixels_at_ = 0, header_ = 0, bits_ = 0, colors_ = 0;
    size_t color_bytes_ = 4, masks_bytes_ = 0;
    bool top_down_ = false;
    ImageSize size_;
    std::array<Mask, 4> masks_{};
    std::vector<uint8_t> palette_;  // RGB
};

}  // namespace

std::unique_ptr<ImageDecoder> open_bmp(FileBytes file) { return std::make_unique<BmpDecoder>(file); }

}  // namespace quern
