#include "tools/common/images/frames.h"

#include <glob.h>

#include <memory>

#include "ggml-like/check.h"
#include "tools/common/content_parts.h"
#include "tools/common/fields.h"
#include "tools/common/images/data_url.h"
#include "tools/common/images/decode.h"
#include "tools/common/images/read_images.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr double kMinFps = 1e-3, kMaxFps = 1000;

std::vector<uint8_t> frame_of_url(const std::string& url, const std::string& where) {
    try {
        return decode_data_url(url, ImageLimits{}.bytes);
    } catch (const Error& error) {
        throw FieldError(where, where + ": " + error.what());
    }
}

void add_frame(VideoFiles& video, std::vector<uint8_t> frame, const std::string& where) {
    if (video.frames.size() == kMaxFrames)
        throw FieldError(where, fmt::format("{}: more than {} frames", where, kMaxFrames));
    video.frames.push_back(std::move(frame));
}

/// "data:video/jpeg;base64,FRAME,FRAME": a data: URL for each frame, written once.
void add_frames_of_url(VideoFiles& video, const std::string& url, const std::string& where) {
    size_t at = url.find(',');
    const std::string begin = url.substr(0, at == std::string::npos ? at : at + 1);
    if (begin.starts_with("data:video/") && !begin.starts_with("data:video/jpeg;"))
        throw FieldError(
            where, where + ": video files are not read; send frames as data:video/jpeg;base64,FRAME,FRAME");
    while (at != std::string::npos) {
        const size_t next = url.find(',', at + 1);
        const std::string frame = url.substr(at + 1, next == std::string::npos ? next : next - at - 1);
        add_frame(video, frame_of_url(begin + frame, where), where);
        at = next;
    }
    if (video.frames.empty()) frame_of_url(url, where);  // says what is wrong with it
}

void add_frames_of_list(VideoFiles& video, const ordered_json& list, const std::string& where) {
    for (size_t i = 0; i < list.size(); ++i) {
        const std::string at = fmt::format("{}[{}]", where, i);
        if (!list[i].is_string()) throw wrong_value(at, "a data: URL", list[i]);
        add_frame(video, frame_of_url(list[i].get<std::string>(), at), at);
    }
}

}  // namespace

VideoFiles frames_of_part(const ordered_json& part, const std::string& where) {
    Fields f(part, where);
    VideoFiles video;
    const auto read_fps = [&](Fields& fields) {
        const ordered_json* fps = fields.value("fps");
        if (fps == nullptr || fps->is_null()) return;
        if (fps->is_number()) video.fps = fps->get<double>();
        if (!fps->is_number() || !(video.fps >= kMinFps && video.fps <= kMaxFps))
            throw wrong_value(fields.full("fps"), fmt::format("a number from {} to {}", kMinFps, kMaxFps),
                              *fps);
    };
    read_fps(f);
    const ordered_json *url = f.value("video_url"), *list = f.value("video");
    if (url != nullptr && url->is_object()) {
        Fields inner(*url, f.full("video_url"));
        read_fps(inner);
        add_frames_of_url(video, inner.string("url").value_or(""), inner.full("url"));
    } else if (url != nullptr && url->is_string()) {
        add_frames_of_url(video, url->get<std::string>(), f.full("video_url"));
    } else if (list != nullptr && list->is_array()) {
        add_frames_of_list(video, *list, f.full("video"));
    }
    if (video.frames.empty())
        throw FieldError(where,
                         where + " has no frames: video_url, or video as a list of data: URLs, is missing");
    return video;
}

VideoFiles frames_of_pattern(const std::string& pattern, double fps) {
    glob_t found{};
    const std::unique_ptr<glob_t, void (*)(glob_t*)> freed(&found, globfree);
    if (glob(pattern.c_str(), GLOB_TILDE, nullptr, &found) != 0 || found.gl_pathc == 0)
        FAIL(usage, "{}: no file has such a name", pattern);
    if (found.gl_pathc > kMaxFrames)
        FAIL(usage, "{}: {} files; at most {} frames are read", pattern, found.gl_pathc, kMaxFrames);
    VideoFiles video{.frames = {}, .fps = fps};
    for (size_t i = 0; i < found.gl_pathc; ++i) video.frames.push_back(file_bytes(found.gl_pathv[i]));
    return video;
}

std::vector<FramePair> read_frames(const VideoFiles& video, const Model& model, const ImageSizes& sizes) {
    CHECK(model.info().vision.has_value(), "[vision] this model was opened without its vision tower");
    const VisionInfo& vision = *model.info().vision;
    const auto count = static_cast<int64_t>(video.frames.size());
    std::vector<Image> frames;
    ImageSize first, size;
    for (const std::vector<uint8_t>& file : video.frames) {
        Image image = decode_image(file);
        if (frames.empty()) {
            first = {image.width, image.height};
            size =
                frame_size_to_read(count, first, vision.step, vision.frames, vision.video_sizes, sizes.most);
        }
        if (image.width != first.width || image.height != first.height)
            FAIL(usage, "frame {} has {} x {} pixels, the first one {} x {}; all frames need one size",
                 frames.size(), image.width, image.height, first.width, first.height);
        frames.push_back(resize(std::move(image), size));
    }
    return make_frame_pairs(frames, video.fps, vision);
}

}  // namespace quern
