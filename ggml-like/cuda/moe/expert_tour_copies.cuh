// The copying warps of expert_tour.cuh: which tile comes next, and its weights and tokens.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/moe/expert_tour_memory.cuh"

#if QUERN_WGMMA

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

template <Kind K>
struct TourCopies : TourMemory<K> {
    using typename TourMemory<K>::Turn;
    using typename TourMemory<K>::S;
    using TourMemory<K>::task;
    using TourMemory<K>::w;
    using TourMemory<K>::shared_w;
    using TourMemory<K>::x;
    using TourMemory<K>::shared_x;
    using TourMemory<K>::full;
    using TourMemory<K>::empty;
    using TourMemory<K>::ready;
    using TourMemory<K>::tokens_of;
    using TourMemory<K>::weights_of;
    using TourMemory<K>::slot;
    using TourMemory<K>::lists;
    using TourMemory<K>::next_slot;
    using TourMemory<K>::steps;

    /// Number `i` of groups, past the first cache.
    __device__ __forceinline__ int group(int i) const { return __ldcg(task.groups + i); }

    /// All threads; a barrier at the end. A thread has one expert.
    __device__ __forceinline__ void list_tiles() const {
        TourLists& l = lists();
        const int e = threadIdx.x, warp = e / 32, lane = e % 32;
        int own = 0, sum = 0;
        if (warp < 16) {
            const int begin = group(min(e, task.experts)), end = group(min(e + 1, task.experts));
            own = (end - begin + S::kTokens - 1) / S::kTokens;
            if (e < task.experts) l.pairs[e] = begin, l.pairs[e + 1] = end;  // neighbours write the same
            sum = own;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, sum, d);
                if (lane >= d) sum += other;
            }
            if (lane == 31) l.sums[warp] = sum;
        }
        __syncthreads();
        if (warp < 16) {
            for (int i = 0; i < warp; ++i) sum += l.sums[i];
            if (e < task.experts) l.tiles[e + 1] = sum;
            if (e == 0) l.tiles[0] = 0;
        }
        __syncthreads();
    }

    __device__ __forceinline__ int shared_tiles() const {
        return (task.shared.tokens + S::kTokens - 1) / S::kTokens;
    }
    __device__ __forceinline__ int places() const {
        return (shared_tiles() + lists().tiles[task.experts]) * task.row_blocks;
    }
    /// Whether experts have a full tile of tokens or more on average, so that most weights are read several times.
    __device__ __forceinline__ bool many_tiles() const {
        return task.tokens * task.used >= task.experts * S::kTokens;
    }
    struct Place {
        int expert, row_block, first, count;
    };
    /// Tile `tile` of `tiles` of pairs [begin, begin + pairs).
    __device__ __forceinline__ static void cut(Place& p, int begin, int pairs, int tile, int tiles) {
        const int each = (quotient(pairs + tiles - 1, tiles) + 15) / 16 * 16, before = tile * each;
        p.first = begin + before;
        p.count = max(0, min(each, pairs - before));
    }
    /// Whole warps. Place `id`, not before those of `expert`; the shared expert's, which are full, come first.
    __device__ __forceinline__ Place place_of(int id, int expert) const {
        const TourLists& l = lists();
        Place p{};
        int tile = quotient(id, task.row_blocks);
        const int lane = threadIdx.x % 32, of_shared = shared_tiles();
        p.row_block = id - tile * task.row_blocks;
        p.expert = -1;
        if (tile < of_shared) {
            cut(p, 0, task.shared.tokens, tile, of_shared);
            return p;
        }
        tile -= of_shared, expert = max(expert, 0);
        for (;;) {  // past experts whose tiles end before it
            const bool past = expert + lane < task.experts && l.tiles[expert + lane + 1] <= tile;
            const int skip = __popc(__ballot_sync(0xffffffffu, past));
            expert += skip;
            if (skip < 32) break;
        }
        p.expert = expert;
        cut(p, l.pairs[expert], l.pairs[expert + 1] - l.pairs[expert], tile - l.tiles[expert],
            l.tiles[expert + 1] - l.tiles[expert]);
        return p;
    }
    /// Every block draws until it gets a place that is not there; the last draw of all leaves zero behind. Lane 0 has the number.
    __device__ __forceinline__ unsigned draw(int all) const {
        if (threadIdx.x % 32 > 0) return 0;
        const unsigned n = atomicAdd(task.counter, 1u);
        if (n + 1 == static_cast<unsigned>(max(all, static_cast<int>(gridDim.x)))) *task.counter = 0;
        return n;
    }
    __device__ __forceinline__ int drawn(unsigned n) const {
        return static_cast<int>(gridDim.x) + static_cast<int>(__shfl_sync(0xffffffffu, n, 0));
    }

    /// Pair n of a place, or its last; of the shared expert the token itself.
    __device__ __forceinline__ int pair_of(const Place& p, int n) const {
        n = min(n, max(p.count - 1, 0));
        return p.expert < 0 ? p.first + n : group(task.experts + 1 + p.first + n);
    }
    __device__ __forceinline__ int token_of(int pair, int expert) const {
        return expert < 0 ? pair : quotient(pair, task.used);
    }
    __device__ __forceinline__ float scale_of(int pair, int expert) const {
        return task.scale.squares != nullptr ? prompt_factor(task.scale, token_of(pair, expert)) : 1.0f;
    }
    /// Of moe_down, where a token's row of y is.
    __device__ __forceinline__ void name_row(TourSlot& s, int n, int pair) const {
        if (!task.down) return;
        const int token = token_of(pair, s.expert);
        s.y[n] = s.expert < 0 ? token : pair + token;
    }
    /// A tile's tokens from the 33rd on.
    __device__ __forceinline__ void name_others(TourSlot& s, const Place& p) const {
        constexpr int kEach = S::kTokens / 32;
        const int lane = threadIdx.x % 32;
        int pair[kEach];
        float scale[kEach];
#pragma unroll
        for (int i = 1; i < kEach; ++i) pair[i] = 32 * i < p.count ? pair_of(p, lane + 32 * i) : 0;
#pragma unroll
        for (int i = 1; i < kEach; ++i) scale[i] = 32 * i < p.count ? scale_of(pair[i], p.expert) : 1.0f;
#pragma unroll
        for (int i = 1; i < kEach; ++i)
            name_row(s, lane + 32 * i, pair[i]), s.scale[lane + 32 * i] = scale[i];
    }
    /// Tells of the next tile, or by one without tokens that there is none. `pair`: of the lane's first token, whose factor comes
    /// later. The slot is free: all stages of the tile before have been waited for, so that of kStages + 1 stages back was freed by all
    /// multiplying warps, who had stored all tiles before its own, and the tile that had the slot is one of these.
    __device__ __forceinline__ void tell(Turn& turn, const Place& p, int count, int pair) const {
        const int lane = threadIdx.x % 32;
        TourSlot& s = slot(turn.at);
        if (lane == 0) s.row_block = p.row_block, s.count = count, s.first = p.first;
        s.expert = p.expert;
        name_row(s, lane, pair);
        if (count > 32) name_others(s, p);
        __syncwarp();
        if (lane == 0) arrive(ready + turn.at);
        turn.next(S::kSlots);
    }

    /// One warp: what comes when, and the weights. What a tile is, is told before there is room for it, so that tokens come as soon as
    /// weights do.
    __device__ __forceinline__ void conduct() const {
        const int lane = threadIdx.x % 32, all = places();
        int id = static_cast<int>(blockIdx.x), pair = 0;
        Turn stage, slot_turn;
        Place next{};
        const auto find = [&](int wanted) {
            next = place_of(wanted, next.expert), pair = pair_of(next, lane);
        };
        unsigned asked = draw(all);
        if (id < all) find(id);
        int following = drawn(asked);
        for (;;) {
            const Place place = next;
            float* scales = slot(slot_turn.at).scale + lane;
            tell(slot_turn, place, id < all ? place.count : 0, pair);
            if (id >= all) break;
            const float scale = scale_of(pair, place.expert);
            const bool more = following < all;
            const int late = min(steps() - 1, 2);  // when the factor has come
            if (more) asked = draw(all), find(following);
#pragma unroll 1
            for (int step = 0; step < steps(); ++step) {
                // of a new barrier: the phase before its first
                wait_phase(empty + stage.at, stage.phase ^ 1);
                if (step == late) {
                    *scales = scale;
                    __syncwarp();
                }
                if (elected()) {
                    arrive_and_expect(full + stage.at, S::kWeightBytes);
                    copy_chunks(weights_of(stage.at), place.expert < 0 ? shared_w : w, step * S::kChunks,
                                place.row_block * S::kTiles, max(place.expert, 0), full + stage.at,
                                many_tiles());
                }
                stage.next(S::kStages);
            }
            id = following;
            if (more) following = drawn(asked);
        }
    }
    /// One thread: the tokens.
    __device__ __forceinline__ void bring() const {
        wait_for_predecessor();
        Turn stage, slot_turn;
        while (const TourSlot* found = next_slot(slot_turn)) {
            const int first = found->first, boxes = (found->count + S::kBoxTokens - 1) / S::kBoxTokens;
            const CUtensorMap& from = found->expert < 0 ? shared_x : x;
#pragma unroll 1
            for (int step = 0; step < steps(); ++step) {
                wait_phase(empty + stage.at, stage.phase ^ 1);
                arrive_and_expect(full + stage.at, boxes * S::kChunks * (S::kBoxTokens * 128));
                uint8_t* to = tokens_of(stage.at);
#pragma unroll 1
                for (int i = 0; i < boxes; ++i, to += S::kBoxTokens * 128)
#pragma unroll
                    for (int c = 0; c < S::kChunks; ++c)
                        copy_box(to + c * S::kChunkTokenBytes, from, (step * S::kChunks + c) * kChunkCols,
                                 first + i * S::kBoxTokens, full + stage.at);
                stage.next(S::kStages);
            }
        }
    }

    __device__ __forceinline__ void keep_full() const {
        const int warp = (static_cast<int>(threadIdx.x) - S::kSumThreads) / 32;
        if (warp == 0) conduct();
        if (warp != 1) return;
        if (elected()) bring();
        __syncwarp();
    }
};

}  // namespace quern::cuda::moe

#endif
