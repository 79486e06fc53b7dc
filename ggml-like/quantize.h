// Quantizers: from float rows to NVFP4 and FP8 (E4M3). Pure functions of one row, so a matrix gets the same bytes
// from any number of threads. Nothing is allocated; every product is rounded as written, on every processor.
//
// NVFP4 (nvfp4.h): 16 values share an E4M3 scale, the matrix an FP32 one. With `ScaleChoice::amax` the bytes
// are those of compressed-tensors (GlobalForm::divisor) and NVIDIA ModelOpt (GlobalForm::multiplier):
//   G = 2688 / amax(W)      block = e4m3(G * (amax(block) / 6))         code = e2m1(w / (block / G))
//   s = amax(W) / 2688      block = e4m3(amax(block) / (6 * s))         code = e2m1(w / (block * s))
// A block of zeros gets a block scale of 0.125 (divisor) or 1 (multiplier), a matrix of zeros a global scale of 1.
// Rounding is to nearest, ties to even, saturating (448 and 6). Values must be finite.
#pragma once

#include <cstdint>
#include <span>

namespace quern {

/// How a checkpoint stores the global scale of an NVFP4 matrix.
enum class GlobalForm : uint8_t {
    divisor,     // compressed-tensors: 2688 / amax
    multiplier,  // ModelOpt: amax / 2688
};

enum class ScaleChoice : uint8_t {
    amax,  // the largest value of a block becomes code 6
    mse,   // the block scale with the least squared error
};

/// Largest magnitude; NaN or infinite if any value is.
float largest_magnitude(std::span<const float> values);

struct Nvfp4Global {
    float stored = 1;  // as the checkpoint has it
    GlobalForm form = GlobalForm::multiplier;

    /// For a matrix, or matrices that share it, whose largest magnitude is `amax` (finite, not negative).
    static Nvfp4Global of(float amax, GlobalForm form);
};

/// values: a multiple of 16; codes: values.size() / 2 bytes, element 2j in the low nibble of byte j; scales:
/// values.size() / 16 E4M3 bytes. ScaleChoice::mse tries all scales from 0.5 to 1.6 times the one that
/// ScaleChoice::amax takes, from that one upwards, then downwards, and takes the first one with the least squared
/// error (FP32, sums in a fixed order).
void encode_nvfp4(std::span<const float> values, const Nvfp4Global& global, ScaleChoice choice,
                  uint8_t* codes, uint8_t* scales);

/// The FP8 scale (multiplier) for a largest magnitude: amax / 448; 1 for zeros.
float fp8_scale(float amax);
/// out[i] = e4m3(values[i] / scale).
void encode_fp8(std::span<const float> values, float scale, uint8_t* out);

}  // namespace quern
