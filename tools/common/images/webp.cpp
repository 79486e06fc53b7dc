// WebP, by libwebp: a picture, or the first frame of an animation on its canvas.
#include <webp/decode.h>
#include <webp/demux.h>

#include "tools/common/images/formats.h"

namespace quern {
namespace {

class WebpDecoder final : public ImageDecoder {
  public:
    explicit WebpDecoder(FileBytes file) : file_(file) {
        if (WebPGetFeatures(file.data(), file.size(), &features_) != VP8_STATUS_OK) fail_damaged("WebP");
    }

    ImageSize size() const override { return {features_.width, features_.height}; }

    Image pixels() override {
        if (features_.has_animation != 0) return first_frame();
        Image image = make_image(size());
        if (features_.has_alpha == 0) {
            if (WebPDecodeRGBInto(file_.data(), file_.size(), image.rgb.data(), image.rgb.size(),
                                  3 * features_.width) == nullptr)
                fail_damaged("WebP");
            return image;
        }
        std::vector<uint8_t> rgba(image.rgb.size() / 3 * 4);
        if (WebPDecodeRGBAInto(file_.data(), file_.size(), rgba.data(), rgba.size(), 4 * features_.width) ==
            nullptr)
            fail_damaged("WebP");
        rgba_over_white(rgba.data(), image.width * image.height, image.rgb.data());
        return image;
    }

    int orientation() const override {
        const WebPData data{file_.data(), file_.size()};
        const std::unique_ptr<WebPDemuxer, void (*)(WebPDemuxer*)> demuxer(WebPDemux(&data), WebPDemuxDelete);
        WebPChunkIterator chunk;
        if (demuxer == nullptr || WebPDemuxGetChunk(demuxer.get(), "EXIF", 1, &chunk) == 0) return 1;
        FileBytes exif(chunk.chunk.bytes, chunk.chunk.size);
        if (exif.size() > 6 && exif[0] == 'E')
            exif = exif.subspan(6);  // some write JPEG's "Exif\0\0" here, too
        const int orientation = exif_orientation(exif);
        WebPDemuxReleaseChunkIterator(&chunk);
        return orientation;
    }

  private:
    Image first_frame() const {
        const WebPData data{file_.data(), file_.size()};
        WebPAnimDecoderOptions options;
        if (WebPAnimDecoderOptionsInit(&options) == 0) fail_damaged("WebP");
        options.color_mode = MODE_RGBA;
        const std::unique_ptr<WebPAnimDecoder, void (*)(WebPAnimDecoder*)> decoder(
            WebPAnimDecoderNew(&data, &options), WebPAnimDecoderDelete);
        WebPAnimInfo info;
        uint8_t* rgba = nullptr;
        int time = 0;
        if (decoder == nullptr || WebPAnimDecoderGetInfo(decoder.get(), &info) == 0 ||
            ImageSize{info.canvas_width, info.canvas_height} != size() ||
            WebPAnimDecoderGetNext(decoder.get(), &rgba, &time) == 0)
            fail_damaged("WebP");
        Image image = make_image(size());
        rgba_over_white(rgba, image.width * image.height, image.rgb.data());
        return image;
    }

    FileBytes file_;
    WebPBitstreamFeatures features_;
};

}  // namespace

std::unique_ptr<ImageDecoder> open_webp(FileBytes file) { return std::make_unique<WebpDecoder>(file); }

}  // namespace quern
