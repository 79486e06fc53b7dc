// Placing weights: host segments -> packed device memory.
#pragma once

#include <functional>

#include "ggml-like/backend.h"
#include "ggml-like/cuda/pack/packed.h"
#include "ggml-like/cuda/pack/upload.h"

namespace quern::cuda::pack {

/// Zeroed device memory that lives as long as the backend: bytes, what for.
using Allocate = std::function<void*(int64_t, const char*)>;

/// Null data in every segment: a synthetic weight, filled at random on the device.
Packed place_weight(const Weight& weight, RowOrder order, Uploader& uploader, const Allocate& allocate);
PackedExperts place_experts(const ExpertWeights& experts, RowOrder order, Uploader& uploader,
                            const Allocate& allocate);

}  // namespace quern::cuda::pack
