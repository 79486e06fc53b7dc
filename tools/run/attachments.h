// Files that go with a person's next message: texts, images, videos.
#pragma once

#include <string>
#include <vector>

#include "models/chat_format.h"
#include "tools/engine/engine.h"

namespace quern {

class Attachments {
  public:
    Attachments(const Engine& engine, double fps) : engine_(engine), fps_(fps) {}

    /// Each returns what was attached, in words. Throws Error(usage).
    std::string add_text(const std::string& path);
    std::string add_image(const std::string& path);
    /// Image files whose names match, as the frames of a video.
    std::string add_frames(const std::string& pattern);

    /// The message, with all of them; then there are none.
    Message message(const std::string& text);
    void clear();

  private:
    const Engine& engine_;
    const double fps_;
    std::string text_;
    std::vector<MessageImage> images_;
};

}  // namespace quern
