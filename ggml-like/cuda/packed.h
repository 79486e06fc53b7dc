// Packed weights: how matrices lie in device memory, for host code that packs and kernels that read.
//
// A matrix [rows, cols] is cut into tiles of 16 rows and chunks of 64 columns, both padded with zeros. Chunks of one
// tile follow each other; tiles follow each other. A chunk holds four k16 blocks in the register order of the A operand
// of mma.m16n8k16: lane l = 4g + t of a warp owns a0 = (row g, k 2t..2t+1), a1 = (row g+8, same k), a2 = (row g,
// k 2t+8..2t+9), a3 = (row g+8, same).
//   bf16   2048 B: block kk at 512 kk, lane l its 16 bytes a0 a1 a2 a3 at 16 l.
//   fp8    1040 B: half h (blocks 2h, 2h+1) at 512 h, lane l at 16 l: for each block 8 bytes; word w of a block holds
//          the codes of a pair of registers as bytes {lo(a_w), lo(a_w+2), hi(a_w), hi(a_w+2)}, w = 0, 1. Then at 1024
//          two F32 scales, of rows 0..7 and of rows 8..15 of the chunk, and 8 bytes of padding.
//   nvfp4   576 B: lane l at 16 l; word 2j + r has row g + 8r of blocks 2j (low nibbles) and 2j+1 (high nibbles): bytes
//          are columns 2t, 2t+8, 2t+1, 2t+9. So one shift brings a register's two codes to bits 12..15 and 28..31 for
//          BF16, and four codes are one shift from four E4M3 bytes. Then at 512, E4M3 block scales: 8 bytes at 8 g, row g
//          blocks 0..3, row g+8 blocks 0..3.
// paired order (gate and up): a tile holds 8 rows of gate (rows 0..7) and the same 8 rows of up (rows 8..15).
//
// Value of an element: code value * chunk or block scale * factor[tile * 16 + row]. Factors are F32, one a padded row.
// Kernels decode codes by bits into BF16 that are too small by 2^126 (nvfp4) or 2^120 (fp8); see decode.cuh.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define QUERN_BOTH __host__ __device__
#else
#define QUERN_BOTH
#endif

namespace quern::cuda {

enum class Kind : int { bf16, fp8, nvfp4 };

inline constexpr int kTileRows = 16;
inline constexpr int kChunkCols = 64;

QUERN_BOTH constexpr int chunk_bytes(Kind kind) { return kind == Kind::bf16 ? 2048 : kind == Kind::fp8 ? 1040 : 576; }

/// Rows of one format; a stacked weight has one part for each run of segments with the same kind.
struct Part {
    const uint8_t* data;   // tiles * chunks * chunk_bytes
    const float* factor;   // [tiles * 16]
    Kind kind;
    int rows;              // without padding; in paired order: of gate and up together
    int row_begin;         // first row of the part in y
    int tiles;
};

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
    int rows;   // of one expert; in paired order 2F
    int cols;
    int tiles;  // of one expert
    int chunks;
};

}  // namespace quern::cuda
