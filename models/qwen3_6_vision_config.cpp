#include <filesystem>

#include "ggml-like/json.h"
#include "ggml-like/json_guard.h"
#include "models/checkpoint.h"
#include "models/config_fields.h"
#include "models/qwen3_6_vision.h"

namespace quern {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxFile = 1 << 20;

/// The settings of images or videos: a file, or a part of processor_config.json.
struct ImageSettings {
    Json json = Json::object();
    std::string file;
};

/// `own`: its own file; `part`: the name of it in the file of all.
ImageSettings read_image_settings(const Checkpoint& checkpoint, const char* own, const char* part) {
    const std::filesystem::path directory = checkpoint.files().directory;
    for (const char* name : {own, "processor_config.json"}) {
        const std::string path = (directory / name).string();
        if (!std::filesystem::exists(path)) continue;
        Json json = parse_json(read_text_file(path, kMaxFile), path);
        if (json.is_object() && json.contains(part))
            json = json[part];
        else if (name != own)
            continue;
        if (!json.is_object()) FAIL(model, "{}: should be a JSON object", path);
        if (json.contains("size") || json.contains("patch_size")) return {std::move(json), path};
    }
    return {};
}

/// `Sizes`: of images or videos.
template <typename Sizes>
void read_sizes(const ImageSettings& settings, const Qwen36VisionConfig& c, Sizes& sizes) {
    constexpr int64_t kMost = int64_t{1} << 30;
    const ConfigFields f(settings.json, settings.file);
    if (const Json* size = f.find("size"); size != nullptr && size->is_object()) {
        const ConfigFields inner(*size, settings.file);
        sizes.fewest = inner.integer("shortest_edge", sizes.fewest, 1, kMost);
        sizes.most = inner.integer("longest_edge", sizes.most, 1, kMost);
    }
    sizes.fewest = f.integer("min_pixels", sizes.fewest, 1, kMost);
    sizes.most = f.integer("max_pixels", sizes.most, 1, kMost);
    const Json half = Json::array({0.5, 0.5, 0.5});
    f.must_be("image_mean", half, "as in all models of this family");
    f.must_be("image_std", half, "as in all models of this family");
    f.must_be("patch_size", c.patch, "as in config.json");
    f.must_be("temporal_patch_size", c.frames, "as in config.json");
    f.must_be("merge_size", c.merge, "as in config.json");
    if (sizes.fewest > sizes.most)
        FAIL(model, "{}: sizes of {} to {} pixels make no sense", settings.file, sizes.fewest, sizes.most);
}

int64_t square_side(const ConfigFields& f, const char* key, int64_t fallback) {
    const int64_t entries = f.integer(key, fallback, 1, 1 << 20);
    int64_t side = 1;
    while (side * side < entries) ++side;
    if (side * side != entries) f.fail(key, "a square number", entries);
    return side;
}

void read_tower(const ConfigFields& f, Qwen36VisionConfig& c, int64_t text_width) {
    constexpr int64_t kWide = 1 << 16;
    f.must_be("hidden_act", "gelu_pytorch_tanh", "the only activation of this family");
    f.must_be("deepstack_visual_indexes", Json::array(), "towers that feed several layers are not read");
    f.must_be("in_channels", 3, "red, green, blue");
    c.blocks = f.integer("depth", 27, 1, 1024);
    c.width = f.integer("hidden_size", 1152, 4, kWide);
    c.heads = f.integer("num_heads", 16, 1, 1024);
    c.mlp_width = f.integer("intermediate_size", 4304, 1, kWide);
    c.patch = f.integer("patch_size", 16, 1, 256);
    c.frames = f.integer("temporal_patch_size", 2, 1, 16);
    c.merge = f.integer("spatial_merge_size", 2, 1, 16);
    c.side = square_side(f, "num_position_embeddings", 2304);
    c.out_width = f.integer("out_hidden_size", 3584, 1, kWide);
    if (c.width % (4 * c.heads) != 0)
        f.fail("hidden_size", fmt::format("a multiple of 4 * num_heads ({})", 4 * c.heads), c.width);
    if (c.out_width != text_width)
        f.fail("out_hidden_size", fmt::format("the text model's hidden_size, {}", text_width), c.out_width);
    if (const Json* rope = f.find("rope_parameters"); rope != nullptr && rope->is_object())
        c.theta = static_cast<float>(ConfigFields(*rope, f.file()).number("rope_theta", 10000, 1, 1e12));
}

}  // namespace

bool has_vision(const Checkpoint& checkpoint) {
    const auto only = checkpoint.config().find("language_model_only");
    if (only != checkpoint.config().end() && *only == true) return false;
    for (const CheckpointTensor& t : checkpoint.tensors())
        if (t.name.starts_with("model.visual.")) return true;
    return false;
}

Qwen36VisionConfig parse_qwen3_6_vision_config(const Checkpoint& checkpoint, int64_t text_width,
                                               int64_t vocab_rows) {
    const std::string& file = checkpoint.files().config;
    const auto vision = checkpoint.config().find("vision_config");
    if (vision == checkpoint.config().end() || !vision->is_object())
        FAIL(model,
             "{}: the checkpoint has a vision tower, but no 'vision_config'; leave it out with --no-vision",
             file);
    Qwen36VisionConfig c;
    read_tower(ConfigFields(*vision, file), c, text_width);
    c.image_token = static_cast<int32_t>(
        ConfigFields(checkpoint.config(), file).integer("image_token_id", 248056, 0, vocab_rows - 1));
    c.video_token = static_cast<int32_t>(
        ConfigFields(checkpoint.config(), file).integer("video_token_id", 248057, 0, int64_t{1} << 30));
    read_sizes(read_image_settings(checkpoint, "preprocessor_config.json", "image_processor"), c, c.sizes);
    read_sizes(read_image_settings(checkpoint, "video_preprocessor_config.json", "video_processor"), c,
               c.video_sizes);
    return c;
}

VisionInfo Qwen36VisionConfig::info() const {
    return {.sizes = sizes,
            .video_sizes = video_sizes,
            .merge = merge,
            .step = patch * merge,
            .patch_bytes = 3 * frames * patch * patch,
            .frames = frames,
            .blocks = blocks,
            .inner_width = width,
            .width = out_width,
            .token = image_token,
            .video_token = video_token};
}

}  // namespace quern
