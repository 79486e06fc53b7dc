// Images of messages, from files to what a model reads.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "ggml-like/json.h"
#include "models/chat_format.h"
#include "models/model.h"

namespace quern {

/// Whether a part of a content is an image, or a video, in the form of any API.
bool is_image_part(const nlohmann::ordered_json& part);
/// Whether a content is a list with such a part.
bool has_image_part(const nlohmann::ordered_json& content);

/// Decodes all images of the messages into what the model reads, and drops the files. For a model that reads text only, those of
/// tools and of earlier turns become words. Throws FieldError naming the image: one that cannot be read or, for such a model, that a
/// person has just sent.
void read_images(std::vector<Message>& messages, const Model& model, const ImageSizes& sizes);

/// The file as an image of a message that stands before its text. Throws Error(usage).
MessageImage image_of_file(const std::string& path);
/// The bytes of an image file, if they are no more than are read. Throws Error(usage).
std::vector<uint8_t> file_bytes(const std::string& path);

struct DroppedImages {
    std::vector<std::string> paths;
    std::string text;  // what follows them
};

/// The paths at the beginning of a line that a terminal wrote when files were dropped on it, quoted, escaped or as file: URLs: of
/// image files that exist.
DroppedImages dropped_images(std::string_view line);

/// One file as what the model reads. Throws Error(usage) naming it.
ImagePtr read_image_file(const std::string& path, const Model& model, const ImageSizes& sizes);
/// The files that match a pattern, as the frames of a video. Throws Error(usage) naming it.
std::vector<FramePair> read_frame_files(const std::string& pattern, double fps, const Model& model,
                                        const ImageSizes& sizes);

}  // namespace quern
