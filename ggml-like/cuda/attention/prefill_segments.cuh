// Attention of prompt rows: adding the sums of a tile's segments, in one block or between blocks.
//
//   one block        add_held: the sums so far (Held) and the segment's in registers
//   few blocks       add_held, too: in the order of segments, each takes what the one before has left in work space
//   several blocks   add_round: each of a round's blocks has written its segment's sums to its slot of work space; then
//                    each adds all slots in order for its part of the elements
//
//     work space of a tile   | slot 0 | slot 1 | ...   | sums so far |
//
// The same add_total and add_value in both, so the same bits.
#pragma once

#include "ggml-like/cuda/attention/prefill_math.cuh"

namespace quern::cuda::attention::prefill {

using namespace ptx;

/// A tile's sums over some keys, in shared memory or work space: values [warp][n][lane] of four floats, the lane's
/// o[n]; then {maximum, sum} of each row, twice.
struct Held {
    float4* values;
    float2* totals;

    __device__ __forceinline__ explicit Held(void* at)
        : values(static_cast<float4*>(at)), totals(reinterpret_cast<float2*>(values + kElements)) {}
};

/// Stores the sums of the segments so far.
__device__ __forceinline__ void keep(const Held& held, const Softmax& state, const Output& o) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
        held.values[(warp * (kDim / 8) + n) * 32 + lane] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
    if (lane % 4 == 0)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            held.totals[warp * 16 + lane / 4 + 8 * h] = {state.maximum[h], state.sum[h]};
    __syncwarp();
}

/// Adds the next segment's maximum and sum to the total of those before. Returns the factors of values: of those
/// before, of the next. A row without keys in the next segment keeps its bits.
__device__ __forceinline__ float2 add_total(float2& total, float2 next) {
    const float highest = fmaxf(total.x, next.x);
    const float2 by{fast_exp2(total.x - highest), fast_exp2(next.x - highest)};
    total = {highest, fmaf(next.y, by.y, __fmul_rn(total.y, by.x))};
    return by;
}
__device__ __forceinline__ float add_value(float value, float next, float2 by) {
    return fmaf(next, by.y, __fmul_rn(value, by.x));
}

/// The segment's sums in registers become those over it and all segments before it, which are held. kInWork: in work space,
/// where another block may have written them.
template <bool kInWork>
__device__ __forceinline__ void add_held(const Held& held, Softmax& state, Output& o) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float2 by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float2* from = held.totals + warp * 16 + lane / 4 + 8 * h;
        float2 total = kInWork ? __ldcg(from) : *from;
        by[h] = add_total(total, {state.maximum[h], state.sum[h]});
        state.maximum[h] = total.x, state.sum[h] = total.y;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
        const float4* from = held.values + (warp * (kDim / 8) + n) * 32 + lane;
        const float4 x = kInWork ? __ldcg(from) : *from;
        o[n][0] = add_value(x.x, o[n][0], by[0]), o[n][1] = add_value(x.y, o[n][1], by[0]);
        o[n][2] = add_value(x.z, o[n][2], by[1]), o[n][3] = add_value(x.w, o[n][3], by[1]);
    }
    __syncwarp();
}

/// Two elements of y: values over the sum, times the gate's sigmoid, rounded to BF16.
__device__ __forceinline__ uint32_t gated(float x, float y, float over_sum, uint32_t gate) {
    const float2 g = unpack_bf16(gate);
    const float by_x = __fdividef(over_sum, 1.0f + __expf(-g.x)),
                by_y = __fdividef(over_sum, 1.0f + __expf(-g.y));
    return pack_bf16(__fmul_rn(x, by_x), __fmul_rn(y, by_y));
}

/// All threads of a block that multiply.
__device__ __forceinline__ void sums_barrier() { asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory"); }

/// A block's place among those that share a tile. Each has one segment; `blocks` segments are a round.
struct Sharing {
    char* slots;    // one for each block of a round
    int64_t apart;  // bytes from one to the next
    char* sums_so_far;
    unsigned* done;  // arrivals
    int blocks, segment, segments;

    __device__ __forceinline__ Held held(int slot) const { return Held(slots + slot * apart); }
    __device__ __forceinline__ int round() const { return segment / blocks; }
    __device__ __forceinline__ int own() const { return segment % blocks; }
    __device__ __forceinline__ int first() const { return round() * blocks; }
    __device__ __forceinline__ int in_round() const { return min(blocks, segments - first()); }

    /// `all`: arrivals of the whole tile.
    __device__ __forceinline__ void arrive(int all) const {
        __threadfence();
        sums_barrier();
        if (threadIdx.x != 0) return;
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(done) : "memory");
        if (before + 1 == static_cast<unsigned>(all))
            *done = 0;  // nobody waits any more: zero again for the next launch
    }
    __device__ __forceinline__ void wait(int arrivals) const {
        if (threadIdx.x == 0) {
            unsigned now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(done) : "memory");
            } while (now < static_cast<unsigned>(arrivals));
        }
        sums_barrier();
    }
};

/// Four elements of a tile's sums, two of each of two rows, and these rows' totals. `at`: their place in Held::values.
struct Element {
    float4 value;
    float2 total[2];

    __device__ __forceinline__ void load(const Held& held, int at, int totals) {
        const int row = at / (kElements / kWarps) * 16 + at % 32 / 4;
        value = __ldcg(held.values + at);
        total[0] = __ldcg(held.totals + totals * kRows + row);
        total[1] = __ldcg(held.totals + totals * kRows + row + 8);
    }
    __device__ __forceinline__ void store(const Held& held, int at, int totals) const {
        const int row = at / (kElements / kWarps) * 16 + at % 32 / 4;
        held.values[at] = value;
        if (at / 32 % (kDim / 8) != 0 || at % 4 != 0) return;  // one thread writes a row's total
        held.totals[totals * kRows + row] = total[0];
        held.totals[totals * kRows + row + 8] = total[1];
    }
    __device__ __forceinline__ void add(const Element& next) {
        const float2 a = add_total(total[0], next.total[0]), b = add_total(total[1], next.total[1]);
        value = {add_value(value.x, next.value.x, a), add_value(value.y, next.value.y, a),
                 add_value(value.z, next.value.z, b), add_value(value.w, next.value.w, b)};
    }
};

__device__ __forceinline__ void store_element(const AttentionCall& c, const Tile& tile, int at,
                                              const Element& x) {
    const int group = c.heads / c.kv_heads, column = at / 32 % (kDim / 8) * 8 + at % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int m = at / (kElements / kWarps) * 16 + at % 32 / 4 + 8 * h;
        if (m / group >= tile.rows) continue;
        const int row = tile.first + m / group, head = tile.kv_head * group + m % group;
        const uint32_t gate = *reinterpret_cast<const uint32_t*>(c.gate.at(row, head) + column);
        *reinterpret_cast<uint32_t*>(c.y + (static_cast<int64_t>(row) * c.heads + head) * kDim + column) =
            gated(h == 0 ? x.value.x : x.value.z, h == 0 ? x.value.y : x.value.w, 1.0f / x.total[h].y, gate);
    }
}

/// Where a block comes here again, registers would else be kept for what it left in elements that it does not load.
template <int kN>
__device__ __forceinline__ void clear(Element (&elements)[kN]) {
#pragma unroll
    for (Element& x : elements) x = {};
}

/// For the block's part of elements: adds the round's segments to the sums so far; after the last round stores y.
template <bool kAgain>
__device__ __forceinline__ void add_round(const AttentionCall& c, const Tile& tile, const Sharing& sharing) {
    constexpr int kTogether = 2, kAhead = 4;  // elements, and segments of each, whose loads are under way
    const int round = sharing.round(), first = sharing.first(), filled = sharing.in_round();
    const Held so_far(sharing.sums_so_far);
    const int step = filled * kThreads;
#pragma unroll 1
    for (int at = sharing.own() * kThreads + threadIdx.x; at < kElements; at += kTogether * step) {
        Element sum[kTogether];
        if constexpr (kAgain) clear(sum);
        const auto valid = [&](int e) { return at + e * step < kElements; };
#pragma unroll
        for (int e = 0; e < kTogether; ++e)
            if (round > 0 && valid(e)) sum[e].load(so_far, at + e * step, round % 2);
#pragma unroll 1
        for (int begin = 0; begin < filled; begin += kAhead) {
            Element next[kAhead][kTogether];
            if constexpr (kAgain) {
#pragma unroll
                for (int i = 0; i < kAhead; ++i) clear(next[i]);
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
#pragma unroll
                for (int e = 0; e < kTogether; ++e)
                    if (begin + i < filled && valid(e))
                        next[i][e].load(sharing.held(begin + i), at + e * step, 0);
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
#pragma unroll
                for (int e = 0; e < kTogether; ++e) {
                    if (first + begin + i == 0)
                        sum[e] = next[i][e];
                    else if (begin + i < filled)
                        sum[e].add(next[i][e]);
                }
        }
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
            if (!valid(e)) break;
            if (first + filled <
                sharing.segments)  // to the other copy of totals: blocks may still read this one
                sum[e].store(so_far, at + e * step, (round + 1) % 2);
            else
                store_element(c, tile, at + e * step, sum[e]);
        }
    }
}

/// Adds the tile's segments round by round. A block arrives twice: its segment is written; it has read its round's segments.
/// kAgain: it comes here for several segments.
template <bool kAgain>
__device__ __forceinline__ void add_in_rounds(const AttentionCall& c, const Tile& tile,
                                              const Sharing& sharing, const Softmax& state, const Output& o) {
    const int all = 2 * sharing.segments;
    sharing.wait(2 * sharing.first());  // the slot has been read
    keep(sharing.held(sharing.own()), state, o);
    sharing.arrive(all);
    sharing.wait(2 * sharing.first() + sharing.in_round());
    add_round<kAgain>(c, tile, sharing);
    sharing.arrive(all);
}

/// The segment's sums become those over it and all before it, which another block has left, and are left for the next.
__device__ __forceinline__ void add_in_turn(const Sharing& sharing, Softmax& state, Output& o) {
    const Held so_far(sharing.sums_so_far);
    sharing.wait(sharing.segment);
    if (sharing.segment > 0) add_held<true>(so_far, state, o);
    if (sharing.segment + 1 < sharing.segments) keep(so_far, state, o);
    sharing.arrive(sharing.segments);
}

}  // namespace quern::cuda::attention::prefill
