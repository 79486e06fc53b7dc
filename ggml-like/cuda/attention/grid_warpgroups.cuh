// Attention among patches by products of warpgroups: what a warpgroup computes of its 64 queries.
//
//   one         S = Q Kj   O += P Vj-1 | softmax of S                        | P = S   S = Q Kj+1 ...
//   another                            | S = Q Kj   O += P Vj-1 | softmax of S ...
//
// A warpgroup's softmax runs beside the products of the other two. S [64, 128], P and O [64, 72] are in
// registers, a warp's 16 rows as in prefill_math.cuh.
#pragma once

#include "ggml-like/cuda/attention/grid_ring.cuh"
#include "ggml-like/cuda/attention/prefill_math.cuh"

#if QUERN_WGMMA

namespace quern::cuda::attention::grid {

using namespace ptx;
using prefill::Rescale;
using prefill::Softmax;

using Scores = float[kGridKeys / 8][4];
using Weights = uint32_t[kGridKeys / 16][4];  // probabilities as A operands
using Output = float[kGridPieces][4];

/// The highest score of the lane's keys in its row h. Bits of floats are compared as whole numbers, three at a time: if all are
/// negative, what comes is negative, too, but need not be the highest.
__device__ __forceinline__ float highest_or_negative(const Scores& s, int h) {
    int x[2] = {__float_as_int(s[0][2 * h]), __float_as_int(s[1][2 * h])};
#pragma unroll
    for (int n = 0; n < kGridKeys / 8; ++n)
        x[n % 2] = __vimax3_s32(x[n % 2], __float_as_int(s[n][2 * h]), __float_as_int(s[n][2 * h + 1]));
    return __int_as_float(max(x[0], x[1]));
}
__device__ __forceinline__ float highest(const Scores& s, int h) {
    float x = -INFINITY;
#pragma unroll
    for (int n = 0; n < kGridKeys / 8; ++n) x = fmaxf(x, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
    return x;
}

/// As prefill::move_maxima, of which this is the quick way if no maximum moves: no exchange among lanes, and maxima that are not
/// exact while they cannot matter. Which way is taken changes no bits.
__device__ __forceinline__ Rescale follow_maxima(const Scores& s, float scale, Softmax& state) {
    Rescale rescale;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float x = highest_or_negative(s, h) * scale, bound = state.maximum[h] + prefill::kSlack;
        rescale.needed |= x > bound || fmaxf(x, bound) < 0;
    }
    rescale.needed = __any_sync(0xffffffffu, rescale.needed);
    if (rescale.needed) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float x = prefill::over_row_max(highest(s, h)) * scale;
            const float now = x > state.maximum[h] + prefill::kSlack ? x : state.maximum[h];
            rescale.by[h] = fast_exp2(state.maximum[h] - now);
            state.maximum[h] = now;
            state.sum[h] *= rescale.by[h];
        }
    }
    return rescale;
}

/// Scores become probabilities as A operands, and go to the sums.
__device__ __forceinline__ void weigh(Scores& s, float scale, Softmax& state, Weights& p) {
#pragma unroll
    for (int i = 0; i < kGridKeys / 16; ++i) {
#pragma unroll
        for (int n = 2 * i; n < 2 * i + 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[n][e] = fast_exp2(fmaf(s[n][e], scale, -state.maximum[e / 2]));
#pragma unroll
        for (int h = 0; h < 2; ++h)
            state.sum[h] +=
                (s[2 * i][2 * h] + s[2 * i][2 * h + 1]) + (s[2 * i + 1][2 * h] + s[2 * i + 1][2 * h + 1]);
#pragma unroll
        for (int j = 0; j < 4; ++j)
            p[i][j] = pack_bf16(s[2 * i + j / 2][j % 2 * 2], s[2 * i + j / 2][j % 2 * 2 + 1]);
    }
}

__device__ __forceinline__ void apply(const Rescale& rescale, Output& o) {
    if (!rescale.needed) return;
#pragma unroll
    for (int n = 0; n < kGridPieces; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] *= rescale.by[e / 2];
}

__device__ __forceinline__ void clear(Softmax& state, Output& o) {
#pragma unroll
    for (int h = 0; h < 2; ++h) state.maximum[h] = prefill::kNoScore, state.sum[h] = 0;
#pragma unroll
    for (int n = 0; n < kGridPieces; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = 0;
}

/// Starts s = q k^T, not scaled yet.
__device__ __forceinline__ void start_scores(uint64_t q, uint64_t k, Scores& s) {
    wgmma_shared_fresh(s, q, k);
#pragma unroll
    for (int i = 1; i < kGridDepth / 16; ++i)
        wgmma_shared(s, q + i * (2 * kQueryPiece >> 4), k + i * (2 * kKeyPiece >> 4));
    wgmma_commit();
}
/// Starts o += p v.
__device__ __forceinline__ void start_values(const Weights& p, uint64_t v, Output& o) {
#pragma unroll
    for (int i = 0; i < kGridKeys / 16; ++i) wgmma_by_columns(o, p[i], v + i * 16);
    wgmma_commit();
}

/// The same number, of which the compiler does not know whence it comes: what it makes of one and keeps over a span takes
/// registers that are not there.
__device__ __forceinline__ int again(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

struct Warpgroup {
    const GridCall& c;
    const Ring& ring;
    Place at;

    __device__ __forceinline__ static int number() { return again(static_cast<int>(threadIdx.x)) / 128; }
    /// Barriers of the block: from 1 on a warpgroup, from 4 on turns.
    __device__ __forceinline__ static void barrier() {
        asm volatile("bar.sync %0, 128;" ::"r"(1 + number()) : "memory");
    }
    /// Warpgroups start products in turn, so that those of a step run one behind the other.
    __device__ __forceinline__ static void await_turn() {
        asm volatile("bar.sync %0, 256;" ::"r"(4 + number()) : "memory");
    }
    __device__ __forceinline__ static void pass_turn() {
        asm volatile("bar.arrive %0, 256;" ::"r"(number() == kGridGroups - 1 ? 4 : 5 + number()) : "memory");
    }
    __device__ __forceinline__ uint64_t keys_there() const {
        return wgmma_pieces(shared_address(ring.slot(at)), kKeyPiece);
    }
    __device__ __forceinline__ uint64_t values_there() const {
        return wgmma_piece_columns(shared_address(ring.slot(at)), kKeyPiece);
    }
    /// The products that used K or V there have ended.
    __device__ __forceinline__ void done() {
        ring.release(at);
        at.go_on();
    }

    /// Keys from `keys` on do not exist.
    __device__ __forceinline__ static void hide(int keys, Scores& s) {
        if (keys >= kGridKeys) return;
#pragma unroll
        for (int n = 0; n < kGridKeys / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (static_cast<int>(threadIdx.x) % 4 * 2 + 8 * n + e % 2 >= keys) s[n][e] = -INFINITY;
    }
    /// Their values become zeros: 0 times what may be NaN is NaN. Each warpgroup writes them.
    __device__ __forceinline__ void clear_tail(int keys) const {
        const int missing = kGridKeys - keys;
        if (missing <= 0) return;
        char* values = ring.slot(at) + keys * 16;
#pragma unroll 1
        for (int piece = 0; piece < kGridPieces; ++piece)
            for (int i = threadIdx.x % 128; i < missing; i += 128)
                *reinterpret_cast<uint4*>(values + piece * kKeyPiece + i * 16) = uint4{};
        fence_async_proxy();
        barrier();
    }

    /// Sums over the frame's keys.
    __device__ __forceinline__ void add_keys(int keys, Softmax& state, Output& o) {
        const uint64_t q = wgmma_pieces(shared_address(ring.queries(number())), kQueryPiece);
        const bool never = c.rows < 0;
        Scores s;
        Weights p;
        clear(state, o);
        ring.wait_full(at);
        wgmma_fence();
        start_scores(q, keys_there(), s);
        wgmma_wait<0>();
        hold(s);
        done();
        hide(keys, s);
        follow_maxima(s, c.scale, state);  // of o there is nothing yet
        weigh(s, c.scale, state, p);
#pragma unroll 1
        for (keys -= kGridKeys; keys > 0; keys -= kGridKeys) {
            ring.wait_full(at);
            await_turn();
            hold(o);
            wgmma_fence();
            start_scores(q, keys_there(), s);
            at.go_on();
            ring.wait_full(at);
            wgmma_fence();
            start_values(p, values_there(), o);
            pass_turn();
            wgmma_wait<1>();
            hold(s);
            ring.release({at.count - 1});
            hide(keys, s);
            const Rescale rescale = follow_maxima(s, c.scale, state);
            wgmma_wait<0>();
            hold(p, never);
            hold(o);
            done();
            apply(rescale, o);
            weigh(s, c.scale, state, p);
        }
        ring.release_queries(number());
        ring.wait_full(at);
        clear_tail(keys + kGridKeys);
        hold(o);
        wgmma_fence();
        start_values(p, values_there(), o);
        wgmma_wait<0>();
        hold(p, never);
        hold(o);
        done();
        prefill::add_lanes(state);
    }

    __device__ __forceinline__ void store(const Span& span, const Softmax& state, const Output& o) const {
        const int thread = again(static_cast<int>(threadIdx.x)),
                  first = span.first + thread / 32 * 16 + thread % 32 / 4;
        bf16* to = c.y + (static_cast<int64_t>(first - c.query) * c.heads + span.head) * kGridWidth +
                   2 * (thread % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (first + 8 * h >= span.last) continue;
            const float by = __fdividef(1.0f, state.sum[h]);
#pragma unroll
            for (int n = 0; n < kGridPieces; ++n)
                *reinterpret_cast<uint32_t*>(to + h * 8 * c.heads * kGridWidth + 8 * n) =
                    pack_bf16(o[n][2 * h] * by, o[n][2 * h + 1] * by);
        }
    }

    __device__ __forceinline__ void run() {
        if (number() == kGridGroups - 1) pass_turn();  // the first begins
#pragma unroll 1
        for (int round = 0;; ++round) {
            const int keys = ring.told(again(round)).keys();
            if (keys == 0) return;
            ring.wait_queries(number(), again(round));
            Softmax state;
            Output o;
            add_keys(keys, state, o);
            store(ring.span(again(round)), state, o);
        }
    }
};

}  // namespace quern::cuda::attention::grid

#endif
