#include "tools/run/attachments.h"

#include <utility>

#include "ggml-like/check.h"
#include "tools/common/images/read_images.h"
#include "tools/run/input.h"

namespace quern {

std::string Attachments::add_text(const std::string& path) {
    if (path.empty()) FAIL(usage, "/read FILE attaches a text to the next message");
    text_ += (text_.empty() ? "" : "\n\n") + read_input_file(path);
    return fmt::format("{} bytes go with the next message", text_.size());
}

std::string Attachments::add_image(const std::string& path) {
    if (path.empty()) FAIL(usage, "/image FILE attaches an image to the next message");
    MessageImage image{.where = path};
    image.image = read_image_file(path, engine_.model(), engine_.image_sizes());
    images_.push_back(std::move(image));
    return fmt::format("an image of {} tokens goes with the next message", images_.back().image->tokens());
}

std::string Attachments::add_frames(const std::string& pattern) {
    if (pattern.empty())
        FAIL(usage, "/frames PATTERN attaches the files with such names, as a video, to the next message");
    MessageImage video{.where = pattern};
    video.pairs = read_frame_files(pattern, fps_, engine_.model(), engine_.image_sizes());
    images_.push_back(std::move(video));
    const std::vector<FramePair>& pairs = images_.back().pairs;
    return fmt::format("a video of {} pairs of frames, {} tokens each, goes with the next message",
                       pairs.size(), pairs[0].image->tokens());
}

Message Attachments::message(const std::string& text) {
    Message m{.role = "user",
              .content = text_.empty() ? text : join_prompt(text, text_),
              .images = std::move(images_)};
    clear();
    return m;
}

void Attachments::clear() {
    text_.clear();
    images_.clear();
}

}  // namespace quern
