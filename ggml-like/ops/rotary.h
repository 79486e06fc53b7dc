// Rotary position embedding: the pair (i, i + R/2) of a head, i < R/2, turns by position * frequency[i]; cos and sin are
// multiplied by `scale`; dimensions from R on pass through. FP32, the angle in FP64.
// Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN), with the formulas of HF transformers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace quern {

struct Rotary {
    std::vector<double> frequency;  // [R/2] radians a position
    double scale = 1;

    int dims() const { return static_cast<int>(2 * frequency.size()); }
};

/// frequency[i] = theta^(-2i/dims).
Rotary plain_rotary(double theta, int dims);

/// YaRN: high frequencies as they are, low ones divided by `factor`, a straight line between the dimensions that turn
/// `beta_fast` and `beta_slow` times in `original` positions. `attention`: the scale; 0: 0.1 ln(factor) + 1.
struct Yarn {
    double factor = 1, beta_fast = 32, beta_slow = 1, attention = 0;
    int64_t original = 0;
};
Rotary yarn_rotary(double theta, int dims, const Yarn& yarn);

namespace cpu {

/// Norm and rotation of heads at one position.
class HeadRotation {
  public:
    HeadRotation(const Rotary& rotary, int32_t position);
    /// row = row / sqrt(mean(row^2) + eps) * norm, then rotated; in place.
    void apply(const float* norm, float eps, std::span<float> row) const;

  private:
    std::vector<float> cosine_, sine_;
};

}  // namespace cpu
}  // namespace quern
