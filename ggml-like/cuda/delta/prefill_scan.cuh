// What the kernels of the scan share (prefill_scan.cu, prefill_scan_warpgroups.cu): a block's rows and columns, S and o in registers.
//
// A warp has 16 columns of v. S [16 v, 128 k] and sums [16 v, 64 rows] lie as those of mma.m16n8k16, and so are left operands of the
// next product as they stand.
#pragma once

#include "ggml-like/cuda/delta/prefill.cuh"

namespace quern::cuda::delta {

using namespace ptx;

/// Chunks of all sequences before this one.
__device__ __forceinline__ int chunks_before(const int* start, int sequence, int lane) {
    int sum = 0;
    for (int s = lane; s < sequence; s += 32) sum += chunks_of(start, s);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
}

/// A value head of a sequence, and where it is in x.
struct ScanBlock {
    const bf16* x;          // the sequence's first row
    const Record* records;  // of the first chunk; the next chunk's is value_heads further
    int head, key_head, sequence;
    int before;                 // chunks of other sequences
    int begin, length, chunks;  // rows of the step
    int channels, value_heads;
    int q_column, k_column, v_column;

    /// Whole warp. Where length is 0, nothing else is there.
    __device__ __forceinline__ ScanBlock(const DeltaStep& p, int value_head, int of_sequence, int lane)
        : head(value_head),
          key_head(value_head / (p.value_heads / p.key_heads)),
          sequence(of_sequence),
          begin(p.start[of_sequence]) {
        length = p.start[sequence + 1] - begin;
        if (length == 0) return;
        chunks = (length + kChunk - 1) / kChunk;
        value_heads = p.value_heads;
        channels = (2 * p.key_heads + p.value_heads) * kDim;
        x = static_cast<const bf16*>(p.x) + int64_t{begin} * channels;
        before = chunks_before(p.start, sequence, lane);
        records = static_cast<const Record*>(p.work) + int64_t{before} * value_heads + head;
        q_column = key_head * kDim;
        k_column = (p.key_heads + key_head) * kDim;
        v_column = (2 * p.key_heads + head) * kDim;
    }
    __device__ __forceinline__ const Record* record(int chunk) const {
        return records + int64_t{chunk} * value_heads;
    }
    /// Of S, the lane's first element in the warp's columns of v, which begin at `v`.
    __device__ __forceinline__ float* state(const DeltaStep& p, int v, int lane) const {
        return p.delta + ((int64_t{p.slots[sequence]} * value_heads + head) * kDim + v + lane / 4) * kDim +
               2 * (lane % 4);
    }
};

/// S as the last step left it; zeros where the sequence begins.
__device__ __forceinline__ void load_state(float (&s)[16][4], const float* from, bool fresh) {
#pragma unroll
    for (int t = 0; t < 16; ++t) {
        const float2 zero = make_float2(0.0f, 0.0f);
        const float2 lo = fresh ? zero : *reinterpret_cast<const float2*>(from + 8 * t);
        const float2 hi = fresh ? zero : *reinterpret_cast<const float2*>(from + 8 * kDim + 8 * t);
        s[t][0] = lo.x, s[t][1] = lo.y, s[t][2] = hi.x, s[t][3] = hi.y;
    }
}
__device__ __forceinline__ void store_state(const float (&s)[16][4], float* to) {
#pragma unroll
    for (int t = 0; t < 16; ++t) {
        *reinterpret_cast<float2*>(to + 8 * t) = make_float2(s[t][0], s[t][1]);
        *reinterpret_cast<float2*>(to + 8 * kDim + 8 * t) = make_float2(s[t][2], s[t][3]);
    }
}

/// S at columns 16d .. 16d + 15 of k as a left operand, in two parts.
__device__ __forceinline__ void split_state(const float (&s)[16][4], int d, uint32_t (&high)[4],
                                            uint32_t (&low)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        split(s[2 * d + i / 2][2 * (i % 2)], s[2 * d + i / 2][2 * (i % 2) + 1], high[i], low[i]);
}

/// high + low = V^T - error (S X_k^T), from the sums in e. v_at(row, part): the shared address of 16-byte part `part` of the warp's
/// two of a row of V.
template <class At>
__device__ __forceinline__ void find_errors(uint32_t (&high)[4][4], uint32_t (&low)[4][4],
                                            const float (&e)[8][4], const float* error, const At& v_at,
                                            int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        uint32_t two[4];
        load_matrices_transposed(two, v_at(16 * i + lane % 8 + 8 * (lane / 16), lane / 8 % 2));
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const float2 f = *reinterpret_cast<const float2*>(error + 16 * i + 8 * (t / 2) + 2 * (lane % 4));
            const float* s = e[2 * i + t / 2] + 2 * (t % 2);
            const float2 value = unpack(two[t]);
            split(value.x - f.x * s[0], value.y - f.y * s[1], high[i][t], low[i][t]);
        }
    }
}

/// U at rows 16j .. 16j + 15, rounded, and times `write` in two parts, as left operands.
__device__ __forceinline__ void split_update(const float (&u)[8][4], int j, const float* write, int lane,
                                             uint32_t (&plain)[4], uint32_t (&high)[4], uint32_t (&low)[4]) {
#pragma unroll
    for (int t = 0; t < 4; ++t) {
        const float2 f = *reinterpret_cast<const float2*>(write + 16 * j + 8 * (t / 2) + 2 * (lane % 4));
        const float* x = u[2 * j + t / 2] + 2 * (t % 2);
        plain[t] = pack_bf16(x[0], x[1]);
        split(f.x * x[0], f.y * x[1], high[t], low[t]);
    }
}

/// o = diag(read) o, of sums that have rows along their columns.
__device__ __forceinline__ void scale_rows(float (&o)[8][4], const float* read, int lane) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const float2 f = *reinterpret_cast<const float2*>(read + 8 * t + 2 * (lane % 4));
        o[t][0] *= f.x, o[t][1] *= f.y, o[t][2] *= f.x, o[t][3] *= f.y;
    }
}

/// Stores 16 columns of o. The sums have v along the rows, so blocks of 8 x 8 are transposed, and neighbouring lanes
/// swap halves for stores of 8 bytes.
__device__ __forceinline__ void store_output(const float (&o)[8][4], bf16* to, int64_t ld, int rows,
                                             int lane) {
    const bool odd = lane % 2 != 0;
    to += (lane / 4) * ld + (odd ? 8 + 2 * (lane % 4 - 1) : 2 * (lane % 4));
#pragma unroll
    for (int t = 0; t < 8; ++t) {
        const uint32_t low = transpose(pack_bf16(o[t][0], o[t][1]));
        const uint32_t high = transpose(pack_bf16(o[t][2], o[t][3]));
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
        if (8 * t + lane / 4 < rows)
            *reinterpret_cast<uint2*>(to + 8 * t * ld) = odd ? make_uint2(got, high) : make_uint2(low, got);
    }
}

}  // namespace quern::cuda::delta
