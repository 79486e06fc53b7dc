#include "models/image.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"

namespace quern {
namespace {

constexpr double kMaxAspect = 200;

double cubic(double x) {
    x = std::abs(x);
    if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
    return x < 2 ? -0.5 * (((x - 5) * x + 8) * x - 4) : 0;
}

/// What an output reads: `count` inputs from `first` on.
struct Taps {
    int64_t first = 0, count = 0;
};

/// The weights of all outputs of an axis, `width` of each, in fixed point.
struct AxisWeights {
    std::vector<Taps> taps;
    std::vector<int16_t> weights;
    int64_t width = 0;
    int bits = 0;
};

/// The most bits after the point with which the largest weight still fits 16 bits.
int fixed_point_bits(double largest) {
    int bits = 0;
    while (bits < 22 &&
           static_cast<int64_t>(0.5 + largest * static_cast<double>(int64_t{1} << (bits + 1))) < 32768)
        ++bits;
    return bits;
}

AxisWeights axis_weights(int64_t in, int64_t out) {
    const double scale = static_cast<double>(in) / static_cast<double>(out), stretch = std::max(scale, 1.0),
                 shrink = 1 / stretch, support = 2 * stretch;
    AxisWeights axis;
    axis.width = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
    std::vector<double> all(static_cast<size_t>(out * axis.width), 0.0);
    double largest = 0;
    for (int64_t i = 0; i < out; ++i) {
        const double center = (static_cast<double>(i) + 0.5) * scale;
        const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
        const int64_t end = std::min(in, static_cast<int64_t>(center + support + 0.5));
        double* w = all.data() + i * axis.width;
        double sum = 0;
        for (int64_t j = first; j < end; ++j)
            sum += w[j - first] = cubic((static_cast<double>(j) - center + 0.5) * shrink);
        for (int64_t j = 0; j < end - first; ++j) largest = std::max(largest, w[j] /= sum);
        axis.taps.push_back({first, end - first});
    }
    axis.bits = fixed_point_bits(largest);
    for (const double w : all)
        axis.weights.push_back(
            static_cast<int16_t>(std::lround(w * static_cast<double>(int64_t{1} << axis.bits))));
    return axis;
}

uint8_t rounded(int64_t sum, int bits) {
    return static_cast<uint8_t>(std::clamp<int64_t>(sum >> bits, 0, 255));
}

int64_t half(int bits) { return bits > 0 ? int64_t{1} << (bits - 1) : 0; }

Image resize_columns(const Image& in, int64_t width) {
    const AxisWeights axis = axis_weights(in.width, width);
    Image out{width, in.height, std::vector<uint8_t>(static_cast<size_t>(3 * width * in.height))};
    for (int64_t y = 0; y < in.height; ++y) {
        const uint8_t* row = in.rgb.data() + 3 * y * in.width;
        uint8_t* to = out.rgb.data() + 3 * y * width;
        for (int64_t x = 0; x < width; ++x, to += 3) {
            const Taps taps = axis.taps[static_cast<size_t>(x)];
            const int16_t* w = axis.weights.data() + x * axis.width;
            const uint8_t* from = row + 3 * taps.first;
            int32_t sum[3];
            std::fill_n(sum, 3, static_cast<int32_t>(half(axis.bits)));
            for (int64_t j = 0; j < taps.count; ++j, from += 3)
                for (int c = 0; c < 3; ++c) sum[c] += w[j] * from[c];
            for (int c = 0; c < 3; ++c) to[c] = rounded(sum[c], axis.bits);
        }
    }
    return out;
}

Image resize_rows(const Image& in, int64_t height) {
    const AxisWeights axis = axis_weights(in.height, height);
    const int64_t row_bytes = 3 * in.width;
    Image out{in.width, height, std::vector<uint8_t>(static_cast<size_t>(row_bytes * height))};
    std::vector<int32_t> sums(static_cast<size_t>(row_bytes));
    for (int64_t y = 0; y < height; ++y) {
        const Taps taps = axis.taps[static_cast<size_t>(y)];
        std::fill(sums.begin(), sums.end(), static_cast<int32_t>(half(axis.bits)));
        for (int64_t j = 0; j < taps.count; ++j) {
            const int32_t w = axis.weights[static_cast<size_t>(y * axis.width + j)];
            const uint8_t* from = in.rgb.data() + (taps.first + j) * row_bytes;
            for (int64_t i = 0; i < row_bytes; ++i) sums[static_cast<size_t>(i)] += w * from[i];
        }
        uint8_t* to = out.rgb.data() + y * row_bytes;
        for (int64_t i = 0; i < row_bytes; ++i) to[i] = rounded(sums[static_cast<size_t>(i)], axis.bits);
    }
    return out;
}

int64_t near_multiple(int64_t side, int64_t step) {
    return static_cast<int64_t>(std::nearbyint(static_cast<double>(side) / static_cast<double>(step))) * step;
}

/// Of images, and of all frames of a video: `frames` as they are, `rounded_frames` a multiple of what a patch has.
ImageSize scaled(ImageSize image, int64_t step, double frames, double rounded_frames,
                 const ImageSizes& sizes) {
    const auto h = static_cast<double>(image.height), w = static_cast<double>(image.width),
               s = static_cast<double>(step);
    int64_t height = near_multiple(image.height, step), width = near_multiple(image.width, step);
    const double pixels = rounded_frames * static_cast<double>(height * width);
    if (pixels > static_cast<double>(sizes.most)) {
        const double by = std::sqrt(frames * h * w / static_cast<double>(sizes.most));
        height = std::max(step, static_cast<int64_t>(std::floor(h / by / s)) * step);
        width = std::max(step, static_cast<int64_t>(std::floor(w / by / s)) * step);
    } else if (pixels < static_cast<double>(sizes.fewest)) {
        const double by = std::sqrt(static_cast<double>(sizes.fewest) / (frames * h * w));
        height = static_cast<int64_t>(std::ceil(h * by / s)) * step;
        width = static_cast<int64_t>(std::ceil(w * by / s)) * step;
    }
    return {width, height};
}

void check_sides(ImageSize image) {
    if (image.width < 1 || image.height < 1)
        FAIL(usage, "the image has {} x {} pixels; expected at least one", image.width, image.height);
    const auto h = static_cast<double>(image.height), w = static_cast<double>(image.width);
    if (std::max(h, w) / std::min(h, w) > kMaxAspect)
        FAIL(usage, "the image has {} x {} pixels; one side may be {} times as long as the other at most",
             image.width, image.height, kMaxAspect);
}

}  // namespace

ImageSize size_to_read(ImageSize image, int64_t step, const ImageSizes& sizes) {
    check_sides(image);
    return scaled(image, step, 1, 1, sizes);
}

ImageSize frame_size_to_read(int64_t frames, ImageSize frame, int64_t step, int64_t step_frames,
                             const VideoSizes& sizes, int64_t frame_most) {
    constexpr int64_t kFrameTokens = 768;
    CHECK(frames >= 1 && step_frames >= 1, "[image] {} frames, {} in a patch", frames, step_frames);
    check_sides(frame);
    const auto h = static_cast<double>(frame.height), w = static_cast<double>(frame.width);
    if (std::min(frame.height, frame.width) < step) {
        const double by = static_cast<double>(step) / std::min(h, w);
        frame = {static_cast<int64_t>(w * by), static_cast<int64_t>(h * by)};
    }
    frames = std::max(frames, step_frames);
    const int64_t least = static_cast<int64_t>(static_cast<double>(sizes.fewest) * 1.05);
    const int64_t each = std::max(std::min(kFrameTokens * step * step, sizes.most / frames), least);
    const auto count = static_cast<double>(frames);
    const double rounded =
        std::nearbyint(count / static_cast<double>(step_frames)) * static_cast<double>(step_frames);
    const int64_t most = std::min({sizes.most, frames * each, frames * frame_most});
    return scaled(frame, step, count, rounded, {std::min(sizes.fewest, most), most});
}

Image resize(Image image, ImageSize to) {
    if (to.width != image.width) image = resize_columns(image, to.width);
    if (to.height != image.height) image = resize_rows(image, to.height);
    return image;
}

}  // namespace quern
