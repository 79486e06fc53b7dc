// Attention of answer rows: norm and rotation, then scores, softmax and values of one tile.
//
//   S^T = K q^T      a warp its 16 keys, all 8 heads; the A operand is K, the B operand q, in registers (Query)
//   softmax          maxima of all warps meet in shared memory; probabilities go there as BF16 [head][key]
//   O^T += V^T P^T   a warp 64 of the 256 elements, all 64 keys; V is read transposed
#pragma once

#include "ggml-like/cuda/attention/decode_keys.cuh"

namespace quern::cuda::attention::decode {

using namespace ptx;

/// AttentionCall::turns of the lane's elements 8(l%4) .. +7.
struct Angles {
    uint64_t turns[8];
};

/// cos and sin of the lane's elements at a position, in lanes 0 .. 7.
struct Rotations {
    float2 of[8];

    Rotations() = default;
    __device__ __forceinline__ Rotations(const Angles& angles, int position, int lane) {
        if (lane < 8)
#pragma unroll
            for (int i = 0; i < 8; ++i) of[i] = rotation(angles.turns[i], position);
    }
};

/// Norm and rotation of a head of which lane l holds elements 8l .. 8l+7, to x.
__device__ __forceinline__ void norm_rope(const AttentionCall& c, uint4 raw, const float (&norm)[8],
                                          const Rotations& rotations, int lane, float (&x)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(words[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
        sum += v.x * v.x + v.y * v.y;
    }
    const float r = rsqrtf(warp_sum(sum) / kDim + c.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= r * norm[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // elements 0 .. 31 are in lanes 0 .. 3, their partners in lanes 4 .. 7
        const float other = __shfl_xor_sync(0xffffffffu, x[i], 4);
        if (lane < 8) {
            const float2 turn = rotations.of[i];
            x[i] = lane < 4 ? x[i] * turn.x - other * turn.y : x[i] * turn.x + other * turn.y;
        }
    }
}
/// The same, rounded.
__device__ __forceinline__ uint4 norm_rope(const AttentionCall& c, uint4 raw, const float (&norm)[8],
                                           const Rotations& rotations, int lane) {
    float x[8];
    norm_rope(c, raw, norm, rotations, lane, x);
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

/// Norms and rotates the warp's fresh keys of a tile in their slot; the row's own key or value also goes to the cache.
__device__ __forceinline__ void finish_fresh(const AttentionCall& c, const Row& row, const float (&k_norm)[8],
                                             const Angles& angles, int tile, bool values, char* slot) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;
    const int key = tile * kTileKeys + first, end = min(kWarpKeys, row.keys - key);
#pragma unroll 1
    for (int r = max(0, (values ? row.keys - 1 : row.fresh) - key); r < end; ++r) {
        uint4* at = reinterpret_cast<uint4*>(slot + piece_at(first + r, lane));
        uint4 x = *at;
        if (!values) *at = x = norm_rope(c, x, k_norm, Rotations(angles, key + r + row.shift, lane), lane);
        if (key + r == row.keys - 1)
            *reinterpret_cast<uint4*>((values ? c.v_cache : c.k_cache) + row.own_place + lane * 8) = x;
    }
    __syncwarp();
}

/// The B operand of S^T: lane l holds elements 16s + 2(l%4) + {0, 1, 8, 9} of head l / 4.
struct Query {
    uint32_t b[kDim / 16][2];
};

/// Each warp norms and rotates two heads; all warps get all heads, through the spare slot.
__device__ __forceinline__ void load_query(const AttentionCall& c, const Row& row, const float (&q_norm)[8],
                                           const Angles& angles, Shared& shared, Query& q) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 raw[kHeads / kWarps];
#pragma unroll
    for (int i = 0; i < kHeads / kWarps; ++i) {
        const int head = row.kv_head * row.group + min(warp + i * kWarps, row.group - 1);
        raw[i] = *reinterpret_cast<const uint4*>(c.q.at(row.t, head) + lane * 8);
    }
    const Rotations rotations(angles, row.keys - 1 + row.shift, lane);
#pragma unroll
    for (int i = 0; i < kHeads / kWarps; ++i)
        *reinterpret_cast<uint4*>(shared.ring[kSpare] + piece_at(warp + i * kWarps, lane)) =
            norm_rope(c, raw[i], q_norm, rotations, lane);
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kDim / 16; s += 2) {
        uint32_t b[4];
        load_matrices(b, shared_address(shared.ring[kSpare] + piece_at(lane % 8, 2 * s + lane / 8)));
        q.b[s][0] = b[0], q.b[s][1] = b[1], q.b[s + 1][0] = b[2], q.b[s + 1][1] = b[3];
    }
    __syncthreads();
}

__device__ __forceinline__ float over_keys_max(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
__device__ __forceinline__ float over_keys_sum(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

/// Scores of the warp's 16 keys. Lane l has heads 2(l%4) + {0, 1}: s[0], s[1] of key l / 4; s[2], s[3] of key l / 4 +
/// 8. -infinity from key `keys_left` on.
__device__ __forceinline__ void score(const char* rows, const Query& q, int keys_left, float (&s)[4]) {
    const int lane = threadIdx.x % 32;
    const float scale = score_scale(kDim);
    float parts[4][4] = {};
    const uint32_t base = shared_address(rows + piece_at(lane % 16, lane / 16));
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
        uint32_t k[4];
        load_matrices(k, (base ^ ((2 * i & 7) << 4)) + (i >> 2) * 128);
        mma(parts[i % 4], k, q.b[i][0], q.b[i][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        s[e] = (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e]);
        s[e] = lane / 4 + e / 2 * 8 < keys_left ? s[e] * scale : -INFINITY;
    }
}

/// The running result. Lane l of warp w holds of heads 2(l%4) + {0, 1}: in o[j] elements 64w + 16j + l/4 (+ 8), the
/// maximum over all keys so far, and its own addends of the sum over its warp's keys.
struct Part {
    float o[kWarpDims / 16][4];
    float maximum[2], sum[2];
};

__device__ __forceinline__ void clear(Part& part) {
#pragma unroll
    for (int j = 0; j < kWarpDims / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = 0;
    part.maximum[0] = part.maximum[1] = -INFINITY;
    part.sum[0] = part.sum[1] = 0;
}

/// Raises the maximum to the tile's, which the warps have left in shared memory, and rescales the sums.
__device__ __forceinline__ void raise_maximum(const Exchange& shared, Part& part) {
    float now[2] = {part.maximum[0], part.maximum[1]};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const float2 other = shared.highest[w][threadIdx.x % 4];
        now[0] = fmaxf(now[0], other.x), now[1] = fmaxf(now[1], other.y);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float f = fast_exp2(part.maximum[h] - now[h]);
        part.maximum[h] = now[h];
        part.sum[h] *= f;
#pragma unroll
        for (int j = 0; j < kWarpDims / 16; ++j) part.o[j][h] *= f, part.o[j][h + 2] *= f;
    }
}

__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/// The warp's scores become probabilities, in shared memory for all warps.
__device__ __forceinline__ void share_probabilities(float (&s)[4], Exchange& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = lane / 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        s[e] = fast_exp2(s[e] - part.maximum[e % 2]);
        part.sum[e % 2] += s[e];
    }
    char* to = shared.p + head * kTileKeys * 2 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(to + ((2 * warp ^ head) << 4)) = transpose(pack_bf16(s[0], s[1]));
    *reinterpret_cast<uint32_t*>(to + ((2 * warp + 1 ^ head) << 4)) = transpose(pack_bf16(s[2], s[3]));
}

/// part.o += V^T P^T of a tile.
__device__ __forceinline__ void add_values(const char* tile, const Exchange& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t p[kTileKeys / 16][2];
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; k += 2) {
        uint32_t b[4];
        load_matrices(
            b, shared_address(shared.p + lane % 8 * kTileKeys * 2 + ((2 * k + lane / 8 ^ lane % 8) << 4)));
        p[k][0] = b[0], p[k][1] = b[1], p[k + 1][0] = b[2], p[k + 1][1] = b[3];
    }
    const uint32_t base =
        shared_address(tile + piece_at(lane % 8 + lane / 16 * 8, lane / 8 & 1)) + warp * kWarpDims * 2;
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
#pragma unroll
        for (int j = 0; j < kWarpDims / 16; ++j) {
            uint32_t v[4];
            load_matrices_transposed(v, (base ^ (2 * j << 4)) + k * 16 * kRowBytes);
            mma(part.o[j], v, p[k][0], p[k][1]);
        }
}

}  // namespace quern::cuda::attention::decode
