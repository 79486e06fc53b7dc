// moe_down with NVFP4 weights and one answer row: all terms of 16 output rows in one block.
//
//   block = a tile of 16 output rows; 16 warps
//
//     term             0               1         ...      used (the shared expert)
//     split       0  1  2 ..     0  1  2 ..               0  1  2 ..
//     unit        0  1  2 ..     n n+1 ..                                  warp w has units w, w + 16, ...
//
//   then thread = row r of a term: adds its splits in order; then 16 threads add the terms in order, of ranks also these sums
//   (comm/tile_sums.cuh), and do the next norm's part
//
// Shared memory: a place for every unit's weights (no ring: all are under way at once, and before the kernel waits for
// gate and up, because ids and weights come while that runs: Choice::ready); x of all terms; the units' sums.
//
// Traffic: the weights of each chosen expert once; every block reads all of x. Bound: latency. Inside the kernel 0.5 us
// load x, 1.4 us products, 0.5 us end; the weights take 1.3 us (H200, 2026-11).
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/down_fp4.cuh"
#include "ggml-like/cuda/moe/piece_ring.cuh"
#include "ggml-like/cuda/moe/route.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// kDownEach chunks a split; a warp's units are all of the same split.
template <class End>
__global__ void __launch_bounds__(kThreads, 1)
    down_fp4_one(Down a, DownShape s, const __grid_constant__ typename End::Parameter given) {
    End end(given);
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ float terms[kMaxTerms * kTileRows];
    __shared__ Chosen chosen[kMaxTerms];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row_bytes = fp4_row_bytes(a.experts.chunks);
    uint8_t* rows = shared + kWarps * s.depth * s.piece_bytes;
    float* sums =
        reinterpret_cast<float*>(rows + a.used * row_bytes + fp4_row_bytes(a.shared_chunks));  // [unit][16]
    uint8_t* ring = shared + warp * s.depth * s.piece_bytes;  // a place for every unit
    // Unit = split `split` of term `term`, the shared expert's last; lane i has the warp's unit i.
    const int units = a.used * s.routed.count + s.shared.count, own = warp + lane * kWarps;
    const int term = min(quotient(own, s.routed.count), a.used), split = own - term * s.routed.count;
    // Epilogue: thread = row r of term `last`.
    const int last = threadIdx.x / kTileRows, r = threadIdx.x % kTileRows;
    // One warp polls: thousands of requests for one cache line would queue.
    if (warp == 0 && lane <= a.used) chosen[lane] = published(a.ready + lane);
    __syncthreads();
    const int id = term < a.used ? chosen[term].id : -1, last_id = last < a.used ? chosen[last].id : -1;
    const float weight = last <= a.used ? chosen[last].weight : 0.0f;
    const int begin = term < a.used ? s.routed.begin(split) : s.shared.begin(split);
    const DownTile mine(a, id);
    const uint8_t* first = mine.data + begin * kFp4Chunk;
    const int count = __popc(__ballot_sync(0xffffffffu, own < units));
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const auto* from =
            reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(first), i));
#pragma unroll 3
        for (int k = 16 * lane; k < kDownEach * kFp4Chunk; k += 512)
            copy_async16(ring + i * s.piece_bytes + k, from + k);
    }
    commit_copies();
    const float factor = last <= a.used ? DownTile(a, last_id).factor[r] * weight : 0.0f;
    Before before;
    if (last == 0) before.load(a, 0, r);
    const RowBlock own_block(a, threadIdx.x, rows, row_bytes, rows + a.used * row_bytes, 0);
    const int x_at = term * row_bytes + begin * 128;
    const uint8_t* x = rows + __shfl_sync(0xffffffffu, x_at, 0) + 16 * (lane & 3);
    const int x_step = quotient(kWarps, s.routed.count) * row_bytes;
    wait_for_predecessor();
    allow_successor();
    end.begin(last == 0, 0, r);
    own_block.copy();
    load_rows<1>(a, kThreads, rows, row_bytes, rows + a.used * row_bytes, 0);
    wait_copies<0>();
    __syncthreads();
    float* to = sums + warp * kTileRows + (lane >> 2);
#pragma unroll 2
    for (int i = 0; i < count; ++i, x += x_step, to += kWarps * kTileRows) {
        float acc[4] = {};
#pragma unroll
        for (int c = 0; c < kDownEach; ++c)
            multiply_fp4<true>(ring + i * s.piece_bytes + c * kFp4Chunk, x + c * 128, lane, acc);
        if ((lane & 3) == 0) {
            to[0] = acc[0];
            to[8] = acc[2];
        }
    }
    __syncthreads();
    if (last <= a.used) {
        const float* from = sums + last * s.routed.count * kTileRows + r;
        terms[threadIdx.x] =
            factor * add_in_order(last < a.used ? s.routed.count : s.shared.count, from, kTileRows);
    }
    __syncthreads();
    if (last == 0) end.add(a, terms, 0, r, before);
}

static_assert(kThreads >= kTileRows * 32, "a thread a row of a term of down_fp4_one");

}  // namespace

void launch_down_one(Context& c, const Down& a, const comm::Peers* peers) {
    const DownLaunch l = down_one_launch(c, a.used, a.experts.chunks, a.shared_chunks);
    if (peers == nullptr)
        launch(c, "moe_down one", down_fp4_one<AddTerms>, a.experts.tiles, kThreads, l.bytes, a, l.shape,
               AddTerms::Parameter{});
    else
        launch(c, "moe_down one of ranks", down_fp4_one<AddTermsOverRanks>, a.experts.tiles, kThreads,
               l.bytes, a, l.shape, *peers);
}

}  // namespace quern::cuda::moe
