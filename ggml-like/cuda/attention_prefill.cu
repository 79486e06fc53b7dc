// Causal attention of many rows, after attention_prepare.
//
//   block = 16 query rows x 8 heads of one KV head (128 rows of M), all keys they may see, 32 a step
//   warp  = 16 rows of M: q (64 registers), O[16, 256] (128) and S[16, 32]; softmax inside the warp
//   keys  = K, V [32, 256] of three steps in a ring; step j + 2 is copied while j is computed
//
// Memory: q, gate and y once; K and V once a block, mostly from L2: 2 KB a key for 128 rows. Traffic of
// shared memory bounds the speed: each warp reads every tile. Blocks with the most keys of a sequence start
// first. Limits: head_dim 256, at most 8 query heads a KV head (fewer: more rows a block), 96 KB of shared
// memory.
#include "ggml-like/cuda/attention.cuh"
#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda {
namespace {

constexpr int kDim = 256, kSteps = kDim / 16;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = 16 * kWarps;
constexpr int kKeys = 32, kStages = 3;
constexpr int kTileBytes = kKeys * kDim * 2, kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes;
static_assert(kWarps == 8 && kRows * kDim * 2 <= 2 * kStageBytes && kSharedBytes <= 99 * 1024);
constexpr float kSlack = 8;  // a maximum may be exceeded by 2^8 before the sums are rescaled

/// Rows of one sequence and the KV head that a block works on.
struct Tile {
    int first, rows, sequence, kv_head;
};

/// Tile `index` counted from the end of the batch: within a sequence the rows with the most keys come first.
__device__ __forceinline__ bool find_tile(const AttentionCall& c, int index, int tile_rows, Tile& tile) {
    for (int s = c.sequences - 1; s >= 0; --s) {
        const int begin = c.start[s], end = c.start[s + 1], tiles = (end - begin + tile_rows - 1) / tile_rows;
        if (index < tiles) {
            tile.first = begin + (tiles - 1 - index) * tile_rows;
            tile.rows = min(tile_rows, end - tile.first);
            tile.sequence = s;
            return true;
        }
        index -= tiles;
    }
    return false;
}

/// Copies 32 keys and values; 16-byte piece p of row r lies at p ^ (r % 8). Keys from `keys` on become zeros.
__device__ __forceinline__ void start_tile(const AttentionCall& c, const Tile& tile, int page, int step,
                                           int keys, char* stage) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int key = step * kKeys + warp;
    const int64_t place =
        ((static_cast<int64_t>(page) * c.kv_heads + tile.kv_head) * kKeysPerPage + key % kKeysPerPage) *
            kDim +
        lane * 8;
    char* to = stage + warp * kDim * 2 + ((lane ^ warp) << 4);
#pragma unroll
    for (int i = 0; i < kKeys / kWarps; ++i) {
        const bool valid = key + i * kWarps < keys;
        copy_async16(to + i * kWarps * kDim * 2, c.k_cache + place + i * kWarps * kDim, valid);
        copy_async16(to + kTileBytes + i * kWarps * kDim * 2, c.v_cache + place + i * kWarps * kDim, valid);
    }
}

/// The 16 rows of M of a warp: lane r % 16 knows row r.
struct WarpRows {
    int row, head;
    bool own;  // false: padding up to 16, a copy of another row
};

__device__ __forceinline__ WarpRows warp_rows(const AttentionCall& c, const Tile& tile) {
    const int group = c.heads / c.kv_heads, m = threadIdx.x / 32 * 16 + threadIdx.x % 16;
    return {tile.first + min(m / group, tile.rows - 1), tile.kv_head * group + m % group,
            m / group < tile.rows};
}

/// Starts copying the warp's rows of q or the gate, 512 bytes each.
__device__ __forceinline__ void start_rows(const HeadRows& from, const WarpRows& rows, int lane, char* to) {
#pragma unroll
    for (int r = 0; r < 16; ++r) {
        const int row = __shfl_sync(0xffffffffu, rows.row, r), head = __shfl_sync(0xffffffffu, rows.head, r);
        copy_async16(to + r * kDim * 2 + ((lane ^ (r & 7)) << 4), from.at(row, head) + lane * 8);
    }
}

/// A operands of the warp's rows.
__device__ __forceinline__ void load_queries(uint32_t rows, int lane, uint32_t (&q)[kSteps][4]) {
    const uint32_t base = rows + lane % 16 * kDim * 2 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) load_matrices(q[s], (base ^ ((2 * s & 7) << 4)) + (s >> 2) * 128);
}

using Scores = float[kKeys / 8][4];
using Output = float[kDim / 8][4];

__device__ __forceinline__ void score(uint32_t k_tile, const uint32_t (&q)[kSteps][4], int lane, Scores& s) {
    const uint32_t base =
        k_tile + (lane % 8 + lane / 16 * 8) * kDim * 2 + (((lane / 8 & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
            uint32_t k[4];
            load_matrices(k, (base ^ ((2 * i & 7) << 4)) + (i >> 2) * 128 + n * 16 * kDim * 2);
            mma(s[2 * n], q[i], k[0], k[1]);
            mma(s[2 * n + 1], q[i], k[2], k[3]);
        }
}

__device__ __forceinline__ float over_row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// Running softmax of the lane's two rows; sums are still per lane.
struct Softmax {
    float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
};

/// Scores to probabilities. The maximum may lag behind by kSlack, so that the output is rarely rescaled.
__device__ __forceinline__ void softmax(Scores& s, float scale, Softmax& state, Output& o) {
    float highest[2];
    bool exceeded = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) x = fmaxf(x, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
        highest[h] = over_row_max(x) * scale;
        exceeded |= highest[h] > state.maximum[h] + kSlack;
    }
    if (__any_sync(0xffffffffu, exceeded)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float now = fmaxf(state.maximum[h], highest[h]), f = fast_exp2(state.maximum[h] - now);
            state.maximum[h] = now;
            state.sum[h] *= f;
#pragma unroll
            for (int n = 0; n < kDim / 8; ++n) o[n][2 * h] *= f, o[n][2 * h + 1] *= f;
        }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            s[n][e] = fast_exp2(fmaf(s[n][e], scale, -state.maximum[e / 2]));
            state.sum[e / 2] += s[n][e];
        }
}

__device__ __forceinline__ void add_values(uint32_t v_tile, const Scores& p, int lane, Output& o) {
    const uint32_t base = v_tile + lane % 16 * kDim * 2 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
        const uint32_t a[4] = {pack_bf16(p[2 * k][0], p[2 * k][1]), pack_bf16(p[2 * k][2], p[2 * k][3]),
                               pack_bf16(p[2 * k + 1][0], p[2 * k + 1][1]),
                               pack_bf16(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int j = 0; j < kDim / 16; ++j) {
            uint32_t v[4];
            load_matrices_transposed(v, (base ^ ((2 * j & 7) << 4)) + (j >> 2) * 128 + k * 16 * kDim * 2);
            mma(o[2 * j], a, v[0], v[1]);
            mma(o[2 * j + 1], a, v[2], v[3]);
        }
    }
}

__device__ __forceinline__ void mask(Scores& s, int key, int last0, int last1) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (key + 8 * n + e % 2 > (e < 2 ? last0 : last1)) s[n][e] = -INFINITY;
}

/// Normalizes, gates and rounds the warp's rows over the gates in shared memory, then stores whole rows.
__device__ __forceinline__ void store_rows(const AttentionCall& c, const WarpRows& rows, const Output& o,
                                           Softmax& state, int lane, char* gates) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = state.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float r = 1.0f / sum;
        char* row = gates + (lane / 4 + 8 * h) * kDim * 2 + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            auto* at = reinterpret_cast<uint32_t*>(row + ((n ^ (lane / 4)) << 4));
            const float2 g = unpack_bf16(*at);
            *at = pack_bf16(o[n][2 * h] * r * sigmoid(g.x), o[n][2 * h + 1] * r * sigmoid(g.y));
        }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 16; ++r) {
        const int row = __shfl_sync(0xffffffffu, rows.row, r), head = __shfl_sync(0xffffffffu, rows.head, r);
        const uint4 y = *reinterpret_cast<const uint4*>(gates + r * kDim * 2 + ((lane ^ (r & 7)) << 4));
        if (__shfl_sync(0xffffffffu, rows.own, r))
            *reinterpret_cast<uint4*>(c.y + (static_cast<int64_t>(row) * c.heads + head) * kDim + lane * 8) =
                y;
    }
}

__global__ void __launch_bounds__(kThreads, 1)
    attention_prefill_kernel(const __grid_constant__ AttentionCall c) {
    extern __shared__ __align__(1024) char shared[];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int tile_rows = kRows / (c.heads / c.kv_heads);
    Tile tile;
    tile.kv_head = static_cast<int>(blockIdx.x) % c.kv_heads;
    const bool found = find_tile(c, blockIdx.x / c.kv_heads, tile_rows, tile);
    wait_for_predecessor();
    if (!found) return;

    // q takes stages 0 and 1 first, the first keys stage 2.
    const WarpRows rows = warp_rows(c, tile);
    char* own_rows = shared + warp * 16 * kDim * 2;
    start_rows({c.rotated, static_cast<int64_t>(c.heads) * kDim, kDim}, rows, lane, own_rows);
    commit_copies();
    const int first_position = c.positions[tile.first], keys = c.positions[tile.first + tile.rows - 1] + 1;
    const int steps = (keys + kKeys - 1) / kKeys;
    const int* pages = c.pages + tile.sequence * c.page_row;
    const auto page_of = [&](int step) { return pages[min(step, steps - 1) * kKeys / kKeysPerPage]; };
    int page = page_of(0), stage = kStages - 1;
    start_tile(c, tile, page, 0, keys, shared + stage * kStageBytes);
    commit_copies();
    page = page_of(1);
    int last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) last[h] = c.positions[__shfl_sync(0xffffffffu, rows.row, lane / 4 + 8 * h)];
    wait_copies<1>();
    __syncwarp();
    uint32_t q[kSteps][4];
    load_queries(shared_address(own_rows), lane, q);
    __syncthreads();
    if (steps > 1) start_tile(c, tile, page, 1, keys, shared);
    commit_copies();
    page = page_of(kStages - 1);

    Output o;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = 0;
    Softmax state;
    const float scale = score_scale(kDim);
    for (int step = 0; step < steps; ++step) {
        wait_copies<kStages - 2>();
        __syncthreads();
        const int ahead = step + kStages - 1, free_stage = stage == 0 ? kStages - 1 : stage - 1;
        if (ahead < steps) start_tile(c, tile, page, ahead, keys, shared + free_stage * kStageBytes);
        commit_copies();
        page = page_of(ahead + 1);

        const uint32_t k_tile = shared_address(shared + stage * kStageBytes);
        Scores s;
        score(k_tile, q, lane, s);
        if ((step + 1) * kKeys - 1 > first_position) mask(s, step * kKeys + 2 * (lane % 4), last[0], last[1]);
        softmax(s, scale, state, o);
        add_values(k_tile + kTileBytes, s, lane, o);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    __syncthreads();  // the ring is free
    start_rows(c.gate, rows, lane, own_rows);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    store_rows(c, rows, o, state, lane, own_rows);
}

}  // namespace

void attention_prefill(const AttentionCall& call, Context& context) {
    const int tile_rows = kRows / (call.heads / call.kv_heads),
              tiles = call.tokens / tile_rows + call.sequences;
    launch(context, "gated_attention prefill", attention_prefill_kernel, dim3(tiles * call.kv_heads),
           dim3(kThreads), kSharedBytes, call);
}

}  // namespace quern::cuda
