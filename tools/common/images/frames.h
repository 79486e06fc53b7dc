// Videos as lists of frames: image files of one size. Video files are not read.
#pragma once

#include <string>
#include <vector>

#include "ggml-like/json.h"
#include "models/model.h"

namespace quern {

inline constexpr double kDefaultFps = 2;
inline constexpr size_t kMaxFrames = 768;  // of a request

struct VideoFiles {
    std::vector<std::vector<uint8_t>> frames;
    double fps = kDefaultFps;
};

/// {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,FRAME,FRAME"} or the URL, "fps": 2}, or {"type": "video",
/// "video": ["data:image/png;base64,...", ...], "fps": 2}. Throws FieldError naming what is wrong.
VideoFiles frames_of_part(const nlohmann::ordered_json& part, const std::string& where);

/// The files that match a pattern of the shell's, in the order of their names. Throws Error(usage).
VideoFiles frames_of_pattern(const std::string& pattern, double fps);

/// One frame after the other is decoded and shrunk. Throws Error(usage): damaged files, other sizes than the first frame's.
std::vector<FramePair> read_frames(const VideoFiles& video, const Model& model, const ImageSizes& sizes);

}  // namespace quern
