// Products of chosen experts with rows of prompts on sm_90a, a block an SM that goes from tile to tile.
//
//               tokens of an expert: up to 128
//   256 rows  w0 ..  w3 | sums: 16 rows of the    Sixteen warps multiply, 16 rows of the expert's matrix each; four more keep
//   of its    w4 ..  w7 | matrix x all tokens,    a ring of kStages stages full, each 64 columns of the rows and of the
//   matrix    w8 .. w11 | each warp               tokens. The ring never empties between tiles: sums leave straight from
//             w12.. w15 |                         registers while the next tile's columns arrive.
//
// Tiles: an expert's tokens are cut evenly into as few tiles as hold them; (expert, tile of tokens) slow, 256 rows fast,
// so that neighbouring blocks read the same tokens. Block b takes tile b first, then whichever nobody has taken: they differ
// in size. The copying warps write what a tile is into a slot, which is free once its first stage is.
// Operands: A from registers, decoded there: while the products of two blocks of 16 columns run, the next two are
// decoded. B from shared memory, as many tokens as there are, in steps of 16.
// Order of sums: columns as they come, as everywhere in prompts of experts (gemm_experts.h).
// Traffic: packed weights once per tile of tokens, activations once per 256 rows of the matrix.
// Limits: up to Tour::kMaxExperts experts; weights that warpgroups take.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/gemm_task.cuh"
#include "ggml-like/cuda/moe/expert_shapes.h"
#include "ggml-like/cuda/pack/weight_chunk.cuh"
#include "ggml-like/cuda/ptx/tensor_map.cuh"
#include "ggml-like/cuda/ptx/wgmma.cuh"

#if QUERN_WGMMA

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

/// A tile on its way from the copying warps to the multiplying ones.
struct TourSlot {
    int expert, row_block, count, padding;
    uint32_t x[Tour<Kind::nvfp4>::kTokens];  // rows of x, in 16 bytes
    int y[Tour<Kind::nvfp4>::kTokens];       // rows of y
    float scale[Tour<Kind::nvfp4>::kTokens];
};

/// Of all experts: where their pairs begin, and their tiles of tokens. The last: the ends.
struct TourLists {
    int pairs[Tour<Kind::nvfp4>::kMaxExperts + 1];
    int tiles[Tour<Kind::nvfp4>::kMaxExperts + 1];
    int sums[16];
};
static_assert(sizeof(TourSlot) == Tour<Kind::nvfp4>::kSlotBytes);
static_assert(sizeof(TourLists) <= Tour<Kind::nvfp4>::kListBytes);

template <Kind K>
struct TourBlock {
    using S = Tour<K>;
    static constexpr int kGatherThreads = 64;
    const GemmTask& task;
    const CUtensorMap& w;
    uint8_t* shared;
    uint64_t *full, *empty;    // of stages
    uint64_t *landed, *ready;  // of stages: tokens are there, but not yet for products; of slots

    __device__ __forceinline__ uint8_t* tokens_of(int stage) const { return shared + stage * S::kTokenBytes; }
    __device__ __forceinline__ uint8_t* weights_of(int stage) const {
        return shared + S::kStages * S::kTokenBytes + stage * S::kWeightBytes;
    }
    __device__ __forceinline__ TourSlot& slot(int n) const {
        return reinterpret_cast<TourSlot*>(shared + S::kStages * (S::kTokenBytes + S::kWeightBytes))[n];
    }
    __device__ __forceinline__ TourLists& lists() const {
        return *reinterpret_cast<TourLists*>(&slot(S::kSlots));
    }
    __device__ __forceinline__ int places() const { return lists().tiles[task.experts] * task.row_blocks; }

    __device__ __forceinline__ void init_barriers() const {
        if (threadIdx.x < S::kStages) {
            init_phases(full + threadIdx.x, 2);
            init_phases(empty + threadIdx.x, S::kSumThreads / 32);
            init_phases(landed + threadIdx.x, kGatherThreads);
        }
        if (threadIdx.x < S::kSlots) init_phases(ready + threadIdx.x, 1);
        publish_phases();
    }

    /// All threads; a barrier at the end. A thread has one expert.
    __device__ __forceinline__ void list_tiles() const {
        TourLists& l = lists();
        const int e = threadIdx.x, warp = e / 32, lane = e % 32;
        int own = 0, sum = 0;
        if (warp < 16) {
            const int begin = task.groups[min(e, task.experts)], end = task.groups[min(e + 1, task.experts)];
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

    // ---- the copying warps ----

    struct Place {
        int expert, row_block, first, count;
    };
    /// Whole warps. Place `id`, not before that of `from`'s expert.
    __device__ __forceinline__ Place place_of(int id, int expert) const {
        const TourLists& l = lists();
        Place p{};
        const int tile = quotient(id, task.row_blocks), lane = threadIdx.x % 32;
        p.row_block = id - tile * task.row_blocks;
        for (;;) {  // past experts whose tiles end before it
            const bool past = expert + lane < task.experts && l.tiles[expert + lane + 1] <= tile;
            const int skip = __popc(__ballot_sync(0xffffffffu, past));
            expert += skip;
            if (skip < 32) break;
        }
        p.expert = expert;
        const int begin = l.pairs[expert], pairs = l.pairs[expert + 1] - begin;
        const int tiles = l.tiles[expert + 1] - l.tiles[expert];
        const int each = (quotient(pairs + tiles - 1, tiles) + 15) / 16 * 16;
        const int before = (tile - l.tiles[expert]) * each;
        p.first = begin + before;
        p.count = max(0, min(each, pairs - before));
        return p;
    }
    /// Of the list of `size` that goes round.
    struct Turn {
        int at = 0;
        uint32_t phase = 0;
        __device__ __forceinline__ void next(int size) {
            if (++at == size) at = 0, phase ^= 1;
        }
    };

    /// One warp: what comes when, and the weights.
    __device__ __forceinline__ void conduct() const {
        constexpr int kEach = S::kTokens / 32;
        const int lane = threadIdx.x % 32, all = places(), blocks = static_cast<int>(gridDim.x);
        int id = static_cast<int>(blockIdx.x), pair[kEach];
        float scale[kEach];
        Turn stage, slot_turn;
        Place next{};
        // Every block draws until it gets a place that is not there; the last draw of all leaves zero behind.
        const auto draw = [&] {
            unsigned n = 0;
            if (lane == 0) {
                n = atomicAdd(task.counter, 1u);
                if (n + 1 == static_cast<unsigned>(max(all, blocks))) *task.counter = 0;
            }
            return n;
        };
        const auto drawn = [&](unsigned n) {
            return blocks + static_cast<int>(__shfl_sync(0xffffffffu, n, 0));
        };
        const auto load_pairs = [&](int wanted) {
            next = place_of(wanted, next.expert);
            const int* pairs = task.groups + task.experts + 1 + next.first;
#pragma unroll
            for (int i = 0; i < kEach; ++i) pair[i] = lane + 32 * i < next.count ? pairs[lane + 32 * i] : 0;
        };
        const auto load_scales = [&] {
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                scale[i] = task.scale.squares != nullptr
                               ? prompt_factor(task.scale, quotient(pair[i], task.used))
                               : 1.0f;
        };
        unsigned asked = draw();
        if (id < all) load_pairs(id), load_scales();
        int following = drawn(asked);
        for (;;) {
            const Place place = next;
            wait_phase(empty + stage.at, stage.phase ^ 1);  // of a new barrier: the phase before its first
            TourSlot& s = slot(slot_turn.at);
            if (lane == 0)
                s.expert = place.expert, s.row_block = place.row_block, s.count = id < all ? place.count : 0;
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int token = quotient(pair[i], task.used), n = lane + 32 * i;
                s.x[n] =
                    static_cast<uint32_t>(task.down ? pair[i] : token) * static_cast<uint32_t>(task.ldx8);
                s.y[n] = task.down ? pair[i] + token : pair[i];
                s.scale[n] = scale[i];
            }
            __syncwarp();
            if (lane == 0) arrive(ready + slot_turn.at);
            slot_turn.next(S::kSlots);
            if (id >= all) break;
            const bool more = following < all;
            const int late = min(task.chunks - 1, 4);  // when the next tile's pairs have come
            if (more) asked = draw(), load_pairs(following);
#pragma unroll 1
            for (int step = 0; step < task.chunks; ++step) {
                wait_phase(empty + stage.at, stage.phase ^ 1);
                if (elected()) {
                    arrive_and_expect(full + stage.at, S::kWeightBytes);
                    copy_chunks(weights_of(stage.at), w, step, place.row_block * S::kTiles, place.expert,
                                full + stage.at);
                }
                if (step == late && more) load_scales();
                stage.next(S::kStages);
            }
            id = following;
            if (more) following = drawn(asked);
        }
    }
    /// The next tile, once it is known; null: there is no more.
    __device__ __forceinline__ const TourSlot* next_slot(Turn& turn) const {
        wait_phase(ready + turn.at, turn.phase);
        const TourSlot* s = &slot(turn.at);
        turn.next(S::kSlots);
        return s->count > 0 ? s : nullptr;
    }

    /// One thread: the fence between cp.async and products, where no other copies have to wait for it.
    __device__ __forceinline__ void hand_over() const {
        Turn stage, slot_turn;
        while (next_slot(slot_turn) != nullptr)
#pragma unroll 1
            for (int step = 0; step < task.chunks; ++step) {
                wait_phase(landed + stage.at, stage.phase);
                fence_shared_for_wgmma();
                arrive(full + stage.at);
                stage.next(S::kStages);
            }
    }

    /// Two warps: the tokens.
    __device__ __forceinline__ void gather() const {
        const int thread = static_cast<int>(threadIdx.x) % kGatherThreads;
        const int column = thread % 8, row0 = thread / 8;
        const uint32_t to0 = static_cast<uint32_t>(row0 * 128 + ((column ^ row0) << 4));
        Turn stage, slot_turn;
        while (const TourSlot* found = next_slot(slot_turn)) {
            const TourSlot& s = *found;
            const int count = s.count;
#pragma unroll 1
            for (int step = 0; step < task.chunks; ++step) {
                const int k = step * kChunkCols + column * 8;
                // Weights of columns that are absent are zeros: any that are there will do.
                const int there = k < task.cols ? k : column * 8 < task.cols ? column * 8 : 0;
                const auto* from = reinterpret_cast<const uint8_t*>(task.x + there);
                wait_phase(empty + stage.at, stage.phase ^ 1);
                uint32_t to = shared_address(tokens_of(stage.at)) + to0;
#pragma unroll 1
                for (int n = row0; n < count; n += 32, to += 4096) {
                    uint32_t row[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) row[i] = s.x[n + 8 * i];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (n + 8 * i < count) copy_async_at(to + i * 1024, from + uint64_t{row[i]} * 16);
                }
                arrive_after_copies(landed + stage.at);
                stage.next(S::kStages);
            }
        }
    }

    __device__ __forceinline__ void keep_full() const {
        const int warp = (static_cast<int>(threadIdx.x) - S::kSumThreads) / 32;
        if (warp == 0)
            conduct();
        else if (warp == 1) {
            if (elected()) hand_over();
            __syncwarp();
        } else
            gather();
    }

    // ---- the multiplying warps ----

    struct March {
        int stage = 0;
        uint32_t phase = 0;
    };
    __device__ __forceinline__ void load(int stage, WeightChunk<K>& chunk) const {
        chunk.load(weights_of(stage) + static_cast<int>(threadIdx.x) / 32 * chunk_bytes(K), threadIdx.x % 32);
    }
    template <int kN>
    __device__ __forceinline__ static void add(float (&acc)[kN / 8][4], const uint32_t (&a)[2][4],
                                               uint64_t rows, uint32_t at) {
        const auto further = [&](uint32_t by) {  // carries stay in the lower half
            return (rows & ~uint64_t{0xffffffffu}) | (static_cast<uint32_t>(rows) + by);
        };
        wgmma_fence();
        wgmma<kN>(acc, a[0], further(at));
        wgmma<kN>(acc, a[1], further(at + 2));
        wgmma_commit();
    }

    /// acc = this warp's 16 rows x the first kN tokens of the tile whose first stage has come.
    template <int kN>
    __device__ __forceinline__ void march(March& m, float (&acc)[kN / 8][4]) const {
        int left = task.chunks, done = 0;
        uint32_t even[2][4], odd[2][4] = {};
        WeightChunk<K> chunk;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][r] = 0;
        hold(acc);  // the zeros are there before the fence
        load(m.stage, chunk);
        chunk.fragment(0, even[0]), chunk.fragment(1, even[1]);
#pragma unroll 1
        for (;;) {
            const uint64_t rows = wgmma_rows(shared_address(tokens_of(m.stage)));
            add<kN>(acc, even, rows, 0);
            wgmma_wait<1>();  // the odd ones of the stage before
            hold(odd, left < 0);
            if (left < task.chunks && threadIdx.x % 32 == 0) arrive(empty + done);
            chunk.fragment(2, odd[0]), chunk.fragment(3, odd[1]);
            add<kN>(acc, odd, rows, 4);
            done = m.stage;
            if (++m.stage == S::kStages) m.stage = 0, m.phase ^= 1;
            if (--left == 0) break;
            wait_phase(full + m.stage, m.phase);
            load(m.stage, chunk);
            wgmma_wait<1>();
            hold(even, left < 0);
            chunk.fragment(0, even[0]), chunk.fragment(1, even[1]);
        }
        wgmma_wait<0>();
        hold(even, left < 0);
        hold(odd, left < 0);
        hold(acc);
        if (threadIdx.x % 32 == 0) arrive(empty + done);
    }

    /// Elements of y from `at` on, of which `there` exist.
    template <class V>
    __device__ __forceinline__ void put(int64_t at, V v, int there) const {
        bf16* y = static_cast<bf16*>(task.y) + at;
        if (there >= static_cast<int>(sizeof(V) / 2) && reinterpret_cast<uintptr_t>(y) % sizeof(V) == 0) {
            *reinterpret_cast<V*>(y) = v;
        } else {
            const auto* each = reinterpret_cast<const bf16*>(&v);
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(V) / 2); ++i)
                if (i < there) y[i] = each[i];
        }
    }

    /// Sums j of a lane, two tokens each of its rows g and g + 8, as products.
    template <int kN>
    __device__ __forceinline__ static void scale_sums(float (&v)[4], const float (&acc)[kN / 8][4], int j,
                                                      const TourSlot& s, float low, float high) {
        const float2 scale = *reinterpret_cast<const float2*>(s.scale + 8 * j + 2 * (threadIdx.x % 4));
        v[0] = acc[j][0] * low * scale.x, v[1] = acc[j][1] * low * scale.y;
        v[2] = acc[j][2] * high * scale.x, v[3] = acc[j][3] * high * scale.y;
    }
    /// Eight neighbours of y that the warp has put together at shared address `from`.
    __device__ __forceinline__ void put_eight(int64_t at, uint32_t from, int there) const {
        put(at, load_shared(from), there);
    }

    /// From sums to y. The warp turns four 8 x 8 matrices at a time by way of shared memory, so that a lane has 8 neighbours.
    template <int kN>
    __device__ __forceinline__ void store(const TourSlot& s, const float (&acc)[kN / 8][4]) const {
        const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
        const int tile = s.row_block * S::kTiles + warp, count = s.count;
        if (tile >= task.tiles) return;
        const float* f = task.factor + (static_cast<int64_t>(s.expert) * task.tiles + tile) * 16 + lane / 4;
        const float low = f[0] * kRowLift<K>, high = f[8] * kRowLift<K>;
        const uint32_t buffer = shared_address(shared) + S::kTurnedAt + warp * S::kTurnedBytes;
        if (task.paired) {  // 8 rows of y, 32 tokens at a time
            const uint32_t own = buffer + lane * 16;
#pragma unroll
            for (int j = 0; j < kN / 8; j += 4) {
                if (j * 8 >= count) break;
                uint32_t two[4] = {};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (j + i >= kN / 8) continue;
                    float v[4];
                    scale_sums<kN>(v, acc, j + i, s, low, high);
                    two[i] = pack_bf16(gated_prompt(v[0], v[2]), gated_prompt(v[1], v[3]));
                }
                store_matrices_transposed(own, two);
                __syncwarp();
                const int n = 8 * j + lane, at = tile * 8;
                if (n < count) put_eight(s.y[n] * task.ldy + at, own, task.rows - at);
                __syncwarp();
            }
        } else {                                           // 16 rows, 16 tokens at a time
            const auto place = [&](int token, int half) {  // without conflicts
                return buffer + token * 32 + ((half ^ (token >> 2 & 1)) << 4);
            };
            const uint32_t to = place(lane % 8 + lane / 16 * 8, lane / 8 % 2),
                           from = place(lane / 2, lane % 2);
#pragma unroll
            for (int j = 0; j < kN / 8; j += 2) {
                if (j * 8 >= count) break;
                float v[4], w[4];
                scale_sums<kN>(v, acc, j, s, low, high), scale_sums<kN>(w, acc, j + 1, s, low, high);
                store_matrices_transposed(to, {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                               pack_bf16(w[0], w[1]), pack_bf16(w[2], w[3])});
                __syncwarp();
                const int n = 8 * j + lane / 2, at = tile * 16 + lane % 2 * 8;
                if (n < count) put_eight(s.y[n] * task.ldy + at, from, task.rows - at);
                __syncwarp();
            }
        }
    }

    template <int kN>
    __device__ __forceinline__ void multiply(March& m, const TourSlot& s) const {
        float acc[kN / 8][4];
        march<kN>(m, acc);
        store<kN>(s, acc);
    }
    /// Products of absent tokens cost as much as others.
    __device__ __forceinline__ void multiply_present(March& m, const TourSlot& s) const {
        const int count = s.count;
        if (count > 96) return multiply<128>(m, s);
        if (count > 80) return multiply<96>(m, s);
        if (count > 64) return multiply<80>(m, s);
        if (count > 48) return multiply<64>(m, s);
        if (count > 32) return multiply<48>(m, s);
        if (count > 16) return multiply<32>(m, s);
        multiply<16>(m, s);
    }
    __device__ __forceinline__ void multiply_all() const {
        March m;
        Turn slot_turn;
        while (const TourSlot* s = next_slot(slot_turn)) {
            wait_phase(full + m.stage, m.phase);
            multiply_present(m, *s);
        }
    }
};

}  // namespace quern::cuda::moe

#endif

namespace quern::cuda::moe {

/// Barriers are static shared memory: a kernel that has none was not compiled for sm_90a.
template <Kind K>
__global__ void __launch_bounds__(Tour<K>::kThreads, 1)
    expert_tour(const __grid_constant__ GemmTask task, const __grid_constant__ CUtensorMap w) {
#if QUERN_WGMMA
    using S = Tour<K>;
    extern __shared__ __align__(1024) uint8_t unaligned[];
    __shared__ uint64_t barriers[3 * S::kStages + S::kSlots];
    allow_successor();
    uint8_t* shared = unaligned + (1024 - shared_address(unaligned) % 1024) % 1024;
    const TourBlock<K> block{task,
                             w,
                             shared,
                             barriers,
                             barriers + S::kStages,
                             barriers + 2 * S::kStages,
                             barriers + 3 * S::kStages};
    block.init_barriers();
    if (threadIdx.x < 32 && elected()) prefetch_map(w);
    wait_for_predecessor();
    block.list_tiles();
    if (threadIdx.x >= S::kSumThreads) {
        shrink_registers<32>();
        block.keep_full();
    } else {
        grow_registers<112>();
        block.multiply_all();
    }
#endif
}

}  // namespace quern::cuda::moe
