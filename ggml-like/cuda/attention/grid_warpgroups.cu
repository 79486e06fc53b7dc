// grid_attention by products of warpgroups (sm_90a), heads of 72 elements: first an arrangement, then the attention.
//
//   y           rotated queries, as they lie there; a block takes its own before it writes its rows
//   work        rotated keys, values: [2][head][9 pieces][row][8], so that a step's keys are nine runs of bytes
//
//   block       one an SM, with every so many of all tiles: 192 queries of a frame and head (grid_ring.cuh)
//   threads     three warpgroups multiply, 64 queries each (grid_warpgroups.cuh); one lane copies K and V, three warps copy queries
//   step        128 keys: S = Q K^T over 80 columns, the last 8 zeros; softmax; O += P V of 72 columns
//
// A query's bits depend on its frame alone: keys are walked in the same order from the frame's first, rows do not mix, and which
// block takes a tile changes nothing.
//
// Shared memory: 190 KB. Registers: 160 of a thread that multiplies, 132 of them S, P and O. Traffic: K and V once a tile, mostly from
// L2. Bound: the softmax. A step's products take 614 cycles of the tensor cores for 64 queries, its exponentials 512 of their unit, and
// the three warpgroups overlap them to some 880.
// Limits: heads of 72 elements; other heads and other cards take the kernel of ops/grid_attention.cu.
#include "ggml-like/cuda/attention/grid_warpgroups.cuh"
#include "ggml-like/cuda/launch.cuh"

#include <algorithm>

namespace quern::cuda::attention {

using namespace ptx;

namespace {

constexpr int kBlockThreads = kGridGroups * 128 + 128;  // those that copy are a warpgroup of their own
constexpr int kArrangeThreads = 256, kArrangeRows = 16, kHalf = kGridWidth / 2, kQuarter = kGridWidth / 4;

using Turns = float2[kArrangeRows][kHalf];  // cosine and sine of each pair's angle

__device__ __forceinline__ void find_turns(const GridCall& c, int first, int rows, Turns& turns) {
    for (int i = threadIdx.x; i < rows * kHalf; i += kArrangeThreads) {
        const int row = i / kHalf, j = i % kHalf;
        const int4 place = c.place[first + row];
        const float at = static_cast<float>(j < kQuarter ? place.x : place.y);
        const float angle =
            at * exp2f(-log2f(c.theta) * static_cast<float>(j % kQuarter) / static_cast<float>(kQuarter));
        sincosf(angle, &turns[row][j].y, &turns[row][j].x);
    }
}

/// Four elements of a rotated head from element `at` on.
__device__ __forceinline__ uint2 rotated(const bf16* head, int at, const float2* turns) {
    const bool upper = at >= kHalf;
    const int pair = upper ? at - kHalf : at;
    const uint2 own = *reinterpret_cast<const uint2*>(head + at),
                other = *reinterpret_cast<const uint2*>(head + (upper ? pair : at + kHalf));
    float y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 turn = turns[pair + i];
        const uint32_t a = i < 2 ? own.x : own.y, b = i < 2 ? other.x : other.y;
        const float x = as_float(static_cast<uint16_t>(i % 2 == 0 ? a : a >> 16)),
                    z = as_float(static_cast<uint16_t>(i % 2 == 0 ? b : b >> 16));
        y[i] = upper ? x * turn.x + z * turn.y : x * turn.x - z * turn.y;
    }
    return {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])};
}
__device__ __forceinline__ uint4 rotated_piece(const bf16* head, int piece, const float2* turns) {
    const uint2 a = rotated(head, piece * 8, turns), b = rotated(head, piece * 8 + 4, turns);
    return {a.x, a.y, b.x, b.y};
}

/// Rotated queries to y, rotated keys and values to the work space in the order that the attention kernel wants.
__global__ void __launch_bounds__(kArrangeThreads) grid_arrange_kernel(const __grid_constant__ GridCall c) {
    __shared__ Turns turns;
    allow_successor();
    wait_for_predecessor();
    const int first = blockIdx.x * kArrangeRows, rows = min(kArrangeRows, c.rows - first);
    const int pieces = c.heads * kGridPieces;
    const bf16* from = c.qkv + static_cast<int64_t>(first) * 3 * pieces * 8;
    find_turns(c, first, rows, turns);
    __syncthreads();
    const Divisor by(pieces);
    for (int i = threadIdx.x; i < rows * pieces; i += kArrangeThreads) {
        const int row = by.quotient(i), piece = i - row * pieces, asked = first + row - c.query;
        if (asked < 0 || asked >= c.queries) continue;
        const bf16* head = from + (row * 3 * pieces + piece / kGridPieces * kGridPieces) * 8;
        *reinterpret_cast<uint4*>(c.y + (static_cast<int64_t>(asked) * pieces + piece) * 8) =
            rotated_piece(head, piece % kGridPieces, turns[row]);
    }
    for (int i = threadIdx.x; i < kArrangeRows * pieces; i += kArrangeThreads) {
        const int row = i % kArrangeRows, piece = i / kArrangeRows;
        if (row >= rows) continue;
        const bf16* k = from + (row * 3 + 1) * pieces * 8;
        uint4* to = reinterpret_cast<uint4*>(c.work) + static_cast<int64_t>(piece) * c.rows + first + row;
        *to = rotated_piece(k + piece / kGridPieces * kGridWidth, piece % kGridPieces, turns[row]);
        to[static_cast<int64_t>(pieces) * c.rows] = reinterpret_cast<const uint4*>(k)[pieces + piece];
    }
}

__global__ void __launch_bounds__(kBlockThreads, 1)
    grid_warpgroups_kernel(const __grid_constant__ GridCall c) {
#if QUERN_WGMMA
    extern __shared__ __align__(128) char shared[];
    __shared__ grid::Barriers barriers;
    const grid::Ring ring(c, shared, &barriers);
    ring.init();
    __syncthreads();
    allow_successor();
    wait_for_predecessor();
    const int helper = static_cast<int>(threadIdx.x) / 32 - kGridGroups * 4;
    if (helper >= 0) {
        shrink_registers<32>();
        if (helper < kGridGroups)
            ring.copy_queries(helper);
        else if (elected())
            ring.copy_spans();
    } else {
        grow_registers<160>();
        grid::Warpgroup{c, ring}.run();
    }
#endif
}

}  // namespace

void grid_attention_warpgroups(const GridCall& call, Context& context) {
    launch(context, "grid_attention arrange", grid_arrange_kernel,
           static_cast<unsigned>((call.rows + kArrangeRows - 1) / kArrangeRows), kArrangeThreads, 0, call);
    const int tiles = call.queries / (kGridGroups * kGridQueries) + call.frames;  // of a head, at most
    launch(context, "grid_attention warpgroups", grid_warpgroups_kernel,
           std::min(context.sms, tiles * call.heads), kBlockThreads, kGridShared, call);
}

}  // namespace quern::cuda::attention
