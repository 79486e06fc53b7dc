// Causal attention of prompt rows, after attention_prepare.
//
//   tile    = 16 query rows x 8 heads of one KV head (128 rows of M), all keys they may see, 32 a step
//   warp    = 16 rows of M: q (64 registers), O[16, 256] (128) and S[16, 32]; softmax inside the warp
//   keys    = K, V [32, 256] of three steps in a ring; step j + 2 is copied while j is computed
//   segment = 2,048 keys from a multiple of 2,048 on: each has a softmax and sums of its own, which are added
//             to those of the segments before it
//
//   many tiles   a block has a tile; its sums of the segments before lie in shared memory
//                tile 0 |0 1 2 3 4 5 6 7 8|   tile 1 |0 1 2 3 4 5 6 7 8|   ...
//   few tiles    a block has a segment, and as many of a tile as run at once are a round; at its end each has
//                a part of the tile's elements, to which it adds the round's segments in order, from work
//                space
//                tile 0 |0|1|2|  |3|4|5|  |6|7|8|   tile 1 |0|1|2|  |3|4|5|  |6|7|8|   ...
//
// Both add the same numbers in the same order, and no row's arithmetic looks at another: a row's bits depend
// on its keys alone.
// Memory: q, gate and y once; K and V once a tile, mostly from L2: 2 KB a key for 128 rows. Traffic of shared
// memory bounds the speed: each warp reads every tile of keys. Tiles with the most keys of a sequence start
// first. Limits: head_dim 256, at most 8 query heads a KV head (fewer: more rows a tile), 96 KB of shared
// memory; with less than 227 KB the sums of many tiles lie in work space, too, and a launch has no more tiles
// than that holds.
#include "ggml-like/cuda/attention/attention.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kDim = 256, kSteps = kDim / 16;
constexpr int kWarps = 8, kThreads = 32 * kWarps, kRows = kTileM;
constexpr int kKeys = 32, kStages = 3;
constexpr int kTileBytes = kKeys * kDim * 2, kStageBytes = 2 * kTileBytes;
constexpr int kSharedBytes = kStages * kStageBytes, kHeldSharedBytes = kSharedBytes + kHeldBytes;
static_assert(kRows == 16 * kWarps && kRows * kDim * 2 <= 2 * kStageBytes);
static_assert(kSharedBytes <= 99 * 1024 && kHeldSharedBytes <= 227 * 1024);
constexpr int kSegmentSteps = kSegmentKeys / kKeys;
constexpr int kElements = kRows * kDim / 4;  // of a tile's sums, four floats each
constexpr float kSlack = 8;                  // a maximum may be exceeded by 2^8 before the sums are rescaled
constexpr float kNoScore = -1e30f;           // below any score: the maximum of no keys

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

/// Running softmax of the lane's two rows over a segment; sums are per lane until its end.
struct Softmax {
    float maximum[2], sum[2];
};

__device__ __forceinline__ void add_lanes(Softmax& state) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        state.sum[h] += __shfl_xor_sync(0xffffffffu, state.sum[h], 1);
        state.sum[h] += __shfl_xor_sync(0xffffffffu, state.sum[h], 2);
    }
}

__device__ __forceinline__ void clear(Softmax& state, Output& o) {
#pragma unroll
    for (int h = 0; h < 2; ++h) state.maximum[h] = kNoScore, state.sum[h] = 0;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) o[n][e] = 0;
}

/// Scores to probabilities. The maximum may lag behind by kSlack, so that the output is rarely rescaled: a
/// row decides that for itself, but the warp rescales all of its rows, most of them by 1.
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
            const float now = highest[h] > state.maximum[h] + kSlack ? highest[h] : state.maximum[h];
            const float f = fast_exp2(state.maximum[h] - now);
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

/// Where a tile's sums over some keys lie: element [warp][n][lane] has the lane's o[n], then follow maximum
/// and sum of each row, twice.
struct Held {
    float4* values;
    float2* totals;

    __device__ __forceinline__ explicit Held(void* at)
        : values(static_cast<float4*>(at)), totals(reinterpret_cast<float2*>(values + kElements)) {}
};

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

/// Takes the next segment's maximum and sum into those of the segments before: what to multiply the values of
/// either by. A row without keys in it keeps its bits.
__device__ __forceinline__ float2 add_total(float2& total, float2 next) {
    const float highest = fmaxf(total.x, next.x);
    const float2 by{fast_exp2(total.x - highest), fast_exp2(next.x - highest)};
    total = {highest, fmaf(next.y, by.y, __fmul_rn(total.y, by.x))};
    return by;
}
__device__ __forceinline__ float add_value(float value, float next, float2 by) {
    return fmaf(next, by.y, __fmul_rn(value, by.x));
}

/// Sums over a segment become those over it and all before it, which are held.
__device__ __forceinline__ void add_held(const Held& held, Softmax& state, Output& o) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float2 by[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float2 total = held.totals[warp * 16 + lane / 4 + 8 * h];
        by[h] = add_total(total, {state.maximum[h], state.sum[h]});
        state.maximum[h] = total.x, state.sum[h] = total.y;
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
        const float4 x = held.values[(warp * (kDim / 8) + n) * 32 + lane];
        o[n][0] = add_value(x.x, o[n][0], by[0]), o[n][1] = add_value(x.y, o[n][1], by[0]);
        o[n][2] = add_value(x.z, o[n][2], by[1]), o[n][3] = add_value(x.w, o[n][3], by[1]);
    }
    __syncwarp();
}

/// Two elements of y.
__device__ __forceinline__ uint32_t gated(float x, float y, float sum, uint32_t gate) {
    const float r = 1.0f / sum;
    const float2 g = unpack_bf16(gate);
    return pack_bf16(x * r * sigmoid(g.x), y * r * sigmoid(g.y));
}

/// Normalizes, gates and rounds the warp's rows over the gates in shared memory, then stores whole rows.
__device__ __forceinline__ void store_rows(const AttentionCall& c, const WarpRows& rows, const Output& o,
                                           const Softmax& state, int lane, char* gates) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        char* row = gates + (lane / 4 + 8 * h) * kDim * 2 + lane % 4 * 4;
#pragma unroll
        for (int n = 0; n < kDim / 8; ++n) {
            auto* at = reinterpret_cast<uint32_t*>(row + ((n ^ (lane / 4)) << 4));
            *at = gated(o[n][2 * h], o[n][2 * h + 1], state.sum[h], *at);
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

/// A block's place among those that share a tile: each has one segment, `blocks` of them are a round.
struct Sharing {
    char* slots;     // of each block of a round, then one for the sums so far
    unsigned* done;  // counts two arrivals of each block: its segment is written, its round's are read
    int blocks, segment, segments;

    __device__ __forceinline__ Held held(int slot) const { return Held(slots + slot * kHeldBytes); }
    __device__ __forceinline__ int round() const { return segment / blocks; }
    __device__ __forceinline__ int own() const { return segment % blocks; }
    __device__ __forceinline__ int first() const { return round() * blocks; }
    __device__ __forceinline__ int in_round() const { return min(blocks, segments - first()); }

    __device__ __forceinline__ void arrive() const {
        __threadfence();
        __syncthreads();
        if (threadIdx.x != 0) return;
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(done) : "memory");
        if (before + 1 == 2u * segments) *done = 0;  // nobody waits any more
    }
    __device__ __forceinline__ void wait(int arrivals) const {
        if (threadIdx.x == 0) {
            unsigned now;
            do {
                asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(done) : "memory");
            } while (now < static_cast<unsigned>(arrivals));
        }
        __syncthreads();
    }
};

/// Four elements of a tile's sums, two of either of two rows, and these rows' totals.
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
        if (at / 32 % (kDim / 8) != 0 || at % 4 != 0) return;  // one of each row
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
            gated(h == 0 ? x.value.x : x.value.z, h == 0 ? x.value.y : x.value.w, x.total[h].y, gate);
    }
}

/// Adds a round's segments to the sums so far, or stores y after the last one: the block's part of elements.
__device__ __forceinline__ void add_round(const AttentionCall& c, const Tile& tile, const Sharing& sharing) {
    constexpr int kTogether = 2, kAhead = 4;  // elements and segments whose loads are under way
    const int round = sharing.round(), first = sharing.first(), filled = sharing.in_round();
    const Held so_far = sharing.held(sharing.blocks);
    const int step = filled * kThreads;
#pragma unroll 1
    for (int at = sharing.own() * kThreads + threadIdx.x; at < kElements; at += kTogether * step) {
        Element sum[kTogether];
        const auto valid = [&](int e) { return at + e * step < kElements; };
#pragma unroll
        for (int e = 0; e < kTogether; ++e)
            if (round > 0 && valid(e)) sum[e].load(so_far, at + e * step, round % 2);
#pragma unroll 1
        for (int begin = 0; begin < filled; begin += kAhead) {
            Element next[kAhead][kTogether];
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
            if (first + filled < sharing.segments)  // others may still read the totals before
                sum[e].store(so_far, at + e * step, (round + 1) % 2);
            else
                store_element(c, tile, at + e * step, sum[e]);
        }
    }
}

/// Steps begin .. end-1 of the tile: the sums over their keys. kHolds: they are of several segments, and the
/// sums go on from one to the next through `held`. The ring must be free.
template <bool kHolds>
__device__ __forceinline__ void attend(const AttentionCall& c, const Tile& tile, int keys, int begin, int end,
                                       const Held& held, Softmax& state, Output& o, char* shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // q takes stages 0 and 1 first, the first keys stage 2.
    const WarpRows rows = warp_rows(c, tile);
    char* own_rows = shared + warp * 16 * kDim * 2;
    start_rows({c.rotated, static_cast<int64_t>(c.heads) * kDim, kDim}, rows, lane, own_rows);
    commit_copies();
    const int first_position = c.positions[tile.first];
    const int* pages = c.pages + tile.sequence * c.page_row;
    const auto page_of = [&](int step) { return pages[min(step, end - 1) * kKeys / kKeysPerPage]; };
    int page = page_of(begin), stage = kStages - 1;
    start_tile(c, tile, page, begin, keys, shared + stage * kStageBytes);
    commit_copies();
    page = page_of(begin + 1);
    int last[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) last[h] = c.positions[__shfl_sync(0xffffffffu, rows.row, lane / 4 + 8 * h)];
    wait_copies<1>();
    __syncwarp();
    uint32_t q[kSteps][4];
    load_queries(shared_address(own_rows), lane, q);
    __syncthreads();
    if (begin + 1 < end) start_tile(c, tile, page, begin + 1, keys, shared);
    commit_copies();
    page = page_of(begin + kStages - 1);

    clear(state, o);
    const float scale = score_scale(kDim);
    for (int step = begin; step < end; ++step) {
        wait_copies<kStages - 2>();
        __syncthreads();
        const int ahead = step + kStages - 1, free_stage = stage == 0 ? kStages - 1 : stage - 1;
        if (ahead < end) start_tile(c, tile, page, ahead, keys, shared + free_stage * kStageBytes);
        commit_copies();
        page = page_of(ahead + 1);

        if (kHolds && step > 0 && step % kSegmentSteps == 0) {  // a segment has ended
            add_lanes(state);
            if (step > kSegmentSteps) add_held(held, state, o);
            keep(held, state, o);
            clear(state, o);
        }
        const uint32_t k_tile = shared_address(shared + stage * kStageBytes);
        Scores s;
        score(k_tile, q, lane, s);
        if ((step + 1) * kKeys - 1 > first_position) mask(s, step * kKeys + 2 * (lane % 4), last[0], last[1]);
        softmax(s, scale, state, o);
        add_values(k_tile + kTileBytes, s, lane, o);
        stage = stage == kStages - 1 ? 0 : stage + 1;
    }
    add_lanes(state);
    if (kHolds && end > kSegmentSteps) add_held(held, state, o);
    __syncthreads();  // the ring is free
}

__device__ __forceinline__ void store_tile(const AttentionCall& c, const Tile& tile, const Softmax& state,
                                           const Output& o, char* shared) {
    const int lane = threadIdx.x % 32;
    const WarpRows rows = warp_rows(c, tile);
    char* own_rows = shared + threadIdx.x / 32 * 16 * kDim * 2;
    start_rows(c.gate, rows, lane, own_rows);
    commit_copies();
    wait_copies<0>();
    __syncwarp();
    store_rows(c, rows, o, state, lane, own_rows);
}

/// The block's tile, and how many keys its last row sees; 0: there is no such tile.
__device__ __forceinline__ int find_block(const AttentionCall& c, int block, Tile& tile) {
    tile.kv_head = block % c.kv_heads;
    if (!find_tile(c, block / c.kv_heads, kRows / (c.heads / c.kv_heads), tile)) return 0;
    return c.positions[tile.first + tile.rows - 1] + 1;
}

__device__ __forceinline__ int steps_of(int keys) { return (keys + kKeys - 1) / kKeys; }

/// Many tiles: one a block. kInShared: where the sums of the segments before lie.
template <bool kInShared>
__global__ void __launch_bounds__(kThreads, 1)
    attention_tiles_kernel(const __grid_constant__ AttentionCall c, int first_block) {
    extern __shared__ __align__(1024) char shared[];
    allow_successor();
    Tile tile;
    const int keys = find_block(c, first_block + static_cast<int>(blockIdx.x), tile);
    wait_for_predecessor();
    if (keys == 0) return;
    const Held held(kInShared ? shared + kSharedBytes : static_cast<char*>(c.work) + blockIdx.x * kHeldBytes);
    Output o;
    Softmax state;
    attend<true>(c, tile, keys, 0, steps_of(keys), held, state, o, shared);
    store_tile(c, tile, state, o, shared);
}

/// Few tiles: a block a segment, `together` of a tile at a time, which wait for each other. They come in
/// order in the grid, and so many of all tiles run at once; those without a segment make room at once.
__global__ void __launch_bounds__(kThreads, 1)
    attention_shared_tiles_kernel(const __grid_constant__ AttentionCall c, int together) {
    extern __shared__ __align__(1024) char shared[];
    allow_successor();
    Tile tile;
    const int keys = find_block(c, blockIdx.x, tile), segments = (keys + kSegmentKeys - 1) / kSegmentKeys;
    const int segment = blockIdx.y, begin = segment * kSegmentSteps;
    if (segment == 0) wait_for_predecessor();
    if (segment >= segments) return;
    if (segment > 0) wait_for_predecessor();
    const Sharing sharing{static_cast<char*>(c.work) + blockIdx.x * (together + 1) * kHeldBytes,
                          c.counters + blockIdx.x, together, segment, segments};
    const Held own = sharing.held(sharing.own());
    Output o;
    Softmax state;
    attend<false>(c, tile, keys, begin, min(begin + kSegmentSteps, steps_of(keys)), own, state, o, shared);
    if (segments == 1) return store_tile(c, tile, state, o, shared);
    sharing.wait(2 * sharing.first());  // the slot has been read
    keep(own, state, o);
    sharing.arrive();
    sharing.wait(2 * sharing.first() + sharing.in_round());
    add_round(c, tile, sharing);
    sharing.arrive();
}

}  // namespace

void attention_prefill(const AttentionCall& call, Context& context) {
    static_assert(kSharingBlocks <= kCounters);
    constexpr const char* kName = "gated_attention prefill";
    const int blocks = call.kv_heads * static_cast<int>(prompt_tiles(call.tokens, call.sequences,
                                                                     call.heads / call.kv_heads));
    // Blocks of a tile that wait for each other must run at once.
    const int together = std::min(context.sms, kSharingBlocks) / blocks;
    const int segments = (call.max_keys + kSegmentKeys - 1) / kSegmentKeys;
    if (together > 1 && segments > 1)
        launch(context, kName, attention_shared_tiles_kernel, dim3(blocks, segments), dim3(kThreads),
               kSharedBytes, call, std::min(together, segments));
    else if (context.shared_bytes >= kHeldSharedBytes)
        launch(context, kName, attention_tiles_kernel<true>, dim3(blocks), dim3(kThreads), kHeldSharedBytes,
               call, 0);
    else
        for (int first = 0; first < blocks; first += kHeldSlots)
            launch(context, kName, attention_tiles_kernel<false>, dim3(std::min(kHeldSlots, blocks - first)),
                   dim3(kThreads), kSharedBytes, call, first);
}

}  // namespace quern::cuda::attention
