// Attention of answer rows over packed caches: q, and the keys and values of this step.
//
//   block   K row, V row of each fresh key of the tile, then before the first tile the heads of q: one warp each, in turn
//
// A key that a later row reads from the cache is packed by the same instructions as here, so rows have the same bits whether
// their predecessors came in the same step or before.
#pragma once

#include "ggml-like/cuda/attention/decode_packed.cuh"
#include "ggml-like/cuda/attention/pack_rows.cuh"
#include "ggml-like/cuda/attention/prepare.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

/// Shared memory beside the slots.
struct __align__(16) Beside {
    Exchange exchange;
    char q[kHeads * kQueryRow];
    float norms[2][kDim];                  // q_norm, k_norm
    float2 own[kSplitRotaryDims / 2];      // cos and sin at the row's own position
    uint64_t turns[kSplitRotaryDims / 2];  // AttentionCall::turns
};
static_assert(sizeof(Beside) <= 9 * 1024 && sizeof(Exchange) % 16 == 0);

/// Starts loading what all heads need; part of the next group of copies.
__device__ __forceinline__ void start_beside(const AttentionCall& c, const Row& row, Beside& beside) {
    static_assert(kThreads * 4 == 2 * kDim);
    const int thread = threadIdx.x, half = thread / (kThreads / 2), at = thread % (kThreads / 2) * 4;
    copy_async16(beside.norms[half] + at, (half == 0 ? c.q_norm : c.k_norm) + at);
    if (thread < kSplitRotaryDims / 2) {
        beside.turns[thread] = c.turns[thread];
        beside.own[thread] = rotation(c.turns[thread], row.keys - 1 + row.shift);
    }
}

/// Copies row r of K or V from a slot to its block in the cache; by one warp, which has written it.
__device__ __forceinline__ void store_packed(const packed::Block& b, const char* from, int r, char* to) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll 1
    for (int at = lane * 4; at < b.codes; at += 32 * 4)
        *reinterpret_cast<uint32_t*>(to + r * b.codes + at) =
            *reinterpret_cast<const uint32_t*>(from + r * b.codes + (at ^ swizzled(r) << 4));
    const int block = b.blocks_at + r * b.blocks + lane, scale = b.scales_at + r * b.scales + lane * 2;
    if (lane < b.blocks) to[block] = from[block];
    if (lane * 2 < b.scales)
        *reinterpret_cast<uint16_t*>(to + scale) = *reinterpret_cast<const uint16_t*>(from + scale);
}

/// Packs the tile's fresh keys and values over what was copied to its slot, and puts the row's own into the cache; where
/// `query`, leaves the heads of q, normed, rotated, of keys in tq4 times H, and rounded.
__device__ __forceinline__ void prepare(const AttentionCall& c, const Row& row, const Pages& k, int tile,
                                        bool query, char* slot, Beside& beside) {
    const int lane = threadIdx.x % 32;
    const int first = max(row.fresh, tile * kTileKeys), end = min(row.keys, (tile + 1) * kTileKeys);
    const int packs = 2 * max(end - first, 0), items = packs + (query ? row.group : 0);
    const auto load = [&](int item) {
        item = min(item, items - 1);
        const int t = row.fresh_row + first + item / 2 - row.fresh;
        const bf16* from = item >= packs   ? c.q.at(row.t, row.kv_head * row.group + item - packs)
                           : item % 2 == 0 ? c.k.at(t, row.kv_head)
                                           : c.v.at(t, row.kv_head);
        return *reinterpret_cast<const uint4*>(from + lane * 8);
    };
    int item = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // so that it is known to be the whole warp's
    uint4 next = load(item);
#pragma unroll 1
    for (; item < items; item += kWarps) {
        const uint4 raw = next;
        next = load(item + kWarps);
        const bool is_q = item >= packs, is_v = !is_q && item % 2 == 1;
        const int key = is_q ? row.keys - 1 : first + item / 2, r = key % kTileKeys;
        float x[8];
        if (is_v) {
            unpack8(raw, x);
        } else {
            float norm[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) norm[i] = beside.norms[is_q ? 0 : 1][lane * 8 + i];
            Rotations rotations;
#pragma unroll
            for (int i = 0; i < 8; ++i) rotations.of[i] = beside.own[lane % 4 * 8 + i];
            if (key != row.keys - 1)
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    rotations.of[i] = rotation(beside.turns[lane % 4 * 8 + i], key + row.shift);
            norm_rope(c, raw, norm, rotations, lane, x);
            if (k.packing == Packing::centroids) packed::hadamard(x, kDim, lane);
        }
        if (is_q) {
            *reinterpret_cast<uint4*>(beside.q + (item - packs) * kQueryRow + lane * 16) = pack8(x);
            continue;
        }
        const Packing packing = is_v ? c.v_packing : c.k_packing;
        const packed::Block block(is_v ? c.v_layout : c.k_layout);
        char* part = slot + (is_v ? k.block.bytes : 0);
        packed::pack_row(
            packing, x, kDim, (is_v ? c.v_scale : c.k_scale)[row.kv_head % kScales], lane,
            packed::RowAt(block, part, r, lane * packed::lane_bytes(packing) ^ swizzled(r) << 4));
        if (key == row.keys - 1) {
            const int64_t head = static_cast<int64_t>(page_of(row, tile)) * c.kv_heads + row.kv_head;
            store_packed(block, part, r,
                         reinterpret_cast<char*>(is_v ? c.v_cache : c.k_cache) + head * block.bytes);
        }
    }
}

}  // namespace quern::cuda::attention::decode
