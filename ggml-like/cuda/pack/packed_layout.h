// How much device memory packed weights take (packed.h). Plain C++: memory is planned in builds without CUDA, too, and
// place.cpp cuts weights by the same rules.
#pragma once

#include <vector>

#include "ggml-like/backend.h"
#include "ggml-like/cuda/pack/packed.h"

namespace quern::cuda::pack {

/// Blocks of device memory begin at multiples of it, in bytes.
inline constexpr int64_t kWeightAlignment = 256;

/// What a segment becomes. Throws Error(model) for dtypes without kernels.
Kind kind_of(const WeightSegment& segment);

/// Segments [first, end) of a weight that share tiles.
struct PartLayout {
    Kind kind;
    size_t first, end;
    int64_t rows;   // without padding
    int64_t tiles;  // of 16 rows; in paired order of 8 rows of gate and 8 of up
    bool chunk_scales;
};

/// A weight's parts; in paired order one, of two segments. Throws Error(model) if the two differ in format or height,
/// or if a stacked weight has more runs of formats than Packed has parts.
std::vector<PartLayout> part_layouts(const Weight& weight, RowOrder order);
/// Tiles of one expert.
int64_t expert_tiles(const ExpertWeights& experts, RowOrder order);

/// Chunks of a row, bytes of packed codes, bytes of factors.
int chunks_for(int64_t columns);
int64_t data_bytes(int64_t tiles, int64_t chunks, Kind kind);
int64_t factor_bytes(int64_t tiles);

/// Data and factors of all parts, each rounded up to kWeightAlignment.
int64_t packed_bytes(const Weight& weight, RowOrder order);
int64_t packed_bytes(const ExpertWeights& experts, RowOrder order);

}  // namespace quern::cuda::pack
