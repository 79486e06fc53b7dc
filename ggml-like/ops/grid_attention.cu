// grid_attention on the GPU: heads of 72 elements on Hopper take attention/grid_warpgroups.cu, all others the kernel here. Queries
// and keys are rotated into work space, where heads are padded with zeros to 80 elements, five steps of mma.m16n8k16; then a
// block takes 128 queries of a frame and head, and goes over its keys.
//
//   work        [q, k][head][row][80]       values stay in qkv
//   a warp      32 queries in registers, two tiles of 16; scores of 64 keys; outputs of 72 elements
//   K, V tiles  64 keys, two of each in shared memory: one is read while the next one comes
//
// Rows of K take 176 bytes there and rows of V 144, so that eight of them lie in different banks. Bound: products of tensor
// cores, a tenth of them with zeros. Limits: heads of up to 72 elements, a multiple of 8.
#include "ggml-like/ops/grid_attention.h"

#include "ggml-like/cuda/attention/attention.cuh"
#include "ggml-like/cuda/attention/grid_attention.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/variants.h"
#include "ggml-like/cuda/vision_ops.h"

namespace quern::cuda {

using namespace ptx;
using attention::fast_exp2;

namespace {

constexpr int kDepth = kGridHead, kSteps = kDepth / 16, kValues = 72;
constexpr int kWarps = 4, kThreads = 32 * kWarps, kTiles = 2, kWarpQueries = 16 * kTiles;
constexpr int kQueries = kWarps * kWarpQueries, kKeys = 64;
constexpr int kKeyRow = kDepth + 8, kValueRow = kValues;  // elements of a row in shared memory

struct Shared {
    bf16 k[2][kKeys * kKeyRow];
    bf16 v[2][kKeys * kValueRow];
};
static_assert(sizeof(Shared::k) >= kQueries * kKeyRow * sizeof(bf16));  // queries pass through it

struct Call {
    const bf16 *qkv, *work;
    const int* start;
    int frames, rows, heads, width;
    int query, queries;  // the rows that are asked
    float scale;         // of scores, with log2(e)
    bf16* y;

    __device__ const bf16* rotated(int part, int head, int row) const {
        return work + ((static_cast<int64_t>(part) * heads + head) * rows + row) * kDepth;
    }
};

constexpr int kRotateThreads = 256;

__global__ void __launch_bounds__(kRotateThreads)
    grid_rotate_kernel(const bf16* qkv, const int4* place, int rows, int heads, int width, float theta,
                       bf16* work) {
    __shared__ float2 turn[kDepth / 2];
    allow_successor();
    wait_for_predecessor();
    const int t = blockIdx.x, half = width / 2, quarter = width / 4;
    const int4 at = place[t];
    for (int j = threadIdx.x; j < half; j += kRotateThreads) {
        const float position = static_cast<float>(j < quarter ? at.x : at.y);
        const float angle =
            position * exp2f(-log2f(theta) * static_cast<float>(j % quarter) / static_cast<float>(quarter));
        sincosf(angle, &turn[j].y, &turn[j].x);
    }
    __syncthreads();
    const bf16* from = qkv + static_cast<int64_t>(t) * 3 * heads * width;
    for (int i = threadIdx.x; i < 2 * heads * (kDepth / 2); i += kRotateThreads) {
        const int j = i % (kDepth / 2), head = i / (kDepth / 2) % heads, part = i / (kDepth / 2) / heads;
        bf16* to = work + ((static_cast<int64_t>(part) * heads + head) * rows + t) * kDepth;
        if (j < half) {
            const bf16* x = from + (part * heads + head) * width;
            const float a = __bfloat162float(x[j]), b = __bfloat162float(x[j + half]);
            to[j] = __float2bfloat16(a * turn[j].x - b * turn[j].y);
            to[j + half] = __float2bfloat16(b * turn[j].x + a * turn[j].y);
        } else {  // the zeros behind the head
            to[width + 2 * (j - half)] = to[width + 2 * (j - half) + 1] = __float2bfloat16(0.0f);
        }
    }
}

/// The queries of a block, `first` to `last` - 1, and the frame they look at.
struct Span {
    int first, last, begin, end;

    /// False: no frame has so many tiles.
    __device__ bool find(const Call& c, int tile) {
        for (int f = 0; f < c.frames; ++f) {
            begin = c.start[f], end = c.start[f + 1];
            first = max(begin, c.query), last = min(end, c.query + c.queries);
            const int tiles = max(last - first + kQueries - 1, 0) / kQueries;
            if (tile < tiles) {
                first += tile * kQueries;
                return true;
            }
            tile -= tiles;
        }
        return false;
    }
};

/// Starts copies of `count` rows of 16 * kPieces bytes; those from `end` on, and pieces from `pieces` on, become zeros.
template <int kPieces>
__device__ __forceinline__ void copy_rows(bf16* to, int to_row, const bf16* from, int64_t from_row, int count,
                                          int row, int end, int pieces) {
    for (int i = threadIdx.x; i < count * kPieces; i += kThreads) {
        const int r = i / kPieces, piece = i % kPieces;
        const bool valid = row + r < end && piece < pieces;
        copy_async16(to + r * to_row + piece * 8, from + (valid ? r * from_row + piece * 8 : 0), valid);
    }
}

__device__ __forceinline__ void copy_tile(const Call& c, const Span& s, int head, int tile, Shared& shared) {
    const int row = s.begin + tile * kKeys, qkv_row = 3 * c.heads * c.width;
    copy_rows<kDepth / 8>(shared.k[tile % 2], kKeyRow, c.rotated(1, head, row), kDepth, kKeys, row, s.end,
                          kDepth / 8);
    copy_rows<kValues / 8>(shared.v[tile % 2], kValueRow,
                           c.qkv + static_cast<int64_t>(row) * qkv_row + (2 * c.heads + head) * c.width,
                           qkv_row, kKeys, row, s.end, c.width / 8);
}

using Scores = float[kKeys / 8][4];
using Output = float[kValues / 8][4];

/// Of a tile of 16 queries; the lane has rows l / 4 and l / 4 + 8.
struct Queries {
    uint32_t q[kSteps][4];
    float maximum[2], sum[2];
    Output o;
};

__device__ __forceinline__ void score(const bf16* keys, const Queries (&tiles)[kTiles], int lane,
                                      Scores (&s)[kTiles]) {
    const uint32_t base = shared_address(keys + (lane % 8 + lane / 16 * 8) * kKeyRow + (lane / 8 & 1) * 8);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[m][2 * n][e] = s[m][2 * n + 1][e] = 0;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            uint32_t k[4];
            load_matrices(k, base + (n * 16 * kKeyRow + i * 16) * 2);
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                mma(s[m][2 * n], tiles[m].q[i], k[0], k[1]);
                mma(s[m][2 * n + 1], tiles[m].q[i], k[2], k[3]);
            }
        }
    }
}

/// Keys from `keys` on do not exist.
__device__ __forceinline__ void mask(Scores& s, int keys, int lane) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (8 * n + 2 * (lane % 4) + e % 2 >= keys) s[n][e] = -INFINITY;
}

/// Scores become probabilities; sums and output follow the maxima.
__device__ __forceinline__ void weigh(Scores& s, float scale, Queries& t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float highest = t.maximum[h];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
            highest = fmaxf(highest, fmaxf(s[n][2 * h], s[n][2 * h + 1]) * scale);
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
        const float by = fast_exp2(t.maximum[h] - highest);
        t.maximum[h] = highest;
        t.sum[h] *= by;
#pragma unroll
        for (int n = 0; n < kValues / 8; ++n) t.o[n][2 * h] *= by, t.o[n][2 * h + 1] *= by;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; ++e)
                t.sum[h] += s[n][e] = fast_exp2(fmaf(s[n][e], scale, -highest));
    }
}

__device__ __forceinline__ void add_values(const bf16* values, const Scores (&s)[kTiles], int lane,
                                           Queries (&tiles)[kTiles]) {
    const uint32_t row = shared_address(values + lane % 16 * kValueRow);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
        uint32_t p[kTiles][4];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
            for (int j = 0; j < 4; ++j)
                p[m][j] = pack_bf16(s[m][2 * i + j / 2][2 * (j % 2)], s[m][2 * i + j / 2][2 * (j % 2) + 1]);
#pragma unroll
        for (int n = 0; n < kValues / 8; n += 2) {
            const bool last = n + 1 == kValues / 8;  // half of these four matrices
            uint32_t v[4];
            load_matrices_transposed(v, row + (i * 16 * kValueRow + 8 * n + (last ? 0 : lane / 16 * 8)) * 2);
#pragma unroll
            for (int m = 0; m < kTiles; ++m) {
                mma(tiles[m].o[n], p[m], v[0], v[1]);
                if (!last) mma(tiles[m].o[n + 1 < kValues / 8 ? n + 1 : n], p[m], v[2], v[3]);
            }
        }
    }
}

__device__ __forceinline__ void write(const Call& c, const Span& s, int head, int first, int lane,
                                      Queries& t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        t.sum[h] += __shfl_xor_sync(0xffffffffu, t.sum[h], 1);
        t.sum[h] += __shfl_xor_sync(0xffffffffu, t.sum[h], 2);
        const int row = first + lane / 4 + 8 * h;
        if (row >= s.last) continue;
        const float by = 1.0f / t.sum[h];
        bf16* to = c.y + (static_cast<int64_t>(row - c.query) * c.heads + head) * c.width + 2 * (lane % 4);
#pragma unroll
        for (int n = 0; n < kValues / 8; ++n)
            if (8 * n < c.width)
                *reinterpret_cast<uint32_t*>(to + 8 * n) =
                    pack_bf16(t.o[n][2 * h] * by, t.o[n][2 * h + 1] * by);
    }
}

__global__ void __launch_bounds__(kThreads, 2) grid_attention_kernel(Call c) {
    extern __shared__ __align__(16) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    allow_successor();
    wait_for_predecessor();
    const int head = blockIdx.y, lane = threadIdx.x % 32, own = threadIdx.x / 32 * kWarpQueries;
    Span s;
    if (!s.find(c, blockIdx.x)) return;
    copy_rows<kDepth / 8>(shared.k[0], kKeyRow, c.rotated(0, head, s.first), kDepth, kQueries, s.first, s.end,
                          kDepth / 8);
    commit_copies();
    wait_copies<0>();
    __syncthreads();
    Queries tiles[kTiles];
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
        const uint32_t at =
            shared_address(shared.k[0] + (own + 16 * m + lane % 16) * kKeyRow + lane / 16 * 8);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) load_matrices(tiles[m].q[i], at + 32 * i);
#pragma unroll
        for (int h = 0; h < 2; ++h) tiles[m].maximum[h] = -INFINITY, tiles[m].sum[h] = 0;
#pragma unroll
        for (int n = 0; n < kValues / 8; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) tiles[m].o[n][e] = 0;
    }
    __syncthreads();
    const int rounds = (s.end - s.begin + kKeys - 1) / kKeys;
    copy_tile(c, s, head, 0, shared);
    commit_copies();
    for (int round = 0; round < rounds; ++round) {
        if (round + 1 < rounds) copy_tile(c, s, head, round + 1, shared);
        commit_copies();
        wait_copies<1>();
        __syncthreads();
        Scores scores[kTiles];
        score(shared.k[round % 2], tiles, lane, scores);
        const int keys = s.end - s.begin - round * kKeys;
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
            if (keys < kKeys) mask(scores[m], keys, lane);
            weigh(scores[m], c.scale, tiles[m]);
        }
        add_values(shared.v[round % 2], scores, lane, tiles);
        __syncthreads();
    }
#pragma unroll
    for (int m = 0; m < kTiles; ++m) write(c, s, head, s.first + own + 16 * m, lane, tiles[m]);
}

}  // namespace

void grid_attention(const Node& node, Context& c) {
    const Tensor &qkv = *node.inputs[0], &place = *node.inputs[1], &start = *node.inputs[2],
                 &y = *node.outputs[0];
    const auto& p = node.params<GridAttentionParams>();
    const int rows = static_cast<int>(qkv.shape[0]), width = static_cast<int>(y.shape[1]) / p.heads;
    const int frames = static_cast<int>(start.shape[0]) - 1, queries = static_cast<int>(y.shape[0]);
    if (qkv.dtype != DType::BF16) unsupported("grid_attention", "activations other than BF16");
    if (width > kValues || width % 8 != 0)
        unsupported("grid_attention", "heads that are no multiple of 8 up to 72");
    auto* work = node.outputs[1]->as<bf16>();
    const float scale = 1.4426950408889634f / sqrtf(static_cast<float>(width));
    if (choose(c, GridShape{width}) == GridProduct::warpgroups)
        return attention::grid_attention_warpgroups({.qkv = qkv.as<const bf16>(),
                                                     .place = place.as<const int4>(),
                                                     .start = start.as<const int>(),
                                                     .frames = frames,
                                                     .rows = rows,
                                                     .heads = p.heads,
                                                     .query = static_cast<int>(p.first),
                                                     .queries = queries,
                                                     .theta = p.theta,
                                                     .scale = scale,
                                                     .work = work,
                                                     .y = y.as<bf16>()},
                                                    c);
    launch(c, "grid_attention rotate", grid_rotate_kernel, static_cast<unsigned>(rows), kRotateThreads, 0,
           qkv.as<const bf16>(), place.as<const int4>(), rows, p.heads, width, p.theta, work);
    const Call call{qkv.as<const bf16>(),
                    work,
                    start.as<const int>(),
                    frames,
                    rows,
                    p.heads,
                    width,
                    static_cast<int>(p.first),
                    queries,
                    scale,
                    y.as<bf16>()};
    launch(c, "grid_attention", grid_attention_kernel, dim3(queries / kQueries + frames, p.heads), kThreads,
           static_cast<int>(sizeof(Shared)), call);
}

}  // namespace quern::cuda
