// What the bytes of one stored matrix say about its quantization.
#pragma once

#include <array>
#include <cstdint>

#include "ggml-like/weight.h"

namespace quern {

struct SegmentStats {
    // NVFP4: blocks of 16 values
    int64_t blocks = 0;
    int64_t zero_scales = 0;
    int64_t erased = 0;      // of these, with codes that are not zero
    int64_t saturated = 0;   // at 448
    int64_t subnormal = 0;   // below 2^-6: fewer than four significant bits
    int64_t bad_scales = 0;  // NaN or negative
    int64_t outliers = 0;    // more than 16 times the median
    int64_t unfilled = 0;    // a normal scale, but no code as large as 4: no quantizer makes such a block
    float median_scale = 0, largest_scale = 0;
    std::array<int64_t, 16> codes{};

    int64_t values = 0;
    int64_t zeros = 0;        // values whose code is zero
    int64_t bad_values = 0;   // NaN or Inf: FP8 and plain
    float largest_value = 0;  // magnitude; FP8: before scaling
    uint64_t hash = 0;        // of codes and scales; NVFP4 and FP8

    /// Nothing but zeros.
    bool dead() const { return values > 0 && zeros == values; }
    /// Distance of the codes' frequencies from those of normally distributed values, 0 to 1.
    double code_distance() const;
    /// By how much one sign outnumbers the other among the non-zero codes, 0 to 1.
    double sign_bias() const;
};

/// Reads all of `s`, which needs data, and block scales if it is NVFP4.
SegmentStats measure_segment(const WeightSegment& s);

}  // namespace quern
