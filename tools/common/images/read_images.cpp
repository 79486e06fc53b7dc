#include "tools/common/images/read_images.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "ggml-like/check.h"
#include "tools/common/content_parts.h"
#include "tools/common/fields.h"
#include "tools/common/images/data_url.h"
#include "tools/common/images/decode.h"
#include "tools/common/images/frames.h"

namespace quern {

using nlohmann::ordered_json;

namespace {

constexpr size_t kMaxImages = 64;
constexpr int64_t kLowPixels = 262'144;  // of detail low

const char* const kTextOnly =
    "this model reads text only: its checkpoint has no vision tower, or was loaded without it (--no-vision)";

/// Pixels at most; 0: as the server reads images.
int64_t pixels_of_detail(const std::string& detail, const std::string& where) {
    if (detail == "low") return kLowPixels;
    if (detail == "auto" || detail == "high" || detail == "original") return 0;
    throw wrong_value(where, "low, high, original or auto", detail);
}

bool is_video(const std::string& type) { return type == "video_url" || type == "video"; }

/// Calls `read`, with errors that name the place.
template <typename F>
auto at_place(const std::string& where, F&& read) {
    try {
        return read();
    } catch (const FieldError&) {
        throw;
    } catch (const Error& error) {
        throw FieldError(where, where + ": " + error.what());
    }
}

std::vector<uint8_t> from_url(const std::string& url, const std::string& where) {
    return at_place(where, [&] { return decode_data_url(url, ImageLimits{}.bytes); });
}

/// {"type": "base64", "media_type", "data"}
std::vector<uint8_t> from_source(Fields& part) {
    const ordered_json* source = part.object("source");
    if (source == nullptr) throw FieldError(part.full("source"), part.full("source") + " is missing");
    Fields f(*source, part.full("source"));
    const std::string type = f.string("type").value_or("");
    if (type != "base64")
        throw wrong_value(f.full("type"), "base64 (images are read from requests only)", type);
    return at_place(f.full("data"),
                    [&] { return decode_base64(f.string("data").value_or(""), ImageLimits{}.bytes); });
}

struct ImageFile {
    std::vector<uint8_t> bytes;
    int64_t most_pixels = 0;  // 0: as others are
};

ImagePtr read(const ImageFile& file, const Model& model, ImageSizes sizes) {
    if (file.most_pixels > 0) sizes.most = std::min(sizes.most, file.most_pixels);
    sizes.fewest = std::min(sizes.fewest, sizes.most);
    return std::make_shared<const ImagePart>(model.read_image(decode_image(file.bytes), sizes));
}

/// {"type": "image_url", "image_url": {"url", "detail"} or the URL}, {"type": "input_image", "image_url", "detail"}, or {"type":
/// "image", "source": {"type": "base64", "data"}}. data: URLs only.
ImageFile file_of_part(const ordered_json& part, const std::string& where) {
    Fields f(part, where);
    ImageFile image;
    if (f.string("type") == "image_file" || f.value("file_id") != nullptr)
        throw FieldError(where, where + ": files are not kept here; send the image as a data: URL");
    std::string detail = f.string("detail").value_or("auto");
    if (f.string("type") == "image" && f.value("source") != nullptr) {
        image.bytes = from_source(f);
    } else if (const ordered_json* url = f.value("image_url"); url != nullptr && url->is_object()) {
        Fields inner(*url, f.full("image_url"));
        detail = inner.string("detail").value_or(detail);
        image.bytes = from_url(inner.string("url").value_or(""), inner.full("url"));
    } else if (url != nullptr && url->is_string()) {
        image.bytes = from_url(url->get<std::string>(), f.full("image_url"));
    } else {
        throw FieldError(where, where + " has no image: image_url or source is missing");
    }
    image.most_pixels = pixels_of_detail(detail, f.full("detail"));
    return image;
}

/// Images become words.
void leave_out(Message& m) {
    for (auto image = m.images.rbegin(); image != m.images.rend(); ++image)
        m.content.insert(image->at, part_text(image->part, image->where));
    m.images.clear();
}

/// Conversations go on whatever tools showed, or somebody asked of another model; a new question with images cannot be answered.
void leave_out_or_refuse(std::vector<Message>& messages) {
    bool newest = true;
    for (auto m = messages.rbegin(); m != messages.rend(); ++m) {
        newest = newest && m->role != "assistant";
        if (newest && m->role == "user" && !m->images.empty())
            throw FieldError(m->images[0].where, m->images[0].where + ": " + kTextOnly);
        leave_out(*m);
    }
}

/// The first word of a line as a shell reads it, or a file: URL with its %XX; and its bytes in the line.
std::pair<std::string, size_t> dropped_word(std::string_view line) {
    const bool url = line.starts_with("file://");
    std::string word;
    size_t at = url ? 7 : 0;
    for (char quote = 0; at < line.size(); ++at) {
        const char c = line[at];
        int code = 0;
        if (quote != 0 && c == quote) {
            quote = 0;
        } else if (quote == 0 && !url && (c == '\'' || c == '"')) {
            quote = c;
        } else if (quote == 0 && (c == ' ' || c == '\n')) {
            break;
        } else if (c == '\\' && quote != '\'' && at + 1 < line.size()) {
            word += line[++at];
        } else if (url && c == '%' &&
                   std::from_chars(line.data() + at + 1, line.data() + std::min(at + 3, line.size()), code,
                                   16)
                           .ptr == line.data() + at + 3) {
            word += static_cast<char>(code);
            at += 2;
        } else {
            word += c;
        }
    }
    return {word, at};
}

bool is_image_path(const std::string& path) {
    if (!path.starts_with('/')) return false;
    std::string kind = std::filesystem::path(path).extension().string();
    std::transform(kind.begin(), kind.end(), kind.begin(), [](unsigned char c) { return std::tolower(c); });
    constexpr std::array kKinds = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"};
    std::error_code failed;
    return std::find(kKinds.begin(), kKinds.end(), kind) != kKinds.end() &&
           std::filesystem::is_regular_file(path, failed);
}

}  // namespace

std::vector<uint8_t> file_bytes(const std::string& path) {
    std::error_code failed;
    const auto size = std::filesystem::file_size(path, failed);
    if (failed || !std::filesystem::is_regular_file(path)) FAIL(usage, "{}: there is no such file", path);
    if (size > ImageLimits{}.bytes)
        FAIL(usage, "{}: {} bytes; at most {} are read", path, size, ImageLimits{}.bytes);
    std::ifstream file(path, std::ios::binary);
    std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
    if (!file) FAIL(usage, "{}: cannot be read", path);
    return bytes;
}

bool is_image_part(const ordered_json& part) {
    const std::string type = text_of(part, "type");
    return is_video(type) || type == "image_url" || type == "input_image" || type == "image" ||
           type == "image_file";
}

bool has_image_part(const ordered_json& content) {
    return content.is_array() && std::any_of(content.begin(), content.end(), is_image_part);
}

void read_images(std::vector<Message>& messages, const Model& model, const ImageSizes& sizes) {
    size_t count = 0;
    for (const Message& m : messages) count += m.images.size();
    if (count > kMaxImages)
        throw FieldError("messages",
                         fmt::format("messages: {} images; at most {} are read", count, kMaxImages));
    if (!model.info().vision) return leave_out_or_refuse(messages);
    size_t frames = 0;
    for (Message& m : messages)
        for (MessageImage& image : m.images) {
            if (image.image != nullptr || !image.pairs.empty()) continue;
            if (!image.part.is_null() && is_video(text_of(image.part, "type"))) {
                const VideoFiles video = frames_of_part(image.part, image.where);
                frames += video.frames.size();
                if (frames > kMaxFrames)
                    throw FieldError(image.where,
                                     fmt::format("{}: with it the request has {} frames; at most {} are read",
                                                 image.where, frames, kMaxFrames));
                image.pairs = at_place(image.where, [&] { return read_frames(video, model, sizes); });
                image.part = nullptr;
                continue;
            }
            const ImageFile file = image.part.is_null() ? ImageFile{std::move(image.file)}
                                                        : file_of_part(image.part, image.where);
            image.image = at_place(image.where, [&] { return read(file, model, sizes); });
            image.part = nullptr;
        }
}

MessageImage image_of_file(const std::string& path) { return {.where = path, .file = file_bytes(path)}; }

DroppedImages dropped_images(std::string_view line) {
    DroppedImages out;
    while (!line.empty()) {
        const auto [path, bytes] = dropped_word(line);
        if (!is_image_path(path)) break;
        out.paths.push_back(path);
        line.remove_prefix(bytes);
        line.remove_prefix(std::min(line.find_first_not_of(" \n"), line.size()));
    }
    out.text = line;
    return out;
}

namespace {

/// Calls `read`, with errors that name the files.
template <typename F>
auto of_files(const std::string& path, const Model& model, F&& read) {
    if (!model.info().vision) FAIL(usage, "{}: {}", path, kTextOnly);
    try {
        return read();
    } catch (const Error& error) {
        const std::string text = error.what();
        FAIL(usage, "{}{}", text.starts_with(path) ? "" : path + ": ", text);
    }
}

}  // namespace

ImagePtr read_image_file(const std::string& path, const Model& model, const ImageSizes& sizes) {
    return of_files(path, model, [&] { return read({file_bytes(path)}, model, sizes); });
}

std::vector<FramePair> read_frame_files(const std::string& pattern, double fps, const Model& model,
                                        const ImageSizes& sizes) {
    return of_files(pattern, model,
                    [&] { return read_frames(frames_of_pattern(pattern, fps), model, sizes); });
}

}  // namespace quern
