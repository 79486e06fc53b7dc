// Sizes of attention among patches by products of warpgroups. Plain C++, since choices among kernels are tested in builds without
// CUDA, too.
#pragma once

namespace quern::cuda::attention {

inline constexpr int kGridWidth = 72;               // elements of a head; others take the tiles
inline constexpr int kGridPieces = kGridWidth / 8;  // of 16 bytes
inline constexpr int kGridDepth = 80;               // elements that products of scores go over
inline constexpr int kGridGroups = 3;               // warpgroups of a block
inline constexpr int kGridQueries = 64;             // of a warpgroup
inline constexpr int kGridKeys = 128;               // of a step
inline constexpr int kGridSlots = 8;                // places in the ring

inline constexpr int kGridQueryBytes = kGridQueries * kGridDepth * 2;
inline constexpr int kGridSlotBytes = kGridKeys * kGridDepth * 2;
/// Shared memory of a block: up to a multiple of 128, queries, the ring.
inline constexpr int kGridShared = 128 + kGridGroups * kGridQueryBytes + kGridSlots * kGridSlotBytes;

}  // namespace quern::cuda::attention
