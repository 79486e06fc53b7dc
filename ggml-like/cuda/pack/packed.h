// Packed weights: how matrices lie in device memory, for host code that packs and for kernels that read.
//
// A matrix [rows, cols] is cut into tiles of 16 rows and chunks of 64 columns, both padded with zeros. The chunks of a
// tile follow each other; so do the tiles:
//
//     tile 0: | chunk 0 | chunk 1 | ... | chunk n - 1 |   tile 1: | chunk 0 | ...
//
// A chunk holds four blocks of 16 columns in the register order of the A operand of mma.m16n8k16: lane l = 4g + t of a
// warp owns a0 = (row g, columns 2t, 2t + 1), a1 = (row g + 8, the same), a2 = (row g, columns 2t + 8, 2t + 9), a3 =
// (row g + 8, the same).
//
//   bf16    2048 bytes   block kk at 512 kk; lane l at 16 l: a0 a1 a2 a3
//
//   fp8     1040 bytes   blocks 2h and 2h + 1 at 512 h; lane l at 16 l: 8 bytes for each block, two words of 4 codes.
//                        Word w has the codes of registers a_w and a_(w+2): {lo(a_w), lo(a_(w+2)), hi(a_w),
//                        hi(a_(w+2))} at 1024: two F32 scales, of rows 0..7 and of rows 8..15 of the chunk; 8 bytes of
//                        padding
//
//   nvfp4    576 bytes   lane l at 16 l: word 2j + r has row g + 8r of blocks 2j and 2j + 1. Each half of a word has
//                        four codes (s e e m), the low half those of columns 2t and 2t + 8, the high one of 2t + 1 and
//                        2t + 9:
//
//                          bit            15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
//                          block 2j,     2t      s  .  .  .  .  .  .  e  e  m  .  .  .  .  .  .     where BF16 has them
//                          block 2j,     2t + 8  .  e  m  .  s  e  .  .  .  .  .  .  .  .  .  .
//                          block 2j + 1, 2t      .  .  .  s  .  .  .  .  .  .  e  e  m  .  .  .
//                          block 2j + 1, 2t + 8  .  .  .  .  .  .  s  .  .  .  .  .  .  e  e  m
//
//                        at 512: E4M3 block scales, 8 bytes at 8 g: row g blocks 0..3, row g + 8 blocks 0..3. Where
//                        a scale is zero, so are the block's codes
//
// Paired order (gate and up): a tile has 8 rows of gate (rows 0..7) and the same 8 rows of up (rows 8..15).
//
// Value of an element: code value * chunk or block scale * factor[tile * 16 + row]. Factors are F32, one a padded row.
// They also make up for the decoding (decode.cuh), whose BF16 numbers are too small by 2^126 (nvfp4) or 2^120 (fp8).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define QUERN_BOTH __host__ __device__
#else
#define QUERN_BOTH
#endif

namespace quern::cuda::pack {

enum class Kind : int { bf16, fp8, nvfp4 };

inline constexpr int kTileRows = 16;
inline constexpr int kChunkCols = 64;

QUERN_BOTH constexpr int chunk_bytes(Kind kind) {
    return kind == Kind::bf16 ? 2048 : kind == Kind::fp8 ? 1040 : 576;
}

/// Rows of one format; a stacked weight has a part for each run of segments of the same kind.
struct Part {
    const uint8_t* data;  // tiles * chunks * chunk_bytes
    const float* factor;  // [tiles * 16]
    Kind kind;
    int rows;       // without padding; in paired order: of gate and up together
    int row_begin;  // first row of the part in y
    int tiles;
    bool chunk_scales;  // FP8: whether chunks have scales of their own; else all are 1
};
/// Bytes of a part's tiles.
inline int64_t weight_bytes(const Part& part, int chunks) {
    return int64_t{part.tiles} * chunks * chunk_bytes(part.kind);
}

/// An nvfp4 code at its place in half a word. odd: of block 2j (0) or 2j + 1 (1); upper_columns: 2t (0) or 2t + 8 (1).
QUERN_BOTH constexpr uint32_t nvfp4_place(uint32_t code, int odd, int upper_columns) {
    if (odd == 0 && upper_columns == 1) return (code & 12) << 8 | (code & 3) << 13;
    const int shift = odd == 0 ? 0 : upper_columns == 0 ? 3 : 6;
    return ((code & 8) << 12 | (code & 7) << 6) >> shift;
}
/// The way back.
QUERN_BOTH constexpr uint32_t nvfp4_code(uint32_t half, int odd, int upper_columns) {
    if (odd == 0 && upper_columns == 1) return (half >> 8 & 12) | (half >> 13 & 3);
    half <<= odd == 0 ? 0 : upper_columns == 0 ? 3 : 6;
    return (half >> 12 & 8) | (half >> 6 & 7);
}

inline constexpr int kMaxParts = 4;

/// A matrix: its parts in the order of its rows.
struct Packed {
    Part part[kMaxParts];
    int parts;
    int rows;
    int cols;
    int chunks;  // ceil(cols / 64)
};

/// The matrices of all experts, of one format and shape.
struct PackedExperts {
    const uint8_t* data;  // expert e at e * expert_bytes
    const float* factor;  // expert e at e * tiles * 16
    int64_t expert_bytes;
    Kind kind;
    int count;
    int rows;  // of one expert; in paired order 2F
    int cols;
    int tiles;  // of one expert
    int chunks;
};

}  // namespace quern::cuda::pack
