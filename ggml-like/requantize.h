// Requantizing at load: what a checkpoint stores in 16 or 32 bits becomes FP8 or NVFP4.
//
// fp8: E4M3 with one FP32 scale a row (the row's largest magnitude / 448). nvfp4: block scales by ScaleChoice, one
// global scale a segment. Bytes do not depend on the number of threads; quantize.h
// has the rounding.
#pragma once

#include <cstddef>
#include <memory>

#include "ggml-like/quantize.h"
#include "ggml-like/weight.h"

namespace quern {

enum class DenseFormat : uint8_t { as_stored, fp8, nvfp4 };
/// "as stored", "fp8", "nvfp4"
const char* dense_format_name(DenseFormat format);

/// What `w` becomes, without data: segments of 16 or 32 bits in `format`, all others as they are. A segment whose
/// columns are no multiple of 16 cannot be NVFP4 and stays, too.
Weight requantized_form(const Weight& w, DenseFormat format);
/// Whether requantized_form changes at least half of the bytes. A smaller part in 16 bits, beside quantized matrices,
/// was left so on purpose.
bool can_requantize(const Weight& w, DenseFormat format);

/// Fills the data of `to`, made by requantized_form(from), and returns the memory that it points into. Throws
/// Error(model) if a value is NaN or infinite. ScaleChoice::amax takes a third of the time of mse.
std::unique_ptr<std::byte[]> requantize(const Weight& from, Weight& to, int threads,
                                        ScaleChoice choice = ScaleChoice::mse);
/// The same for a rank's part of a matrix, with the values and scales of the whole one requantized. `from`: slices of the
/// segments of `whole` (slice_rows, slice_columns), in whose memory they are still.
std::unique_ptr<std::byte[]> requantize_part(const Weight& from, const Weight& whole, Weight& to, int threads,
                                             ScaleChoice choice = ScaleChoice::mse);

}  // namespace quern
