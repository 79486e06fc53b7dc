// Placing weights: segments in host memory become packed weights in device memory.
#pragma once

#include <functional>

#include "ggml-like/backend.h"
#include "ggml-like/cuda/pack/packed.h"
#include "ggml-like/cuda/pack/upload.h"

namespace quern::cuda::pack {

/// Gives zeroed device memory that lives as long as the backend; arguments: bytes, and what for (in errors).
using Allocate = std::function<void*(int64_t, const char*)>;

/// Packs a weight of any stored format. Rows may still be on their way until uploader.finish(). A weight whose segments
/// have null data is synthetic: filled at random on the device. Throws Error(model) for formats without kernels, and
/// for experts that are not all stored alike.
Packed place_weight(const Weight& weight, RowOrder order, Uploader& uploader, const Allocate& allocate);
/// The first rows of a weight, a multiple of 16, in its memory.
Packed first_rows(const Packed& weight, int rows);
PackedExperts place_experts(const ExpertWeights& experts, RowOrder order, Uploader& uploader,
                            const Allocate& allocate);

}  // namespace quern::cuda::pack
