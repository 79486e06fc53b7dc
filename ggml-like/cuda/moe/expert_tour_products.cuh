// The multiplying warps of expert_tour.cuh: products, and from their sums to y.
#pragma once

#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/moe/expert_tour_memory.cuh"
#include "ggml-like/cuda/pack/weight_chunk.cuh"

#if QUERN_WGMMA

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

template <Kind K>
struct TourProducts : TourMemory<K> {
    using typename TourMemory<K>::Turn;
    using typename TourMemory<K>::S;
    using TourMemory<K>::task;
    using TourMemory<K>::shared;
    using TourMemory<K>::full;
    using TourMemory<K>::empty;
    using TourMemory<K>::tokens_of;
    using TourMemory<K>::weights_of;
    using TourMemory<K>::next_slot;

    struct March {
        int stage = 0;
        uint32_t phase = 0;
    };
    __device__ __forceinline__ void load(int stage, int c, WeightChunk<K>& chunk) const {
        chunk.load(
            weights_of(stage) + static_cast<int>(threadIdx.x) / 32 * S::kTileBytes + c * chunk_bytes(K),
            threadIdx.x % 32);
    }
    /// The descriptor of rows of B further on; the upper half of all of them is one constant.
    __device__ __forceinline__ static uint64_t further(uint32_t rows, uint32_t by) {
        return (wgmma_rows(0) >> 32 << 32 | rows) + by;
    }

    /// Starts acc += a, decoded from chunk c of a stage, x the stage's first kN tokens. kFresh: acc = the same.
    template <int kN, bool kFresh = false>
    __device__ __forceinline__ static void multiply_chunk(uint32_t rows, int c, const uint32_t (&a)[4][4],
                                                          float (&acc)[kN / 8][4]) {
        wgmma_fence();
#pragma unroll
        for (int kk = 0; kk < 4; ++kk) {
            const uint64_t at = further(rows, c * (S::kChunkTokenBytes / 16) + 2 * kk);
            if (kFresh && kk == 0)
                wgmma_fresh<kN>(acc, a[kk], at);
            else
                wgmma<kN>(acc, a[kk], at);
        }
        wgmma_commit();
    }

    /// acc = this warp's 16 rows x the first kN tokens of the tile whose first stage has come. A chunk's codes are read while
    /// the products of the one before run, and decoded behind them: other warpgroups multiply meanwhile.
    template <int kN>
    __device__ __forceinline__ void march(March& m, float (&acc)[kN / 8][4]) const {
        int left = this->steps();
        uint32_t a[4][4];
        WeightChunk<K> chunk;
#pragma unroll
        for (int i = 0; i < kN / 8; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][r] = 0;
        hold(acc);  // the zeros are there before the fence
        load(m.stage, 0, chunk);
#pragma unroll 1
        for (;;) {
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) chunk.fragment(kk, a[kk]);
            const int stage = m.stage;
            // The same in all lanes, which the compiler is told: descriptors are made in registers that lanes share.
            const uint32_t rows = __shfl_sync(
                0xffffffffu, static_cast<uint32_t>(wgmma_rows(shared_address(tokens_of(stage)))), 0);
            multiply_chunk<kN>(rows, 0, a, acc);
#pragma unroll
            for (int c = 1; c < S::kChunks; ++c) {
                load(stage, c, chunk);
                wgmma_wait<0>();
                hold(a, left < 0);
#pragma unroll
                for (int kk = 0; kk < 4; ++kk) chunk.fragment(kk, a[kk]);
                multiply_chunk<kN>(rows, c, a, acc);
            }
            if (++m.stage == S::kStages) m.stage = 0, m.phase ^= 1;
            if (--left > 0) {
                wait_phase(full + m.stage, m.phase);
                load(m.stage, 0, chunk);
            }
            wgmma_wait<0>();
            hold(a, left < 0);
            if (threadIdx.x % 32 == 0) arrive(empty + stage);
            if (left == 0) break;
        }
        hold(acc);
    }

    /// FP8: scales of chunks meet the sums of a stage, whose two chunks are of one block of 128 columns (pack.cu; shard.h cuts at such
    /// blocks). A chunk is decoded while the products of the one before run.
    template <int kN>
    __device__ __forceinline__ void march_scaled(March& m, float (&acc)[kN / 8][4]) const {
        int left = this->steps();
        uint32_t next[4][4];
        float2 next_scale{};
        const auto decode = [&](int c) {
            WeightChunk<K> chunk;
            load(m.stage, c, chunk);
#pragma unroll
            for (int kk = 0; kk < 4; ++kk) chunk.fragment(kk, next[kk]);
            if (c == 0) next_scale = {chunk.scale[0], chunk.scale[1]};
        };
#pragma unroll
        for (int i = 0; i < kN / 8; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) acc[i][r] = 0;
        decode(0);
#pragma unroll 1
        for (;;) {
            const int stage = m.stage;
            const uint32_t rows = __shfl_sync(
                0xffffffffu, static_cast<uint32_t>(wgmma_rows(shared_address(tokens_of(stage)))), 0);
            const float2 scale = next_scale;
            float sum[kN / 8][4];
#pragma unroll
            for (int c = 0; c < S::kChunks; ++c) {
                uint32_t a[4][4];
#pragma unroll
                for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = next[i / 4][i % 4];
                if (c == 0)
                    multiply_chunk<kN, true>(rows, c, a, sum);
                else
                    multiply_chunk<kN>(rows, c, a, sum);
                if (c + 1 < S::kChunks) {
                    decode(c + 1);
                } else {
                    if (++m.stage == S::kStages) m.stage = 0, m.phase ^= 1;
                    if (--left > 0) {
                        wait_phase(full + m.stage, m.phase);
                        decode(0);
                    }
                }
                wgmma_wait<0>();
                hold(a, left < 0);
            }
            if (threadIdx.x % 32 == 0) arrive(empty + stage);
            hold(sum);
            add_scaled(acc, sum, scale);
            if (left == 0) break;
        }
    }

    /// Eight elements of a row of y, of which `there` exist, from shared memory. aligned: rows of y begin at multiples of 16 bytes. Those
    /// of widths that are no multiples of 8 take a small loop, as much code between tiles takes longer to come than to run.
    __device__ __forceinline__ static void put(bf16* y, uint32_t from, int there, bool aligned) {
        if (aligned && there >= 8) {
            *reinterpret_cast<uint4*>(y) = load_shared(from);
            return;
        }
#pragma unroll 1
        for (int i = 0; i < min(there, 8); ++i)
            y[i] = *static_cast<const bf16*>(__cvta_shared_to_generic(from + 2 * i));
    }

    /// Sums j of a lane, two tokens each of its rows g and g + 8, as products.
    template <int kN>
    __device__ __forceinline__ static void scale_sums(float (&v)[4], const float (&acc)[kN / 8][4], int j,
                                                      const TourSlot& s, float low, float high) {
        const float2 scale = *reinterpret_cast<const float2*>(s.scale + 8 * j + 2 * (threadIdx.x % 4));
        v[0] = acc[j][0] * low * scale.x, v[1] = acc[j][1] * low * scale.y;
        v[2] = acc[j][2] * high * scale.x, v[3] = acc[j][3] * high * scale.y;
    }
    /// Results of sums j to j + 3 of a lane, of paired rows: two tokens each.
    template <int kN>
    __device__ __forceinline__ static void gate_sums(uint32_t (&two)[4], const float (&acc)[kN / 8][4], int j,
                                                     const TourSlot& s, float low, float high) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (j + i >= kN / 8) continue;
            float v[4];
            scale_sums<kN>(v, acc, j + i, s, low, high);
            two[i] = pack_bf16(gated_prompt(v[0], v[2]), gated_prompt(v[1], v[3]));
        }
    }
    /// Of a warpgroup.
    __device__ __forceinline__ static void group_barrier() {
        asm volatile("bar.sync %0, 128;" ::"r"(1 + static_cast<int>(threadIdx.x) / 128) : "memory");
    }
    /// From sums to y. The warpgroup's four warps put their 8 x 8 matrices, turned, beside each other in shared memory, so that what is
    /// written at once is 64 or 128 neighbours' bytes of a token: L2 takes as long for 16.
    template <int kN>
    __device__ __forceinline__ void store(const TourSlot& s, const float2& factor,
                                          const float (&acc)[kN / 8][4]) const {
        int id = static_cast<int>(threadIdx.x);
        asm volatile("" : "+r"(id));  // what depends on it takes no registers from products
        const int thread = id % 128, lane = thread % 32, warp = thread / 32, group = id / 128;
        const int tile = s.row_block * S::kTiles + group * 4, count = s.count;
        if (tile >= task.tiles) return;
        const bool of_shared = s.expert < 0;
        bf16* y = static_cast<bf16*>(of_shared ? task.shared.y : task.y);
        const auto ldy = static_cast<uint32_t>(of_shared ? task.shared.ldy : task.ldy);  // see launch_tour
        const bool aligned = (reinterpret_cast<uintptr_t>(y) | uintptr_t{ldy} * 2) % 16 == 0;
        const float low = factor.x * kRowLift<K>, high = factor.y * kRowLift<K>;
        const uint32_t room = shared_address(shared) + S::kTurnedAt + group * 4 * S::kTurnedBytes;
        if (task.paired) {
            // 32 rows of y, 32 tokens at a time
            const auto place = [&](int token, int part) {  // without conflicts
                return room + token * 64 + ((part ^ token / 2 % 4) << 4);
            };
            const int token = thread / 4, part = thread % 4, at = (tile + part) * 8;
            const uint32_t to = place(lane, warp), from = place(token, part);
#pragma unroll
            for (int j = 0; j < kN / 8; j += 4) {
                if (j * 8 >= count) break;
                uint32_t two[4] = {};
                gate_sums<kN>(two, acc, j, s, low, high);
                group_barrier();  // after all have read, and stored few
                store_matrices_transposed(to, two);
                group_barrier();
                const int n = 8 * j + token;
                if (n < count)
                    put(y + (static_cast<uint32_t>(s.first + n) * ldy + at), from, task.rows - at, aligned);
            }
        } else {
            // 64 rows, 16 tokens at a time; of moe_down, whose x needs no factor
            const auto place = [&](int token, int part) {  // without conflicts
                return room + token * 128 + ((part ^ token % 8) << 4);
            };
            const int token = thread / 8, part = thread % 8, at = tile * 16 + part * 8;
            const uint32_t to = place(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2),
                           from = place(token, part);
#pragma unroll
            for (int j = 0; j < kN / 8; j += 2) {
                if (j * 8 >= count) break;
                const float(&v)[4] = acc[j], (&w)[4] = acc[j + 1];
                group_barrier();
                store_matrices_transposed(
                    to, {pack_bf16(v[0] * low, v[1] * low), pack_bf16(v[2] * high, v[3] * high),
                         pack_bf16(w[0] * low, w[1] * low), pack_bf16(w[2] * high, w[3] * high)});
                group_barrier();
                const int n = 8 * j + token;
                if (n < count)
                    put(y + (static_cast<uint32_t>(s.y[n]) * ldy + at), from, task.rows - at, aligned);
            }
        }
        group_barrier();  // before anybody stores few
    }

    /// The same of few tokens, a warp by itself, which waits for no other: four matrices at a time, so that a lane has 8 neighbours.
    template <int kN>
    __device__ __forceinline__ void store_few(const TourSlot& s, const float2& factor,
                                              const float (&acc)[kN / 8][4]) const {
        const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
        const int tile = s.row_block * S::kTiles + warp, count = s.count;
        if (tile >= task.tiles) return;
        const bool of_shared = s.expert < 0;
        bf16* y = static_cast<bf16*>(of_shared ? task.shared.y : task.y);
        const int64_t ldy = of_shared ? task.shared.ldy : task.ldy;
        const bool aligned = (reinterpret_cast<uintptr_t>(y) | static_cast<uintptr_t>(ldy * 2)) % 16 == 0;
        const float low = factor.x * kRowLift<K>, high = factor.y * kRowLift<K>;
        const uint32_t buffer = shared_address(shared) + S::kTurnedAt + warp * S::kTurnedBytes;
        if (task.paired) {  // 8 rows of y, 32 tokens at a time
            const uint32_t own = buffer + lane * 16;
#pragma unroll
            for (int j = 0; j < kN / 8; j += 4) {
                if (j * 8 >= count) break;
                uint32_t two[4] = {};
                gate_sums<kN>(two, acc, j, s, low, high);
                store_matrices_transposed(own, two);
                __syncwarp();
                const int n = 8 * j + lane, at = tile * 8;
                if (n < count) put(y + (s.first + n) * ldy + at, own, task.rows - at, aligned);
                __syncwarp();
            }
        } else {  // 16 rows, 16 tokens at a time; of moe_down, whose x needs no factor
            const auto place = [&](int token, int half) {  // without conflicts
                return buffer + token * 32 + ((half ^ (token >> 2 & 1)) << 4);
            };
            const uint32_t to = place(lane % 8 + lane / 16 * 8, lane / 8 % 2),
                           from = place(lane / 2, lane % 2);
#pragma unroll
            for (int j = 0; j < kN / 8; j += 2) {
                if (j * 8 >= count) break;
                const float(&v)[4] = acc[j], (&w)[4] = acc[j + 1];
                store_matrices_transposed(
                    to, {pack_bf16(v[0] * low, v[1] * low), pack_bf16(v[2] * high, v[3] * high),
                         pack_bf16(w[0] * low, w[1] * low), pack_bf16(w[2] * high, w[3] * high)});
                __syncwarp();
                const int n = 8 * j + lane / 2, at = tile * 16 + lane % 2 * 8;
                if (n < count) put(y + s.y[n] * ldy + at, from, task.rows - at, aligned);
                __syncwarp();
            }
        }
    }

    /// Of the lane's rows l / 4 and l / 4 + 8.
    __device__ __forceinline__ float2 factors(const TourSlot& s) const {
        const int warp = static_cast<int>(threadIdx.x) / 32;
        const int tile = min(s.row_block * S::kTiles + warp, task.tiles - 1);
        const float* f = (s.expert < 0 ? task.shared.factor
                                       : task.factor + static_cast<int64_t>(s.expert) * task.tiles * 16) +
                         tile * 16 + threadIdx.x % 32 / 4;
        return {f[0], f[8]};
    }
    template <int kN>
    __device__ __forceinline__ void multiply(March& m, const TourSlot& s) const {
        constexpr bool kAhead = kN <= 64;  // else there are no registers for them
        float acc[kN / 8][4];
        float2 factor;
        if constexpr (kAhead) factor = factors(s);
        if constexpr (K == Kind::fp8)
            march_scaled<kN>(m, acc);
        else
            march<kN>(m, acc);
        if constexpr (!kAhead) factor = factors(s);
        if constexpr (kN <= 32)
            store_few<kN>(s, factor, acc);
        else
            store<kN>(s, factor, acc);
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
