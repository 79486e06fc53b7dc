// Packed weights: how matrices lie in device memory, for host code that packs and kernels that read.
//
// A matrix [rows, cols] is cut into tiles of 16 rows and chunks of 64 columns, both padded with zeros. Chunks
// of one tile follow each other; tiles follow each other. A chunk holds four k16 blocks in the register order
// of the A operand of mma.m16n8k16: lane l = 4g + t of a warp owns a0 = (row g, k 2t..2t+1), a1 = (row g+8,
// same k), a2 = (row g, k 2t+8..2t+9), a3 = (row g+8, same).
//   bf16   2048 B: block kk at 512 kk, lane l its 16 bytes a0 a1 a2 a3 at 16 l.
//   fp8    1040 B: half h (blocks 2h, 2h+1) at 512 h, lane l at 16 l: for each block 8 bytes; word w of a
//   block holds
//          the codes of a pair of registers as bytes {lo(a_w), lo(a_w+2), hi(a_w), hi(a_w+2)}, w = 0, 1. Then
//          at 1024 two F32 scales, of rows 0..7 and of rows 8..15 of the chunk, and 8 bytes of padding.
//   nvfp4   576 B: lane l at 16 l; word 2j + r has row g + 8r of blocks 2j and 2j + 1. Each half word holds
//   four codes s e e
//          m, the low one those of columns 2t and 2t+8, the high one of 2t+1 and 2t+9: block 2j, columns 2t:
//          s at bit 15, e e m at 8..6, which is where BF16 has them; 2t+8: s at 11, e e m at 10, 14, 13;
//          block 2j+1, columns 2t: s at 12, e e m at 5..3; 2t+8: s at 9, e e m at 2..0. Then at 512, E4M3
//          block scales: 8 bytes at 8 g, row g blocks 0..3, row g+8 blocks 0..3.
// paired order (gate and up): a tile holds 8 rows of gate (rows 0..7) and the same 8 rows of up (rows 8..15).
//
// Value of an element: code value * chunk or block scale * factor[tile * 16 + row]. Factors are F32, one a
// padded row. Kernels decode codes by bits into BF16 that are too small by 2^126 (nvfp4) or 2^120 (fp8); see
// decode.cuh.
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

/// Rows of one format; a stacked weight has one part for each run of segments with the same kind.
struct Part {
    const uint8_t* data;  // tiles * chunks * chunk_bytes
    const float* factor;  // [tiles * 16]
    Kind kind;
    int rows;       // without padding; in paired order: of gate and up together
    int row_begin;  // first row of the part in y
    int tiles;
};

/// An nvfp4 code at its place in a half word: of the even or odd block of a pair, columns 2t.. (0) or 2t+8..
/// (1).
QUERN_BOTH constexpr uint32_t nvfp4_place(uint32_t code, int odd, int upper_columns) {
    if (odd == 0 && upper_columns == 1) return (code & 12) << 8 | (code & 3) << 13;
    const int shift = odd == 0 ? 0 : upper_columns == 0 ? 3 : 6;
    return ((code & 8) << 12 | (code & 7) << 6) >> shift;
}
QUERN_BOTH constexpr uint32_t nvfp4_code(uint32_t half, int odd, int upper_columns) {
    if (odd == 0 && upper_columns == 1) return (half >> 8 & 12) | (half >> 13 & 3);
    half <<= odd == 0 ? 0 : upper_columns == 0 ? 3 : 6;
    return (half >> 12 & 8) | (half >> 6 & 7);
}

inline constexpr int kMaxParts = 4;

struct Packed {
    Part part[kMaxParts];
    int parts;
    int rows;
    int cols;
    int chunks;  // ceil(cols / 64)
};

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
