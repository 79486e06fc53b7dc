// Lists of copies between a device and the host: large ones by the copy engines, many small ones by a kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/cuda/pack/copy_pieces.h"

namespace quern::cuda::pack {

/// A list in two: what a kernel copies, and what the copy engines do. Each byte is in one of them.
struct SplitCopies {
    std::vector<Piece> pieces;
    std::vector<BlockCopy> copies;
};
SplitCopies split_copies(std::span<const BlockCopy> list);

/// All copies of the list, in the stream's order. `pinned`: the device reaches all memory of the host that is in it. Throws
/// Error(device).
void copy_blocks(std::span<const BlockCopy> list, cudaMemcpyKind kind, cudaStream_t stream, bool pinned);

}  // namespace quern::cuda::pack
