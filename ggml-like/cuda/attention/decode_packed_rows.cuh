// Attention of answer rows over packed caches: q, and the keys and values of this step.
//
//   item    two heads of q, or two rows of K or of V, by one warp, side by side
//   block   before the first units: their fresh rows of K and V, then the heads of q, items to warps 0 1 2 3, 3 2 1 0, 0 1 ...
//   warp    before a later unit: its fresh rows
//
// A key that a later row reads from the cache is packed by the same instructions as here, so rows have the same bits whether
// their predecessors came in the same step or before.
#pragma once

#include "ggml-like/cuda/attention/decode_packed.cuh"
#include "ggml-like/cuda/attention/pack_rows.cuh"
#include "ggml-like/cuda/attention/prepare.cuh"

#include <type_traits>

namespace quern::cuda::attention::decode {

using namespace ptx;

/// Shared memory of the preparation.
struct __align__(16) Beside {
    SharedQuery q;
    float norms[2][kDim];                  // q_norm, k_norm
    float2 own[kSplitRotaryDims / 2];      // cos and sin at the row's own position
    uint64_t turns[kSplitRotaryDims / 2];  // AttentionCall::turns
};

/// Starts loading what all heads need; a group of copies.
__device__ __forceinline__ void start_beside(const AttentionCall& c, const Row& row, Beside& beside) {
    static_assert(kThreads * 4 == 2 * kDim);
    const int thread = threadIdx.x, half = thread / (kThreads / 2), at = thread % (kThreads / 2) * 4;
    copy_async16(beside.norms[half] + at, (half == 0 ? c.q_norm : c.k_norm) + at);
    if (thread < kSplitRotaryDims / 2) {
        beside.turns[thread] = c.turns[thread];
        beside.own[thread] = rotation(c.turns[thread], row.keys - 1 + row.shift);
    }
    commit_copies();
}

/// Copies row r of a unit of K or V to row `place` of its block in the cache; by one warp, which has written it.
__device__ __forceinline__ void store_packed(const packed::Block& unit, const packed::Block& b,
                                             const char* from, int r, int place, char* to) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll 1
    for (int at = lane * 4; at < b.codes; at += 32 * 4)
        *reinterpret_cast<uint32_t*>(to + place * b.codes + at) =
            *reinterpret_cast<const uint32_t*>(from + r * b.codes + (at ^ swizzled(r) << 4));
    if (lane < b.blocks)
        to[b.blocks_at + place * b.blocks + lane] = from[unit.blocks_at + r * b.blocks + lane];
    if (lane * 2 < b.scales)
        *reinterpret_cast<uint16_t*>(to + b.scales_at + place * b.scales + lane * 2) =
            *reinterpret_cast<const uint16_t*>(from + unit.scales_at + r * b.scales + lane * 2);
}

/// Packs a row of K or V over what was copied to `part` of its slot, and puts the row's own into the cache.
template <class B>
__device__ __forceinline__ void pack_fresh(const AttentionCall& c, const Row& row, int key, float given,
                                           const float (&x)[8], char* part, bf16* cache) {
    const int lane = threadIdx.x % 32, r = key % kWarpKeys;
    constexpr kv::Layout kLayout = B::kLayout;
    const packed::Block unit(kLayout, kWarpKeys), block(kLayout);
    packed::pack_row(B::kPacking, x, kDim, given, lane,
                     packed::RowAt(unit, part, r, lane * packed::lane_bytes(B::kPacking) ^ swizzled(r) << 4));
    if (key != row.keys - 1) return;
    const int64_t head = static_cast<int64_t>(page_of(row, key / kTileKeys)) * c.kv_heads + row.kv_head;
    store_packed(unit, block, part, r, key % kTileKeys, reinterpret_cast<char*>(cache) + head * block.bytes);
}

/// Items of a warp: fresh keys begin .. end-1 and their values; where `query`, all warps', and the heads of q, normed, rotated,
/// of keys in tq4 times H, and rounded. `slot_of`: of a key's unit.
template <class K, class V, class F>
__device__ __forceinline__ void prepare(const AttentionCall& c, const Row& row, int begin, int end,
                                        bool query, const F& slot_of, Beside& beside) {
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const int packs = 2 * (max(end - begin + 1, 0) / 2), items = packs + (query ? kHeads / 2 : 0);
#pragma unroll 1
    for (int round = 0;; ++round) {
        const int item = query ? round * kWarps + (round % 2 == 0 ? warp : kWarps - 1 - warp) : round;
        if (item >= items) return;
        const bool is_q = item >= packs, is_v = !is_q && item % 2 == 1;
        const int first = is_q ? (item - packs) * 2 : begin + item / 2 * 2;  // head or key
        const int last = is_q ? first + 1 : min(first + 1, end - 1);
        uint4 raw[2];
        float x[2][8];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = i == 0 ? first : last;
            const int t = row.fresh_row + at - row.fresh;
            const bf16* from = is_q   ? c.q.at(row.t, row.kv_head * row.group + min(at, row.group - 1))
                               : is_v ? c.v.at(t, row.kv_head)
                                      : c.k.at(t, row.kv_head);
            raw[i] = *reinterpret_cast<const uint4*>(from + lane * 8);
        }
        if (is_v) {
            unpack8(raw[0], x[0]), unpack8(raw[1], x[1]);
        } else {
            float norm[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) norm[i] = beside.norms[is_q ? 0 : 1][lane * 8 + i];
            Rotations rotations[2];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                rotations[0].of[i] = rotations[1].of[i] = beside.own[lane % 4 * 8 + i];
            if (!is_q && first != row.keys - 1)
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    rotations[0].of[i] = rotation(beside.turns[lane % 4 * 8 + i], first + row.shift);
                    rotations[1].of[i] = rotation(beside.turns[lane % 4 * 8 + i], last + row.shift);
                }
#pragma unroll
            for (int i = 0; i < 2; ++i) norm_rope(c, raw[i], norm, rotations[i], lane, x[i]);
            if constexpr (K::kPacking == Packing::centroids)
#pragma unroll
                for (int i = 0; i < 2; ++i) packed::hadamard(x[i], kDim, lane);
        }
        if (is_q) {
            put_query<K>(beside.q, first, x[0]);
            put_query<K>(beside.q, last, x[1]);
            continue;
        }
#pragma unroll 1
        for (int key = first; key <= last; ++key) {
            const float given = (is_v ? c.v_scale : c.k_scale)[row.kv_head % kScales];
            char* part = slot_of(key) + (is_v ? K::kUnitBytes : 0);
            bf16* cache = is_v ? c.v_cache : c.k_cache;
            if constexpr (std::is_same_v<K, V>)
                pack_fresh<K>(c, row, key, given, x[0], part, cache);
            else if (is_v)
                pack_fresh<V>(c, row, key, given, x[0], part, cache);
            else
                pack_fresh<K>(c, row, key, given, x[0], part, cache);
#pragma unroll
            for (int i = 0; i < 8; ++i) x[0][i] = x[1][i];
        }
    }
}

}  // namespace quern::cuda::attention::decode
