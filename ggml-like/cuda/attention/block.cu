// Attention of blocks of a few rows to all keys before them and to themselves.
//
//   prepare: a warp a head of a row: q and k normed and rotated
//   attend:  block = up to 64 query rows (rows of the block times query heads of a KV head) and a part of the keys:
//
//              warp 0 | 16 query rows |          K and V of 64 keys at a time in shared memory, two of them under way;
//              ...                    | keys ->  scores and sums by mma in BF16, a running softmax; what it has at the
//              warp 3 | 16 query rows |          end, not yet divided by the sum, goes to `work`
//
//   merge:   a block a head of a row: a warp every fourth part, then the warps in order
//
// Parts: the pages before the block, as many for each; the block's own keys are the last part's, which has the fewest pages. Keys
// of pages are asked for before the predecessor ends: only earlier steps write them.
// Traffic: the keys before the block once for each 64 query rows. Shared memory: two times 64 keys and values, 70 KB. Limits:
// head_dim 64 or 128. Bound: bytes of K and V at depth, latency without.
#include "ggml-like/cuda/attention/block.h"

#include <cmath>

#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kKeys = 64, kTile = 16 * kWarps;

__global__ void __launch_bounds__(kThreads) block_prepare_kernel(const __grid_constant__ BlockCall c) {
    allow_successor();
    const int t = blockIdx.x, lane = threadIdx.x % 32;
    const int head = blockIdx.y * kWarps + threadIdx.x / 32;
    const int sequence = c.row_sequence[t], position = c.positions[t], d = c.head_dim;
    wait_for_predecessor();
    if (sequence < 0 || head >= c.heads + c.kv_heads) return;
    if (head < c.heads)
        return rotate_head(c.turns, position, d, c.eps, c.q_norm, c.q.at(t, head),
                           c.rotated_q + (static_cast<int64_t>(t) * c.heads + head) * d, lane);
    const int kv = head - c.heads;
    rotate_head(c.turns, position, d, c.eps, c.k_norm, c.k.at(t, kv),
                c.rotated_k + (static_cast<int64_t>(t) * c.kv_heads + kv) * d, lane);
}

/// How the keys of a sequence are split.
struct Parts {
    int begin, rows, context;  // first row and rows of the sequence; positions before it
    int from, all, each;       // first page, pages, pages of a part

    __device__ __forceinline__ Parts(const BlockCall& c, int sequence) {
        begin = c.start[sequence];
        rows = c.start[sequence + 1] - begin;
        context = rows > 0 ? c.positions[begin] : 0;
        const int lowest = c.window > 0 ? max(0, context - c.window + 1) : 0;
        from = lowest / kKeys, all = (context + kKeys - 1) / kKeys - from;
        each = (all + c.splits - 1) / c.splits;
    }
    /// Parts that have pages: the first ones.
    __device__ __forceinline__ int paged() const { return each > 0 ? (all + each - 1) / each : 0; }
};

/// What a block of `attend` works on.
struct Part : Parts {
    int kv_head;
    int first_page, pages;  // of the context
    int chunks;             // of 64 keys: its pages, then the block's own keys

    __device__ __forceinline__ Part(const BlockCall& c, int split, int head, int sequence)
        : Parts(c, sequence), kv_head(head) {
        first_page = from + split * each;
        pages = max(0, min(each, from + all - first_page));
        chunks = pages + (split == c.splits - 1 ? (rows + kKeys - 1) / kKeys : 0);
    }
};

/// Asks for chunk i's keys and values.
template <int D>
__device__ __forceinline__ void ask(const BlockCall& c, const Part& p, int sequence, int i, bf16* k,
                                    bf16* v) {
    constexpr int kPieces = D / 8, kRow = D + 8;
    const bool cached = i < p.pages;
    const int first = cached ? (p.first_page + i) * kKeys : (i - p.pages) * kKeys,
              end = cached ? p.context : p.rows;
    const int64_t page = cached ? c.pages[sequence * c.page_row + p.first_page + i] : 0;
    const int64_t place = (page * c.cache_heads + c.first_head + p.kv_head) * kKeys * D;
    for (int at = threadIdx.x; at < kKeys * kPieces; at += kThreads) {
        const int key = at / kPieces, x = at % kPieces * 8;
        const bool valid = first + key < end;
        const int t = p.begin + (valid && !cached ? first + key : 0);
        const bf16* from_k = cached
                                 ? c.k_cache + place + key * D + x
                                 : c.rotated_k + (static_cast<int64_t>(t) * c.kv_heads + p.kv_head) * D + x;
        const bf16* from_v = cached ? c.v_cache + place + key * D + x : c.v.at(t, p.kv_head) + x;
        copy_async16(k + key * kRow + x, from_k, valid);
        copy_async16(v + key * kRow + x, from_v, valid);
    }
    commit_copies();
}

/// The 16 query rows of a warp: two in each lane, lane / 4 and that plus 8.
template <int D>
struct Queries {
    uint32_t q[D / 16][4];
    float o[D / 8][4] = {}, highest[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    int position[2], row[2], head[2];

    __device__ __forceinline__ Queries(const BlockCall& c, const Part& p, int first, int lane) {
        const int group = c.heads / c.kv_heads;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int m = first + lane / 4 + 8 * half;
            row[half] = m / group < p.rows ? p.begin + m / group : -1;
            head[half] = p.kv_head * group + m % group;
            position[half] = p.context + m / group;
        }
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int half = i % 2, x = k * 16 + i / 2 * 8 + lane % 4 * 2;
                q[k][i] =
                    row[half] < 0
                        ? 0
                        : *reinterpret_cast<const uint32_t*>(
                              c.rotated_q + (static_cast<int64_t>(row[half]) * c.heads + head[half]) * D + x);
            }
    }

    __device__ __forceinline__ bool sees(const BlockCall& c, int half, int key, int end) const {
        const int gap = position[half] - key;
        return key < end && (!c.causal || gap >= 0) && (c.window == 0 || (gap < c.window && -gap < c.window));
    }

    /// One chunk: its first key has this position, keys at `end` and after are none.
    __device__ __forceinline__ void add(const BlockCall& c, const bf16* k, const bf16* v, int first, int end,
                                        int lane) {
        constexpr int kRow = D + 8;
        float s[kKeys / 8][4] = {};
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int x = 0; x < D; x += 32) {
                uint32_t b[4];
                load_matrices(b, shared_address(k + (8 * j + lane % 8) * kRow + x + lane / 8 * 8));
                mma(s[j], q[x / 16], b[0], b[1]);
                mma(s[j], q[x / 16 + 1], b[2], b[3]);
            }
        const float scale = score_scale(D);
        float top[2] = {highest[0], highest[1]};
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int key = first + 8 * j + lane % 4 * 2 + i % 2;
                s[j][i] = sees(c, i / 2, key, end) ? s[j][i] * scale : -INFINITY;
                top[i / 2] = fmaxf(top[i / 2], s[j][i]);
            }
        float base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            for (int l = 1; l < 4; l *= 2)
                top[half] = fmaxf(top[half], __shfl_xor_sync(0xffffffffu, top[half], l));
            base[half] = top[half] == -INFINITY ? 0 : top[half];
            const float f = fast_exp2(highest[half] - base[half]);
            highest[half] = top[half];
            sum[half] *= f;
#pragma unroll
            for (int n = 0; n < D / 8; ++n) o[n][2 * half] *= f, o[n][2 * half + 1] *= f;
        }
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i / 2] += s[j][i] = fast_exp2(s[j][i] - base[i / 2]);
#pragma unroll
        for (int kk = 0; kk < kKeys / 16; ++kk) {
            const float(&a)[4] = s[2 * kk], (&b)[4] = s[2 * kk + 1];
            const uint32_t p[4] = {pack_bf16(a[0], a[1]), pack_bf16(a[2], a[3]), pack_bf16(b[0], b[1]),
                                   pack_bf16(b[2], b[3])};
#pragma unroll
            for (int n = 0; n < D; n += 16) {
                uint32_t r[4];
                load_matrices_transposed(
                    r,
                    shared_address(v + (16 * kk + lane / 8 % 2 * 8 + lane % 8) * kRow + n + lane / 16 * 8));
                mma(o[n / 8], p, r[0], r[1]);
                mma(o[n / 8 + 1], p, r[2], r[3]);
            }
        }
    }

    __device__ __forceinline__ void store(const BlockCall& c, int split, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            for (int l = 1; l < 4; l *= 2) sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], l);
            if (row[half] < 0) continue;
            float* to =
                c.work +
                ((static_cast<int64_t>(split) * c.tokens + row[half]) * c.heads + head[half]) * (D + 2);
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
                *reinterpret_cast<float2*>(to + 8 * n + lane % 4 * 2) = {o[n][2 * half], o[n][2 * half + 1]};
            if (lane % 4 == 0) to[D] = highest[half], to[D + 1] = sum[half];
        }
    }
};

template <int D>
__global__ void __launch_bounds__(kThreads)
    block_attend_kernel(const __grid_constant__ BlockCall c, int tiles) {
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int kChunk = kKeys * (D + 8);
    auto* shared = reinterpret_cast<bf16*>(memory);
    const auto keys = [&](int i) { return shared + i % 2 * 2 * kChunk; };
    allow_successor();
    const int split = blockIdx.x, tile = blockIdx.y % tiles, sequence = blockIdx.z, lane = threadIdx.x % 32;
    const Part part(c, split, blockIdx.y / tiles, sequence);
    const int chunks = tile * kTile < part.rows * (c.heads / c.kv_heads) ? part.chunks : 0;
    const auto ask_for = [&](int i) { ask<D>(c, part, sequence, i, keys(i), keys(i) + kChunk); };
    const int early = min(min(2, part.pages), chunks);
    for (int i = 0; i < early; ++i) ask_for(i);
    wait_for_predecessor();
    if (chunks == 0) return;
    for (int i = early; i < min(2, chunks); ++i) ask_for(i);
    Queries<D> queries(c, part, tile * kTile + threadIdx.x / 32 * 16, lane);
    for (int i = 0; i < chunks; ++i) {
        if (i + 1 < chunks)
            wait_copies<1>();
        else
            wait_copies<0>();
        __syncthreads();
        const bool cached = i < part.pages;
        const int first = cached ? (part.first_page + i) * kKeys : part.context + (i - part.pages) * kKeys;
        queries.add(c, keys(i), keys(i) + kChunk, first, cached ? part.context : part.context + part.rows,
                    lane);
        __syncthreads();
        if (i + 2 < chunks) ask_for(i + 2);
    }
    queries.store(c, split, lane);
}

/// Two elements of a result in each lane for each 64, not yet divided by the sum.
template <int D>
struct Partial {
    float2 o[D / 64];
    float highest, sum;

    __device__ __forceinline__ void load(const float* from, int lane) {
#pragma unroll
        for (int i = 0; i < D / 64; ++i) o[i] = *reinterpret_cast<const float2*>(from + 64 * i + 2 * lane);
        highest = from[D], sum = from[D + 1];
    }
    __device__ __forceinline__ void add(const Partial& p, float weight) {
#pragma unroll
        for (int i = 0; i < D / 64; ++i)
            o[i].x = fmaf(p.o[i].x, weight, o[i].x), o[i].y = fmaf(p.o[i].y, weight, o[i].y);
        sum = fmaf(p.sum, weight, sum);
    }
};

/// Adds up partial results in order; those without keys have the maximum -infinity.
template <int D, int kCount>
__device__ __forceinline__ Partial<D> merged(const Partial<D> (&parts)[kCount]) {
    Partial<D> all{};
    all.highest = -INFINITY;
#pragma unroll
    for (const Partial<D>& p : parts) all.highest = fmaxf(all.highest, p.highest);
#pragma unroll
    for (const Partial<D>& p : parts)
        if (p.highest != -INFINITY) all.add(p, fast_exp2(p.highest - all.highest));
    return all;
}

template <int D>
__global__ void __launch_bounds__(kThreads) block_merge_kernel(const __grid_constant__ BlockCall c) {
    constexpr int kEach = kMaxBlockParts / kWarps;  // parts of a warp, at most
    __shared__ __align__(8) float shared[kWarps][D + 2];
    allow_successor();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, at = blockIdx.x, t = at / c.heads;
    const int sequence = c.row_sequence[t];
    int paged = 0;
    if (sequence >= 0) paged = Parts(c, sequence).paged();
    wait_for_predecessor();
    if (sequence < 0) return;
    const int parts = min(paged + 1, c.splits);  // the last one of all has the block's own keys
    const int64_t step = static_cast<int64_t>(c.tokens) * c.heads * (D + 2);
    const float* work = c.work + static_cast<int64_t>(at) * (D + 2);
    Partial<D> own[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int part = warp + i * kWarps;
        own[i].highest = -INFINITY;
        if (part < parts) own[i].load(work + (part + 1 < parts ? part : c.splits - 1) * step, lane);
    }
    const Partial<D> mine = merged(own);
#pragma unroll
    for (int i = 0; i < D / 64; ++i) *reinterpret_cast<float2*>(shared[warp] + 64 * i + 2 * lane) = mine.o[i];
    if (lane == 0) shared[warp][D] = mine.highest, shared[warp][D + 1] = mine.sum;
    __syncthreads();
    if (warp > 0) return;
    Partial<D> of_warps[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warps[w].load(shared[w], lane);
    const Partial<D> all = merged(of_warps);
#pragma unroll
    for (int i = 0; i < D / 64; ++i)
        *reinterpret_cast<uint32_t*>(c.y + static_cast<int64_t>(at) * D + 64 * i + 2 * lane) =
            pack_bf16(all.o[i].x / all.sum, all.o[i].y / all.sum);
}

template <int D>
void launch_merge(const BlockCall& c, Context& context) {
    launch(context, "block_attention merge", block_merge_kernel<D>, dim3(c.tokens * c.heads), dim3(kThreads),
           0, c);
}

template <int D>
void launch_attend(const BlockCall& c, Context& context) {
    // A sequence may have all rows but one for each of the others.
    const int rows = c.tokens - c.sequences + 1, tiles = (rows * (c.heads / c.kv_heads) + kTile - 1) / kTile;
    launch(context, "block_attention attend", block_attend_kernel<D>,
           dim3(c.splits, c.kv_heads * tiles, c.sequences), dim3(kThreads), 4 * kKeys * (D + 8) * 2, c,
           tiles);
}

}  // namespace

void set_head_turns(HeadTurns& by, const double* frequency, int pairs, double scale) {
    constexpr double kTwoPi = 6.283185307179586476925;
    for (int i = 0; i < pairs; ++i)
        by.turns[i] = static_cast<uint64_t>(std::ldexp(frequency[i] / kTwoPi, 64));
    by.scale = static_cast<float>(scale);
}

void block_attend(const BlockCall& c, Context& context) {
    if (c.head_dim != 64 && c.head_dim != 128)
        unsupported("block_attention", "a head_dim other than 64 and 128");
    launch(context, "block_attention prepare", block_prepare_kernel,
           dim3(c.tokens, (c.heads + c.kv_heads + kWarps - 1) / kWarps), dim3(kThreads), 0, c);
    c.head_dim == 64 ? launch_attend<64>(c, context) : launch_attend<128>(c, context);
    c.head_dim == 64 ? launch_merge<64>(c, context) : launch_merge<128>(c, context);
}

}  // namespace quern::cuda::attention
