// A block of gemm_warpgroups.cuh from its sums to y: they meet in shared memory, [token][row], and go out as 32 bytes, or
// as finish_sum.cuh has it. Blocks of a cluster read each other's sums of prompts; sums of answers they send to the block that
// stores the token, [rank][token][row], since a barrier after which others may read waits for the whole card (cluster.cuh). Of prompts by
// blocks that stay they leave while the ring fills up, as lines.
#pragma once

#include "ggml-like/cuda/comm/tile_sums.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/finish_sum.cuh"
#include "ggml-like/cuda/linear/gemm_store.cuh"
#include "ggml-like/cuda/linear/warpgroup_block.cuh"

#if QUERN_WGMMA

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

template <Kind K, class S>
struct WarpgroupSums : WarpgroupBlock<K, S> {
    using WarpgroupBlock<K, S>::task, WarpgroupBlock<K, S>::place, WarpgroupBlock<K, S>::tiles,
        WarpgroupBlock<K, S>::shared, WarpgroupBlock<K, S>::scales, WarpgroupBlock<K, S>::y_rows,
        WarpgroupBlock<K, S>::sum_barrier, WarpgroupBlock<K, S>::rank_of,
        WarpgroupBlock<K, S>::tokens_of_rank;

    /// Sums to shared memory, once every warp is done with the ring: [token][row].
    template <int kN>
    __device__ __forceinline__ void put_sums(const float (&acc)[kN / 8][4]) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float* to = sums_of(this->side_of_warp() * S::kSideTokens) + this->tile_of_warp() * 16 + g;
        sum_barrier();
#pragma unroll
        for (int j = 0; j < kN / 8; ++j) {
            if (j * 8 >= this->count_of_side()) break;
#pragma unroll
            for (int r = 0; r < 4; ++r) to[(j * 8 + 2 * t + r % 2) * S::kPitch + r / 2 * 8] = acc[j][r];
        }
    }

    __device__ __forceinline__ float* sums_of(int token) const {
        return reinterpret_cast<float*>(shared + StageRing<K, S>::kSumsAt) + token * S::kPitch;
    }
    /// Four sums, of all blocks of the cluster.
    __device__ __forceinline__ float4 sums_at(int at) const {
        const float* here = sums_of(0) + at;
        if constexpr (S::kCluster == 1) return *reinterpret_cast<const float4*>(here);
        float4 sum = load_of_block(shared_address(here), 0);
#pragma unroll
        for (int rank = 1; rank < S::kCluster; ++rank) {
            const float4 v = load_of_block(shared_address(here), rank);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        return sum;
    }

    template <bool kPaired>
    __device__ __forceinline__ void store_sums() const {
        constexpr int kRaw = kPaired ? 16 : 8;  // rows of a thread, for 8 of y
        constexpr int kLanes = S::kTiles * 16 / kRaw;
        constexpr int kEach = S::kSumThreads / kLanes;
        const int raw = static_cast<int>(threadIdx.x) % kLanes * kRaw;
        if (raw >= tiles * 16) return;
        const int row = place.row_block * this->row_step() * (16 / (kRaw / 8)) + raw / (kRaw / 8);
        const int there = task.rows - row;
        float factor[kRaw];
        const float* f =
            task.factor +
            (static_cast<int64_t>(place.expert) * task.tiles + place.row_block * this->row_step()) * 16 + raw;
#pragma unroll
        for (int i = 0; i < kRaw; ++i) factor[i] = f[i] * kRowLift<K>;
        const NormOfEight norm(task, row);
        const int rank = rank_of();
        for (int n = static_cast<int>(threadIdx.x) / kLanes * S::kCluster + rank; n < place.count;
             n += kEach * S::kCluster) {
            float v[kRaw];
            const float scale = scales()[n];
#pragma unroll
            for (int i = 0; i < kRaw; i += 4) {
                const float4 s = sums_at(n * S::kPitch + raw + i);
                v[i] = s.x * factor[i] * scale, v[i + 1] = s.y * factor[i + 1] * scale;
                v[i + 2] = s.z * factor[i + 2] * scale, v[i + 3] = s.w * factor[i + 3] * scale;
            }
            float out[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) out[i] = kPaired ? gated_prompt(v[i], v[i + kRaw - 8]) : v[i];
            store_row(task, out, y_rows()[n], row, there, norm);
        }
    }

    /// Of answers: four rows of a tile for one token, or of paired ones' gate and up, as finish_four wants them.
    struct Four {
        int number, token;    // of the block, of the place
        int row, there, raw;  // of y, of which so many exist; of the block's sums
    };
    __device__ __forceinline__ Four four_at(int i) const {
        const StepOutput& out = task.answer;
        const int fours = out.paired ? 2 : 4, height = out.paired ? task.rows / 2 : task.rows;
        const int each = fours * tiles, number = quotient(i, each), at = i - number * each;
        const int tile = at / fours, r = at % fours * 4;
        const int row = (place.row_block * S::kTiles + tile) * fours * 4 + r;
        return {number, number * S::kCluster + rank_of(), row, height - row, tile * kTileRows + r};
    }
    /// How many a block has; of a cluster's, a thread has one at most.
    __device__ __forceinline__ int fours() const {
        return (task.answer.paired ? 2 : 4) * tiles * tokens_of_rank(rank_of());
    }
    static_assert(!S::kSendsSums || 4 * S::kTiles * S::kOwnTokens <= S::kSumThreads);
    Four own{};  // of a cluster's thread, and what it adds to the sums
    Beside beside{};
    struct Nothing {};
    std::conditional_t<S::kOverRanks, comm::LinePart, Nothing> line{};

    __device__ __forceinline__ comm::TileSums over_ranks() const {
        return comm::TileSums(static_cast<const RankTask&>(task).peers);
    }
    __device__ __forceinline__ void store_four(const Four& four, const Beside& beside) const {
        const StepOutput& out = task.answer;
        const float* factors = task.factor + place.row_block * S::kTiles * kTileRows + four.raw;
        float sum[4], up[4] = {};
        answer_sums(four.number, four.raw, factors, sum);
        if (out.paired) answer_sums(four.number, four.raw + 8, factors + 8, up);
        if constexpr (S::kOverRanks) over_ranks().sum_four(line, sum);
        finish_four(out, place.first + four.token, four.row, sum, up,
                    out.scale.squares != nullptr ? scales()[four.number] : 1.0f, four.there, beside);
    }
    __device__ __forceinline__ void store_answer() const {
        if constexpr (S::kSendsSums) {
            wait_cluster_phase(this->arrived, 0);
            if (own.there > 0) store_four(own, beside);
        } else {
            for (int i = threadIdx.x; i < fours(); i += S::kSumThreads) {
                const Four four = four_at(i);
                if (four.there > 0)
                    store_four(four, load_beside(task.answer, place.first + four.token, four.row));
            }
        }
    }
    /// Four sums of a token, of all blocks in the order of the ranks, times their rows' factors.
    __device__ __forceinline__ void answer_sums(int number, int raw, const float* factor,
                                                float (&sum)[4]) const {
        const auto part = [&](int rank) {
            return *reinterpret_cast<const float4*>(sums_of(rank * S::kOwnTokens + number) + raw);
        };
        float4 v = part(0);
        if constexpr (S::kSendsSums) {
            v = make_float4(0 + v.x, 0 + v.y, 0 + v.z, 0 + v.w);
#pragma unroll
            for (int rank = 1; rank < S::kCluster; ++rank) {
                const float4 more = part(rank);
                v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
            }
        }
        sum[0] = v.x, sum[1] = v.y, sum[2] = v.z, sum[3] = v.w;
        if constexpr (K == Kind::bf16) return;
        const float4 f = *reinterpret_cast<const float4*>(factor);
        sum[0] = scaled(sum[0], f.x), sum[1] = scaled(sum[1], f.y);
        sum[2] = scaled(sum[2], f.z), sum[3] = scaled(sum[3], f.w);
    }
    /// Of answers by a cluster, once all of its blocks are done with their rings: each sum to the block that stores its token.
    template <int kN>
    __device__ __forceinline__ void send_sums(const float (&acc)[kN / 8][4]) {
        sum_barrier();  // the rows' factors are there
        cluster_arrive_only();
        if (threadIdx.x == 0)
            arrive_and_expect(this->arrived, S::kCluster * kTileRows * 4 * tiles * tokens_of_rank(rank_of()));
        if (static_cast<int>(threadIdx.x) < fours()) own = four_at(threadIdx.x);
        if (own.there > 0) beside = load_beside(task.answer, place.first + own.token, own.row);
        if constexpr (S::kOverRanks)
            if (own.there > 0)
                line = over_ranks().part(own.row / kTileRows, place.first + own.token, own.row % kTileRows);
        cluster_wait();
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, tile = this->tile_of_warp();
        if (tile >= tiles) return;
        float* to = sums_of(rank_of() * S::kOwnTokens) + tile * kTileRows + g;
#pragma unroll
        for (int j = 0; j < kN / 8; ++j)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int token = j * 8 + 2 * t + r % 2;
                if (token < place.count)
                    send_to_block(to + token / S::kCluster * S::kPitch + r / 2 * 8, token % S::kCluster,
                                  acc[j][r], this->arrived);
            }
    }

    template <int kN>
    using Number = std::integral_constant<int, kN>;
    /// multiply(n), n a constant: products of absent tokens cost as much as others, so of these numbers it is the smallest that holds
    /// the tokens, which are up to kMost.
    template <int kMost, class F>
    __device__ __forceinline__ void multiply_present(const F& multiply) {
        static_assert(kMost == 32 || kMost == 48 || kMost == 64 || kMost == 96 || kMost == 128 ||
                          kMost == 160 || kMost == 256,
                      "the largest of the numbers below");
        const int count = this->count_of_side();
        if constexpr (kMost == 256) {
            if (count > 224) return multiply(Number<256>{});
            if (count > 208) return multiply(Number<224>{});
            if (count > 192) return multiply(Number<208>{});
            if (count > 160) return multiply(Number<192>{});
        }
        if constexpr (kMost >= 160) {
            if (count > 128) return multiply(Number<160>{});
        }
        if constexpr (kMost >= 128) {
            if (count > 96) return multiply(Number<128>{});
        }
        if constexpr (kMost >= 96) {
            if (count > 80) return multiply(Number<96>{});
            if (count > 64) return multiply(Number<80>{});
        }
        if constexpr (kMost >= 64) {
            if (count > 48) return multiply(Number<64>{});
        }
        if constexpr (kMost >= 48) {
            if (count > 32) return multiply(Number<48>{});
        }
        if (count > 16) return multiply(Number<32>{});
        multiply(Number<16>{});
    }

    /// Products, and the sums to where they meet.
    __device__ __forceinline__ void multiply_all() {
        if constexpr (K == Kind::fp8 && !S::kAnswer)
            if (task.chunk_scales) return multiply_tokens<true>();
        multiply_tokens<false>();
    }
    template <bool kScaled>
    __device__ __forceinline__ void multiply_tokens() {
        multiply_present<kScaled ? S::kScaledTokens : S::kSideTokens>([&]<int kN>(Number<kN>) {
            float acc[kN / 8][4];
            this->template march<kN, false, kScaled>(acc);
            if constexpr (S::kSendsSums)
                send_sums<kN>(acc);
            else
                put_sums<kN>(acc);
        });
    }

    /// Sums to y of a task that stays: by way of shared memory of the warpgroup, [tokens][64 rows] at a time, so that a line
    /// of 128 bytes is written at once. Each warp's 16 rows by themselves are a quarter of one, and 32 bytes take L2 as long.
    /// Sums of tokens that are not there are anything, and nobody stores them.
    template <int kMost>
    __device__ __forceinline__ void store_lines(const float (&acc)[kMost / 8][4], const float2& factor,
                                                const float* scales) const {
        constexpr int kTogether = StageRing<K, S>::kTurned, kEach = kTogether / 16;
        const int thread = static_cast<int>(threadIdx.x) % 128, group = static_cast<int>(threadIdx.x) / 128;
        const int lane = thread % 32, t = lane % 4, there = (tiles - 4 * group) * 2;  // of the line's 8 parts
        if (there <= 0) return;
        const uint32_t lines = shared_address(shared) + StageRing<K, S>::kTurnedAt + group * kTogether * 128;
        const auto spot = [&](int token, int part) {  // without conflicts
            return lines + token * 128 + ((part ^ token % 8) << 4);
        };
        const uint32_t to = spot(lane % 8 + lane / 16 * 8, thread / 32 * 2 + lane / 8 % 2);
        const int part = thread % 8, token = thread / 8;
        const uint32_t from = spot(token, part);
        bf16* y = static_cast<bf16*>(task.y) + (place.first + token) * task.ldy +
                  (place.row_block * this->row_step() + 4 * group) * 16 + part * 8;
        const int left = part < there ? place.count - token : 0;
#pragma unroll
        for (int first = 0; first < kMost; first += kTogether) {
            if (first >= place.count) break;
#pragma unroll
            for (int i = 0; i < kTogether && first + i < kMost; i += 16) {
                const float(&v)[4] = acc[(first + i) / 8], (&w)[4] = acc[(first + i) / 8 + 1];
                const float2 p = *reinterpret_cast<const float2*>(scales + first + i + 2 * t),
                             q = *reinterpret_cast<const float2*>(scales + first + i + 8 + 2 * t);
                store_matrices_transposed(to + i * 128,
                                          {pack_bf16(v[0] * factor.x * p.x, v[1] * factor.x * p.y),
                                           pack_bf16(v[2] * factor.y * p.x, v[3] * factor.y * p.y),
                                           pack_bf16(w[0] * factor.x * q.x, w[1] * factor.x * q.y),
                                           pack_bf16(w[2] * factor.y * q.x, w[3] * factor.y * q.y)});
            }
            group_barrier(group);
            uint4 line[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) line[i] = load_shared(from + i * 16 * 128);
#pragma unroll
            for (int i = 0; i < kEach; ++i)
                if (first + i * 16 < left)
                    *reinterpret_cast<uint4*>(y + (first + i * 16) * task.ldy) = line[i];
            group_barrier(group);
        }
    }
    /// Of a warpgroup.
    __device__ __forceinline__ static void group_barrier(int group) {
        asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
    }
    __device__ __forceinline__ int token_step() const { return S::kAnswer ? S::kTokens : task.box_tokens; }
    __device__ __forceinline__ int places() const {
        return S::kAnswer ? task.row_blocks
                          : task.row_blocks * ((task.tokens + token_step() - 1) / token_step());
    }
    /// One place of a prompt; `at`: how many the block had before.
    template <bool kScaled>
    __device__ __forceinline__ void sum_place(int at) {
        constexpr int kMost = kScaled ? S::kScaledTokens : S::kTokens;
        const int token = static_cast<int>(threadIdx.x), warp = token / 32;
        const bool normed = task.scale.squares != nullptr;
        // Asked for before the products, needed after them.
        float squares = normed && token < place.count ? __ldcg(task.scale.squares + place.first + token) : 0;
        const float* f = task.factor +
                         (place.row_block * this->row_step() + min(warp, tiles - 1)) * kTileRows +
                         token % 32 / 4;
        float low = f[0], high = f[8];
        float acc[kMost / 8][4];
        multiply_present<kMost>([&]<int kN>(Number<kN>) {
            this->template march<kN, true, kScaled>(reinterpret_cast<float(&)[kN / 8][4]>(acc));
        });
        asm volatile("" : "+f"(squares), "+f"(low), "+f"(high));
        // Others may still read those of the place before.
        float* of_place = scales() - at % 2 * S::kTokens;
        of_place[token] = normed ? prompt_factor_of(task.scale, squares) : 1.0f;
        sum_barrier();
        store_lines<kMost>(acc, {low * kRowLift<K>, high * kRowLift<K>}, of_place);
    }
    static_assert(!S::kStays || S::kAnswer || S::kSumThreads == S::kTokens);

    /// Whether the block goes from place to place. Else it puts sums of prompts where the ring was.
    __device__ __forceinline__ bool stays() const { return S::kStays && (S::kAnswer || task.stays); }
    /// Blocks that stay: calls with every place of theirs; of answers all are of the same tokens.
    template <class F>
    __device__ __forceinline__ void for_each_place(const F& f) {
#pragma unroll 1
        for (int id = static_cast<int>(blockIdx.x); id < places(); id += static_cast<int>(gridDim.x)) {
            place = dense_place(task, id, token_step());
            this->find_extent();
            f();
            this->round_begin += this->steps();
        }
    }
    /// One thread that copies. The weights of the first place's first `primed` steps are under way.
    __device__ __forceinline__ void copy_rounds(int primed) {
        for_each_place([&] {
            this->keep_full(primed);
            primed = 0;
        });
    }
    __device__ __forceinline__ void sum_rounds() {
        if constexpr (S::kAnswer) {
            this->find_y_rows();
            for_each_place([&] {
                multiply_all();
                sum_barrier();
                store_answer();
            });
        } else {
            int at = 0;
            if constexpr (K == Kind::fp8)
                if (task.chunk_scales) return for_each_place([&] { sum_place<true>(at++); });
            for_each_place([&] { sum_place<false>(at++); });
        }
    }
};

}  // namespace quern::cuda::linear

#endif
