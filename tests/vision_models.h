// Tiny random models with vision towers (scripts/make_vision_vectors.py), for tests of images and videos.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>

#include "engine_harness.h"
#include "ggml-like/plan.h"
#include "ggml-like/safetensors.h"

namespace quern::test {

inline const char* const kVisionModels[] = {"moe", "dense"};

inline std::string vision_folder(const std::string& model) {
    return source_dir() + "/tests/vectors/vision/" + model;
}

template <typename T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
    const SafeTensor* t = file.find(name);
    REQUIRE(t != nullptr);
    std::vector<T> out(static_cast<size_t>(t->bytes() / sizeof(T)));
    std::memcpy(out.data(), t->data, out.size() * sizeof(T));
    return out;
}

/// A model with its tower.
struct Seeing {
    explicit Seeing(const std::string& name, std::unique_ptr<Backend> on)
        : backend(std::move(on)),
          model(load_model(vision_folder(name) + "/checkpoint", *backend,
                           {.tokenizer = false, .mtp = MtpUse::if_readable, .vision = true})) {}
    std::unique_ptr<Backend> backend;
    std::unique_ptr<Model> model;

    std::vector<ImagePtr> read(const std::vector<Image>& images) const {
        std::vector<ImagePtr> list;
        for (const Image& image : images)
            list.push_back(
                std::make_shared<const ImagePart>(model->read_image(image, model->info().vision->sizes)));
        return list;
    }
    /// The prompt with the images' keys in the place of `token`.
    std::vector<int32_t> with_keys(std::vector<int32_t> prompt, const std::vector<ImagePtr>& images,
                                   int32_t token) const {
        auto at = prompt.begin();
        for (const ImagePtr& image : images) {
            at = std::find(at, prompt.end(), token);
            at = std::copy(image->keys.begin(), image->keys.end(), at);
        }
        return prompt;
    }
};

/// Of all values together, by their squares.
inline double relative(std::span<const float> got, std::span<const float> expected) {
    REQUIRE(got.size() == expected.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        difference += std::pow(double{got[i]} - double{expected[i]}, 2);
        norm += std::pow(double{expected[i]}, 2);
    }
    return std::sqrt(difference / norm);
}

/// What the tower makes of the images, all of them together.
inline std::vector<float> features(const Seeing& l, const std::vector<ImagePtr>& images) {
    int64_t patches = 0;
    for (const ImagePtr& image : images) patches += static_cast<int64_t>(image->place.size()) / 4;
    VisionGraph v = l.model->build_vision({.patches = patches, .images = static_cast<int64_t>(images.size())},
                                          l.backend->activation_dtype());
    const Tensor *pixels = v.patches, *place = v.place, *start = v.start, *out = v.features;
    Plan plan(std::move(v.graph), *l.backend);
    auto* to_pixels = plan.input<uint8_t>(pixels);
    auto *to_place = plan.input<int32_t>(place), *to_start = plan.input<int32_t>(start);
    *to_start = 0;
    for (const ImagePtr& image : images) {
        to_pixels = std::copy(image->patches.begin(), image->patches.end(), to_pixels);
        to_place = std::copy(image->place.begin(), image->place.end(), to_place);
        to_start[1] = to_start[0] + static_cast<int32_t>(image->place.size() / 4);
        ++to_start;
    }
    plan.run();
    std::vector<float> rows(static_cast<size_t>(out->elements()));
    l.backend->download(rows.data(), out->data, out->bytes());
    return rows;
}

}  // namespace quern::test
