// Copies of many small pieces between a device's memory and pinned memory of the host, in few launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace quern::cuda::pack {

/// Both addresses, which the device can reach, and the size are multiples of kPieceAlignment.
struct Piece {
    std::byte* to;
    const std::byte* from;
    int64_t bytes;
};
inline constexpr int64_t kPieceAlignment = 16;
inline constexpr int kPieces = 160;  // of a launch: they are its arguments, of which there may be 4 KB

struct PieceList {
    Piece piece[kPieces];
    int count;
};

/// In the stream's order; `blocks`: thread blocks at most. Throws Error(device).
void copy_pieces(cudaStream_t stream, const PieceList& list, int blocks);

}  // namespace quern::cuda::pack
