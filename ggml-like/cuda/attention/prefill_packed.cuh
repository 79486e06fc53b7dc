// Attention of prompt rows over packed caches, without products of warpgroups: 32 keys and values on their way to the BF16
// stages that prefill.cu reads.
//
//   stages    0 and 1 (prefill_tiles.cuh) take turns
//   staging   in place of stage 2: codes of two steps, and behind them scales of three: rows' scales, then those of 16
//
// A thread copies the 16-byte pieces of codes that it expands itself; scales are for all. At step j the codes of step j + 1 are
// expanded and their places take those of step j + 3.
#pragma once

#include "ggml-like/cuda/attention/packed.cuh"
#include "ggml-like/cuda/attention/prefill_tiles.cuh"

namespace quern::cuda::attention::prefill {

using namespace ptx;
using kv::Packing;

constexpr int kPackedStages = 2;
constexpr int kStagedCodes = 2 * kKeys * kDim, kStagedScales = 2 * kKeys * (kDim / kv::kBlock + 4);
constexpr int kPackedSharedBytes = 2 * kStageBytes + 2 * kStagedCodes + 1024;
static_assert(kPackedSharedBytes <= 99 * 1024);
// Codes of 4 bits leave half of their places to the scales.
static_assert(3 * kStagedScales <= kStagedCodes && 3 * 2 * kKeys * 4 <= 1024);

/// K or V of a step.
struct Side {
    Packing packing;
    packed::Block block;
    const char* cache;
    int tile_bytes;  // where its BF16 begin in a stage

    __device__ __forceinline__ Side(const AttentionCall& c, bool values)
        : packing(values ? c.v_packing : c.k_packing),
          block(values ? c.v_layout : c.k_layout),
          cache(reinterpret_cast<const char*>(values ? c.v_cache : c.k_cache)),
          tile_bytes(values ? kTileBytes : 0) {}
    __device__ __forceinline__ int pieces() const { return kKeys * block.codes / 16; }
};

/// The steps of a block's tile.
struct Staging {
    const AttentionCall& c;
    const Tile& tile;
    int keys, end;
    char* shared;
    Side k, v;
    int page;  // of the step that starts next

    __device__ __forceinline__ Staging(const AttentionCall& call, const Tile& of, int all_keys, int begin,
                                       int steps, char* memory)
        : c(call), tile(of), keys(all_keys), end(steps), shared(memory), k(call, false), v(call, true) {
        page = page_of(begin);
    }
    __device__ __forceinline__ int page_of(int step) const {
        return c.pages[tile.sequence * c.page_row + min(step, end - 1) * kKeys / kKeysPerPage];
    }

    __device__ __forceinline__ int code_bytes() const { return kKeys * (k.block.codes + v.block.codes); }
    __device__ __forceinline__ char* codes(int step) const {
        return shared + 2 * kStageBytes + step % 2 * code_bytes();
    }
    __device__ __forceinline__ char* scales(int step) const {
        const int each = kKeys * (8 + k.block.blocks + v.block.blocks);
        return shared + 2 * kStageBytes + 2 * code_bytes() + step % 3 * each;
    }
    /// Of K or V in the scales of a step: rows' scales, 4 bytes each, then those of 16.
    __device__ __forceinline__ char* row_scales(const Side& s, int step) const {
        return scales(step) + (s.tile_bytes > 0 ? kKeys * (4 + k.block.blocks) : 0);
    }
    __device__ __forceinline__ void start_side(const Side& s, int step, char* to) const {
        const char* block =
            s.cache + (static_cast<int64_t>(page) * c.kv_heads + tile.kv_head) * s.block.bytes;
        const int first = step * kKeys % kKeysPerPage;
        for (int i = threadIdx.x; i < s.pieces(); i += kThreads)
            copy_async16(to + i * 16, block + first * s.block.codes + i * 16);
        char* rows = row_scales(s, step);
        // 32 rows' scales are 64 or 128 bytes, 512 of 16.
        const int row_pieces = kKeys * s.block.scales / 16, block_pieces = kKeys * s.block.blocks / 16;
        const int i = static_cast<int>(threadIdx.x);
        if (i < row_pieces)
            copy_async16(rows + i * 16, block + s.block.scales_at + first * s.block.scales + i * 16);
        else if (i >= 32 && i < 32 + block_pieces)
            copy_async16(rows + kKeys * 4 + (i - 32) * 16,
                         block + s.block.blocks_at + first * s.block.blocks + (i - 32) * 16);
    }
    /// A group of copies, empty after the last step.
    __device__ __forceinline__ void start(int step) {
        if (step < end) {
            start_side(k, step, codes(step));
            start_side(v, step, codes(step) + kKeys * k.block.codes);
        }
        commit_copies();
        page = page_of(step + 1);
    }
    __device__ __forceinline__ packed::Factor factor(const Side& s, const char* rows, int r, int at) const {
        uint32_t scale = *reinterpret_cast<const uint16_t*>(rows + r * s.block.scales);
        if (s.packing == Packing::steps)
            scale |= uint32_t{*reinterpret_cast<const uint16_t*>(rows + r * s.block.scales + 2)} << 16;
        uint8_t of16 = 0;
        if (s.packing == Packing::nvfp4)
            of16 = static_cast<uint8_t>(rows[kKeys * 4 + r * s.block.blocks + at / kv::kBlock]);
        return packed::factor_of(s.packing, scale, of16);
    }
    /// Eight elements; 16-byte piece p of row r lies at p ^ (r % 8), as prefill.cu reads them.
    __device__ __forceinline__ static void put(char* to, int r, int p, const uint4& x) {
        *reinterpret_cast<uint4*>(to + r * kDim * 2 + ((p ^ (r & 7)) << 4)) = x;
    }
    __device__ __forceinline__ void expand_side(const Side& s, int step, const char* from, char* to) const {
        const char* rows = row_scales(s, step);
        const packed::Table table = packed::table_of(s.packing);
        for (int i = threadIdx.x; i < s.pieces(); i += kThreads) {
            const uint4 x = *reinterpret_cast<const uint4*>(from + i * 16);
            const int row_pieces = s.block.codes / 16, r = i / row_pieces, first = i % row_pieces;
            const bool valid = step * kKeys + r < keys;  // beyond: zeros, since what lies there may be NaN
            const uint4 zeros{};
            if (s.packing == Packing::fp8) {
                const uint32_t by = factor(s, rows, r, 0).by;
                put(to, r, 2 * first, valid ? packed::expand_fp8(x.x, x.y, by) : zeros);
                put(to, r, 2 * first + 1, valid ? packed::expand_fp8(x.z, x.w, by) : zeros);
            } else {
                const packed::Factor low = factor(s, rows, r, first * 32),
                                     high = factor(s, rows, r, first * 32 + 16);
                put(to, r, 4 * first, valid ? packed::expand_codes(table, x.x, low) : zeros);
                put(to, r, 4 * first + 1, valid ? packed::expand_codes(table, x.y, low) : zeros);
                put(to, r, 4 * first + 2, valid ? packed::expand_codes(table, x.z, high) : zeros);
                put(to, r, 4 * first + 3, valid ? packed::expand_codes(table, x.w, high) : zeros);
            }
        }
    }
    /// Codes of a step, which have come, to BF16 in its stage.
    __device__ __forceinline__ void expand(int step) const {
        if (step >= end) return;
        char* stage = shared + step % 2 * kStageBytes;
        expand_side(k, step, codes(step), stage);
        expand_side(v, step, codes(step) + kKeys * k.block.codes, stage + kTileBytes);
    }
};

}  // namespace quern::cuda::attention::prefill
