#include "ggml-like/ops/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ggml-like/ops/row_math.h"

namespace quern {

Rotary plain_rotary(double theta, int dims) {
    Rotary r;
    for (int i = 0; i < dims / 2; ++i) r.frequency.push_back(std::pow(theta, -2.0 * i / dims));
    return r;
}

Rotary yarn_rotary(double theta, int dims, const Yarn& yarn) {
    Rotary r = plain_rotary(theta, dims);
    // The dimension whose pair turns so many times in the original context.
    const auto dimension = [&](double turns) {
        const double positions = static_cast<double>(yarn.original) / (turns * 2 * std::numbers::pi);
        return dims * std::log(positions) / (2 * std::log(theta));
    };
    const double low = std::max(std::floor(dimension(yarn.beta_fast)), 0.0),
                 high = std::min(std::ceil(dimension(yarn.beta_slow)), dims - 1.0);
    const double width = std::max(high - low, 0.001);
    for (size_t i = 0; i < r.frequency.size(); ++i) {
        const double slow = std::clamp((static_cast<double>(i) - low) / width, 0.0, 1.0);
        r.frequency[i] *= slow / yarn.factor + (1 - slow);
    }
    r.scale = yarn.attention > 0 ? yarn.attention : 0.1 * std::log(yarn.factor) + 1;
    return r;
}

namespace cpu {

HeadRotation::HeadRotation(const Rotary& rotary, int32_t position) {
    for (const double frequency : rotary.frequency) {
        cosine_.push_back(static_cast<float>(std::cos(position * frequency) * rotary.scale));
        sine_.push_back(static_cast<float>(std::sin(position * frequency) * rotary.scale));
    }
}

void HeadRotation::apply(const float* norm, float eps, std::span<float> row) const {
    const float r = inverse_rms(row.data(), static_cast<int64_t>(row.size()), eps);
    for (size_t i = 0; i < row.size(); ++i) row[i] *= r * norm[i];
    const size_t half = cosine_.size();
    for (size_t i = 0; i < half; ++i) {
        const float a = row[i], b = row[i + half];
        row[i] = a * cosine_[i] - b * sine_[i];
        row[i + half] = b * cosine_[i] + a * sine_[i];
    }
}

}  // namespace cpu
}  // namespace quern
