// prefill_scan_warpgroups.cu's shared memory, and what its two warpgroups do with one chunk.
//
// Products are those of prefill_scan_products.cuh, in the same order of sums: the left operand, with v along the rows, is in
// registers, the right one in shared memory. x_k and x_q: 64 columns are rows of 128 bytes, swizzled. A and P: Square.
#pragma once

#include "ggml-like/cuda/delta/prefill_scan.cuh"
#include "ggml-like/cuda/ptx/phases.cuh"
#include "ggml-like/cuda/ptx/wgmma_pieces.cuh"

namespace quern::cuda::delta::warpgroups {

using namespace ptx;

constexpr int kColumns = kScanColumns;   // of v, of a block; 16 a warp
constexpr int kBoxBytes = kChunk * 128;  // 64 columns of a chunk's rows
constexpr int kKeyStages = 3, kQueryStages = 2, kPassed = 2;

/// A Triangle with the zeros above its diagonal, which products of 64 rows read, too: 8 rows of two matrices for each column of
/// blocks.
using Square = uint32_t[4][8][2][32];
constexpr int kColumnBytes = sizeof(Square) / 4;

struct __align__(1024) KeyTiles {
    uint8_t k[2][kBoxBytes], v[kBoxBytes];
};
struct __align__(1024) QueryTiles {
    uint8_t q[2][kBoxBytes];
};
struct KeyFactors {
    float error[kChunk], write[kChunk], last[kChunk];
};
/// What a state warp passes to its output warp, as left operands: the S before the chunk, and U.
struct Passed {
    uint4 state[kDim / 16][4][32];
    uint4 u[kChunk / 16][4][32];
};

/// Barriers of a ring: full and empty.
template <int kStages>
struct Turns {
    uint64_t full[kStages], empty[kStages];
};

struct Shared {
    KeyTiles keys[kKeyStages];
    QueryTiles queries[kQueryStages];
    Square solve[kKeyStages][2];  // A, and what its rounding left
    Square scores[kQueryStages];
    KeyFactors factors[kKeyStages];
    float read[kQueryStages][kChunk];
    Passed passed[kPassed];
    Turns<kKeyStages> key_turns;
    Turns<kQueryStages> query_turns;
    uint64_t state_full[kPassed], u_full[kPassed], passed_empty[kPassed];
};
static_assert(sizeof(Shared) + 1024 <= kWarpgroupScanBytes);

#if QUERN_WGMMA

/// A ring's place, and how often it has gone round.
template <int kStages>
struct Place {
    int at = 0;
    uint32_t phase = 0;
    __device__ __forceinline__ void next() {
        if (++at == kStages) at = 0, phase ^= 1;
    }
};

/// A warp: all of its lanes are done with what the barrier is about.
__device__ __forceinline__ void arrive_warp(uint64_t* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

/// What a step of 16 columns of k adds to a descriptor of a tile.
__device__ __forceinline__ constexpr int columns_on(int d) { return d / 4 * (kBoxBytes >> 4) + d % 4 * 2; }
/// The descriptor of column j of a square's blocks.
__device__ __forceinline__ uint64_t square_column(uint32_t square, int j) {
    return wgmma_matrices(square + j * kColumnBytes, 128, 256);
}

/// sum += left M^T for M in a square.
__device__ __forceinline__ void multiply_square(float (&sum)[8][4], const uint32_t (&left)[4][4],
                                                uint32_t square) {
#pragma unroll
    for (int j = 0; j < 4; ++j) wgmma<64>(sum, left[j], square_column(square, j));
}

/// Rows of K and V from `rows` on become zeros, as nobody knows what they are, and 0 times what may be NaN is NaN. By the state's
/// warpgroup.
__device__ __forceinline__ void clear_rows(KeyTiles& tiles, int rows) {
    const int pieces = (kChunk - rows) * 8;
    uint8_t* const boxes[3] = {tiles.k[0], tiles.k[1], tiles.v};
#pragma unroll
    for (uint8_t* box : boxes)
        for (int i = threadIdx.x; i < pieces; i += 128)
            *reinterpret_cast<uint4*>(box + rows * 128 + i * 16) = uint4{};
    fence_async_proxy();
    asm volatile("bar.sync 1, 128;" ::: "memory");
}

/// One chunk of the state's warpgroup: S [64 v, 128 k] moves on by up to 64 rows. `never`: as for hold().
__device__ __forceinline__ void advance_state(Shared& shared, float (&s)[16][4], const Place<kKeyStages>& key,
                                              const Place<kPassed>& pass, bool never) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    KeyTiles& tiles = shared.keys[key.at];
    const KeyFactors& factors = shared.factors[key.at];
    Passed& passed = shared.passed[pass.at];
    float sum[8][4] = {};
    {
        uint32_t high[8][4], low[8][4];
        const uint64_t k = wgmma_rows(shared_address(tiles.k));
        hold(sum);  // the zeros are there before the fence
#pragma unroll
        for (int d = 0; d < 8; ++d) {
            split_state(s, d, high[d], low[d]);
            wgmma_fence();
            wgmma<64>(sum, low[d], k + columns_on(d));
            wgmma<64>(sum, high[d], k + columns_on(d));
        }
        wgmma_commit();
        // Meanwhile `high` is read, by these stores and by the products; nothing writes it before hold().
        wait_phase(shared.passed_empty + pass.at, pass.phase ^ 1);
#pragma unroll
        for (int d = 0; d < 8; ++d)
            passed.state[d][warp][lane] = make_uint4(high[d][0], high[d][1], high[d][2], high[d][3]);
        arrive_warp(shared.state_full + pass.at);
        wgmma_wait<0>();
        hold(sum);
        hold(high, never), hold(low, never);
    }
    float u[8][4] = {};
    {
        uint32_t high[4][4], low[4][4];
        const uint32_t v = shared_address(tiles.v), solve = shared_address(shared.solve[key.at]);
        const auto v_at = [&](int row, int part) {
            return v + row * 128 + (((2 * warp + part) ^ (row & 7)) << 4);
        };
        find_errors(high, low, sum, factors.error, v_at, lane);
        hold(u);
        wgmma_fence();
        multiply_square(u, low, solve);
        multiply_square(u, high, solve);
        multiply_square(u, high, solve + sizeof(Square));
        wgmma_commit();
        const float last = factors.last[0];
#pragma unroll
        for (int t = 0; t < 16; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[t][e] *= last;
        wgmma_wait<0>();
        hold(u);
        hold(high, never), hold(low, never);
    }
    uint32_t high[4][4], low[4][4];
    const uint64_t k = wgmma_columns(shared_address(tiles.k), kBoxBytes);
    hold(s);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        uint32_t plain[4];
        split_update(u, j, factors.write, lane, plain, high[j], low[j]);
        passed.u[j][warp][lane] = make_uint4(plain[0], plain[1], plain[2], plain[3]);
        wgmma_fence();
        wgmma_by_columns(s, low[j], k + j * 128);
        wgmma_by_columns(s, high[j], k + j * 128);
    }
    wgmma_commit();
    arrive_warp(shared.u_full + pass.at);
    wgmma_wait<0>();
    hold(s);
    hold(high, never), hold(low, never);
    arrive_warp(shared.key_turns.empty + key.at);
}

/// One chunk of the outputs' warpgroup: o [64 v, 64 rows].
__device__ __forceinline__ void find_output(Shared& shared, float (&o)[8][4],
                                            const Place<kQueryStages>& query, const Place<kPassed>& pass,
                                            bool never) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const Passed& passed = shared.passed[pass.at];
    const auto take = [](uint32_t(&to)[4], const uint4& v) {
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    };
    uint32_t state[8][4];
    wait_phase(shared.state_full + pass.at, pass.phase);
#pragma unroll
    for (int d = 0; d < 8; ++d) take(state[d], passed.state[d][warp][lane]);
    const uint64_t q = wgmma_rows(shared_address(shared.queries[query.at].q));
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[t][e] = 0;
    hold(o);
    wait_phase(shared.query_turns.full + query.at, query.phase);
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < 8; ++d) wgmma<64>(o, state[d], q + columns_on(d));
    wgmma_commit();
    wgmma_wait<0>();
    hold(o);
    hold(state, never);
    scale_rows(o, shared.read[query.at], lane);
    uint32_t u[4][4];
    wait_phase(shared.u_full + pass.at, pass.phase);
#pragma unroll
    for (int j = 0; j < 4; ++j) take(u[j], passed.u[j][warp][lane]);
    arrive_warp(shared.passed_empty + pass.at);
    hold(o);
    wgmma_fence();
    multiply_square(o, u, shared_address(shared.scores[query.at]));
    wgmma_commit();
    wgmma_wait<0>();
    hold(o);
    hold(u, never);
    arrive_warp(shared.query_turns.empty + query.at);
}

#endif

}  // namespace quern::cuda::delta::warpgroups
