// Attention of prompt rows by products of warpgroups: what a warpgroup computes of its 64 rows of M.
//
//   one        S = Q Kj   O += P Vj-1 | softmax of S          | P = S   S = Q Kj+1 ...
//   the other  softmax of S           | P = S   S = Q Kj   O += P Vj-1 | softmax ...
//
// They take turns with the tensor cores; each starts both products of a step, so that O's run during its softmax, too. Q is
// in shared memory, S [64, 64], P and O [64, 256] in registers, a warp's 16 rows as in prefill_math.cuh.
#pragma once

#include "ggml-like/cuda/attention/prefill_ring.cuh"

#if QUERN_WGMMA

namespace quern::cuda::attention::prefill {

using namespace ptx;

using PageScores = float[kKeysPerPage / 8][4];
using Weights = uint32_t[kKeysPerPage / 16][4];  // probabilities as A operands

__device__ __forceinline__ int warpgroup() { return static_cast<int>(threadIdx.x) / 128; }
/// Barriers of the block: 1 is sums_barrier, 2 and 3 a warpgroup's turn, 4 and 5 a warpgroup.
__device__ __forceinline__ void await_turn() {
    asm volatile("bar.sync %0, %1;" ::"r"(2 + warpgroup()), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void pass_turn() {
    asm volatile("bar.arrive %0, %1;" ::"r"(3 - warpgroup()), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void warpgroup_barrier() {
    asm volatile("bar.sync %0, 128;" ::"r"(4 + warpgroup()) : "memory");
}

/// The number of the thread, from which the compiler makes everything anew: what it keeps over a tile takes registers that
/// are not there.
__device__ __forceinline__ int thread_again() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

/// Starts s = q k^T of a page, not scaled yet.
__device__ __forceinline__ void start_scores(uint64_t q, uint64_t k, PageScores& s) {
    asm volatile("" : "+l"(q));  // else q's 16 descriptors are kept, too
    wgmma_shared_fresh(s, q, k);
#pragma unroll
    for (int i = 1; i < kSteps; ++i) {
        const int at = i / 4 * (kColumnBytes >> 4) + i % 4 * 2;
        wgmma_shared(s, q + at, k + at);
    }
    wgmma_commit();
}
/// Starts o += p v of a page.
__device__ __forceinline__ void start_values(const Weights& p, uint64_t v, Output& o) {
#pragma unroll
    for (int i = 0; i < kKeysPerPage / 16; ++i) wgmma_by_columns(o, p[i], v + i * 128);
    wgmma_commit();
}

__device__ __forceinline__ void pack(const PageScores& s, Weights& p) {
#pragma unroll
    for (int i = 0; i < kKeysPerPage / 16; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            p[i][j] = pack_bf16(s[2 * i + j / 2][j % 2 * 2], s[2 * i + j / 2][j % 2 * 2 + 1]);
}

/// Values from row `first` on become zeros: no key is there yet, and 0 times what may be NaN is NaN.
__device__ __forceinline__ void clear_tail(char* values, int first) {
    const int pieces = (kKeysPerPage - first) * 8;  // of 16 bytes, in each 64 columns
    for (int i = threadIdx.x; i < pieces * (kDim / kColumns); i += kThreads)
        *reinterpret_cast<uint4*>(values + i / pieces * kColumnBytes + first * 128 + i % pieces * 16) =
            uint4{};
    fence_async_proxy();
    sums_barrier();
}

/// Which keys the lane's two rows see.
struct Sight {
    int keys, first_position;  // of the tile
    int last[2];               // of each row

    __device__ __forceinline__ Sight(const AttentionCall& c, const Span& span)
        : keys(span.keys), first_position(c.positions[span.tile.first]) {
        const Divisor group(quotient(c.heads, c.kv_heads));
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int m = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * h;
            last[h] = first_position + min(group.quotient(m), span.tile.rows - 1);
        }
    }
    __device__ __forceinline__ void hide(int page, PageScores& s) const {
        const int key = page * kKeysPerPage;
        if (key + kKeysPerPage - 1 > first_position) mask(s, key + threadIdx.x % 4 * 2, last[0], last[1]);
    }
};

template <int kSlots>
struct Warpgroup {
    using Place = prefill::Place<kSlots>;

    const AttentionCall& c;
    const Ring<kSlots>& ring;
    Place at{};

    /// The warp's 16 rows of q or of the gates; 16-byte piece p of row r lies at p ^ (r % 8).
    __device__ __forceinline__ char* own_rows(int thread) const {
        return ring.queries + thread / 128 * (kQueryBytes / 2) + thread / 32 % 4 * (16 * 128);
    }
    __device__ __forceinline__ void start_rows(const HeadRows& from, const Span& span) const {
        const int thread = thread_again(), lane = thread % 32;
        const WarpRows rows = warp_rows(c, span.tile, thread);
        char* to = own_rows(thread) + lane / 8 * kColumnBytes;
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            const int row = __shfl_sync(0xffffffffu, rows.row, r),
                      head = __shfl_sync(0xffffffffu, rows.head, r);
            copy_async16(to + r * 128 + (((lane ^ r) & 7) << 4), from.at(row, head) + lane * 8);
        }
        commit_copies();
    }
    __device__ __forceinline__ void load_queries(const Span& span) const {
        start_rows({c.rotated, static_cast<int64_t>(c.heads) * kDim, kDim}, span);
        wait_copies<0>();
        fence_async_proxy();
        warpgroup_barrier();
    }

    __device__ __forceinline__ uint64_t keys_of(const Place& place) const {
        return wgmma_rows(shared_address(ring.slot(place)));
    }
    __device__ __forceinline__ uint64_t values_of(const Place& place) const {
        return wgmma_columns(shared_address(ring.slot(place)), kColumnBytes);
    }
    /// The products that used K or V there have ended.
    __device__ __forceinline__ void done() {
        ring.release(at);
        at.go_on();
    }

    /// Sums over the pages begin .. end-1, of one segment. `before_last` is called when q is not needed any more, before the
    /// last values are added.
    template <class F>
    __device__ __forceinline__ void add_segment(int begin, int end, const Sight& sight, Softmax& state,
                                                Output& o, const F& before_last) {
        const float scale = score_scale(kDim);
        const uint64_t q = wgmma_rows(shared_address(ring.queries) + warpgroup() * (kQueryBytes / 2));
        const bool never = sight.keys < 0;
        PageScores s;
        Weights p;
        clear(state, o);
        ring.wait_full(at);
        wgmma_fence();
        start_scores(q, keys_of(at), s);
        wgmma_wait<0>();
        hold(s);
        done();
        sight.hide(begin, s);
        move_maxima(s, scale, state);  // of o there is nothing yet
        weigh(s, scale, state);
        pack(s, p);
#pragma unroll 1
        for (int page = begin + 1; page < end; ++page) {
            ring.wait_full(at);
            await_turn();
            hold(o);
            wgmma_fence();
            start_scores(q, keys_of(at), s);
            const Place keys = at;
            at.go_on();
            ring.wait_full(at);
            wgmma_fence();
            start_values(p, values_of(at), o);
            pass_turn();
            wgmma_wait<1>();
            hold(s);
            ring.release(keys);
            sight.hide(page, s);
            const Rescale rescale = move_maxima(s, scale, state);
            weigh(s, scale, state);
            wgmma_wait<0>();
            hold(p, never);
            hold(o);
            done();
            apply(rescale, o);
            pack(s, p);
        }
        before_last();
        ring.wait_full(at);
        if (end * kKeysPerPage > sight.keys)
            clear_tail(ring.slot(at), max(sight.keys - (end - 1) * kKeysPerPage, 0));
        hold(o);
        wgmma_fence();
        start_values(p, values_of(at), o);
        wgmma_wait<0>();
        hold(p, never);
        hold(o);
        done();
        add_lanes(state);
    }

    /// Sums over all segments of a span; `held` keeps those so far. `gates`: these come in place of q.
    __device__ __forceinline__ void add_span(const Span& span, const Held& held, bool gates, Softmax& state,
                                             Output& o) {
        load_queries(span);
        const Sight sight(c, span);
#pragma unroll 1
        for (int begin = span.begin; begin < span.end; begin += kSegmentPages) {
            const int end = min(begin + kSegmentPages, span.end);
            add_segment(begin, end, sight, state, o, [&] {
                if (!gates || end < span.end) return;
                warpgroup_barrier();
                start_rows(c.gate, span);
            });
            if (begin > span.begin) add_held<true>(held, state, o);
            if (end < span.end) keep(held, state, o);
        }
    }

    /// The warp's rows of y: divided by the sum, gated and rounded in place of the gates, then stored as whole rows.
    __device__ __forceinline__ void store_rows(const Span& span, const Softmax& state,
                                               const Output& o) const {
        const int thread = thread_again(), lane = thread % 32;
        char* warps = own_rows(thread);
        wait_copies<0>();
        __syncwarp();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            char* row = warps + (lane / 4 + 8 * h) * 128 + lane % 4 * 4;
            const float over_sum = 1.0f / state.sum[h];
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) {
                auto* to =
                    reinterpret_cast<uint32_t*>(row + n / 8 * kColumnBytes + (((n ^ (lane / 4)) & 7) << 4));
                *to = gated(o[n][2 * h], o[n][2 * h + 1], over_sum, *to);
            }
        }
        __syncwarp();
        const WarpRows rows = warp_rows(c, span.tile, thread);
#pragma unroll
        for (int r = 0; r < 16; ++r) {
            const int row = __shfl_sync(0xffffffffu, rows.row, r),
                      head = __shfl_sync(0xffffffffu, rows.head, r);
            const uint4 y = *reinterpret_cast<const uint4*>(warps + lane / 8 * kColumnBytes + r * 128 +
                                                            (((lane ^ r) & 7) << 4));
            if (__shfl_sync(0xffffffffu, rows.own, r))
                *reinterpret_cast<uint4*>(c.y + (static_cast<int64_t>(row) * c.heads + head) * kDim +
                                          lane * 8) = y;
        }
        __syncwarp();
    }
};

}  // namespace quern::cuda::attention::prefill

#endif
