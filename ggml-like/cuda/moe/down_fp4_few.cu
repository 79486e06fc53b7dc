// moe_down with NVFP4 weights and 2 to 8 answer rows: all terms of 16 output rows in one block.
//
//   block = a tile of 16 output rows; 16 warps
//
//     groups (up to 8 rows of one expert)   | shared | expert 3 | expert 7 | expert 9 | ...
//     warp                                      0         1          2          3       ...    then warp + 16, ...
//
//   A warp makes whole sums of its groups' rows, split after split. Terms meet in shared memory, where a thread an
//   output adds them in order, of ranks also these sums (comm/tile_sums.cuh), and does the next norm's part.
//
// Shared memory: a ring of pieces a warp, rows of routed and shared_in, terms.
//
// Traffic: the weights of each needed expert once; every block reads all rows of x. Bound: instructions and latency
// rather than bytes: 8 rows took 18.7 us with launch gap, 8.0 us of them for bytes, before all rows were
// asked for at once (some 1 us; H200, 2026-11). As a stream
// (down_fp4_terms.cu) 2 and 4 rows were 2 to 3 % of a step slower.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/down_fp4.cuh"
#include "ggml-like/cuda/moe/fp4_stream.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// Asks for the pieces of one warp's groups, every kWarps-th of the list, one after another.
template <int kEach>
struct GroupPieces {
    const Down& a;
    const DownShape& s;
    const ExpertGroups& list;
    int ahead, split = 0;
    const uint8_t* from = nullptr;

    template <class Ring>
    __device__ __forceinline__ void next(Ring& ring) {
        if (ahead >= list.count) {
            if constexpr (kEach > 0) ring.request(nullptr);
            return;
        }
        const int expert = list.group[ahead].expert;
        if (split == 0) from = DownTile(a, expert).data;
        const int all = expert < 0 ? s.shared.chunks : s.routed.chunks;
        if constexpr (kEach > 0) {
            ring.request(from);
            from += WholePieceRing::kBytes;
            split += kPieceChunks;
            if (split >= all) split = 0, ahead += kWarps;
        } else {
            const int count = expert < 0 ? s.shared.count : s.routed.count,
                      each = expert < 0 ? s.shared.each : s.routed.each;
            const int bytes = (min((split + s.piece_splits) * each, all) - split * each) * kFp4Chunk;
            ring.request(from, bytes);
            from += bytes;
            split += s.piece_splits;
            if (split >= count) split = 0, ahead += kWarps;
        }
    }
};

/// total = the sums of one group over the block's tile; its pieces come through the ring.
template <int kEach, bool kHalf, class Ring>
__device__ __forceinline__ void sum_group(Ring& ring, const ColumnSplits& splits, const DownShape& s,
                                          const uint8_t* x, int lane, GroupPieces<kEach>& pieces,
                                          float (&total)[4]) {
    if constexpr (kEach == 0) {
        sum_tile<kHalf>(
            ring, splits, s.piece_splits, x, lane, [&] { pieces.next(ring); }, total);
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] = 0;
        for (int c = 0; c < splits.chunks; c += kPieceChunks) {
            add_whole_piece<kEach, kHalf>(ring.wait(), x + c * 128, lane, total);
            ring.release();
            pieces.next(ring);
        }
    }
}

/// kEach: chunks of every split if pieces go through WholePieceRing, else 0.
template <int kEach, class End>
__device__ __forceinline__ void add_groups(const Down& a, const DownShape& s, End end) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMaxPieces];
    __shared__ ExpertGroups list;
    __shared__ float weights[kFewStepRows * kMaxTerms];  // of pairs, then the shared expert's of rows
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane >> 2;
    const int routed_bytes = fp4_row_bytes(a.experts.chunks), shared_bytes = fp4_row_bytes(a.shared_chunks);
    const int pairs = a.rows * a.used;
    uint8_t* rows = shared + kWarps * s.depth * s.piece_bytes;
    uint8_t* shared_rows = rows + pairs * routed_bytes;
    float* terms = reinterpret_cast<float*>(shared_rows + a.rows * shared_bytes);  // [rows][used + 1][16]
    uint8_t* own_ring = shared + warp * s.depth * s.piece_bytes;
    auto ring = [&] {
        if constexpr (kEach > 0)
            return WholePieceRing(own_ring, lane);
        else
            return PieceRing(own_ring, barriers[warp], s.piece_bytes, s.depth, lane);
    }();
    wait_for_choice(a);
    list_groups(list, a.groups, a.experts.count, pairs, a.rows);
    GroupPieces<kEach> pieces{a, s, list, warp};
    pieces.next(ring);
    static_assert(kThreads >= kFewStepRows * kMaxTerms);
    if (threadIdx.x < pairs + a.rows)
        weights[threadIdx.x] =
            __ldcg(threadIdx.x < pairs ? a.weights + threadIdx.x : a.shared_gate + threadIdx.x - pairs);
    const int r = threadIdx.x % kTileRows, n = threadIdx.x / kTileRows;  // of the output
    Before before;
    if (n < a.rows) before.load(a, n, r);
    wait_for_predecessor();
    allow_successor();
    end.begin(n < a.rows, n, r);
    load_rows<5>(a, 0, rows, routed_bytes, shared_rows, shared_bytes);
#pragma unroll 1
    for (int i = 1; i < s.depth; ++i) pieces.next(ring);
    __syncthreads();
    for (int index = warp; index < list.count; index += kWarps) {
        const ExpertGroup group = list.group[index];
        const bool is_shared = group.expert < 0;
        // The pair of the group's row i; of the shared expert the row of the step.
        const auto pair_of = [&](int i) {
            const int at = group.first + min(i, group.count - 1);
            return is_shared ? at : static_cast<int>(list.pair[at]);
        };
        const DownTile tile(a, group.expert);
        const float low_factor = tile.factor[g], high_factor = tile.factor[g + 8];
        // With up to four rows, row i is columns 2i and 2i + 1 of the products, and only the first is summed.
        const bool half = group.count <= kPassRows / 2;
        const int own = pair_of(half ? g / 2 : g);
        const uint8_t* x =
            (is_shared ? shared_rows + own * shared_bytes : rows + own * routed_bytes) + 16 * (lane & 3);
        ColumnSplits splits = s.routed;
        if (is_shared) splits = s.shared;
        float acc[4];
        if (half)
            sum_group<kEach, true>(ring, splits, s, x, lane, pieces, acc);
        else
            sum_group<kEach, false>(ring, splits, s, x, lane, pieces, acc);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int at = half ? lane & 3 : 2 * (lane & 3) + i;
            if (at >= group.count || (half && i > 0)) continue;
            const int pair = pair_of(at);
            const float weight = weights[is_shared ? pairs + pair : pair];
            float* to =
                terms +
                (is_shared ? pair * (a.used + 1) + a.used : pair + quotient(pair, a.used)) * kTileRows + g;
            to[0] = low_factor * weight * acc[i];
            to[8] = high_factor * weight * acc[2 + i];
        }
    }
    __syncthreads();
    if (n < a.rows) end.add(a, terms + n * (a.used + 1) * kTileRows, n, r, before);
}

template <int kEach>
__global__ void __launch_bounds__(kThreads, 1) down_fp4_few(Down a, DownShape s) {
    add_groups<kEach>(a, s, AddTerms({}));
}

template <int kEach>
__global__ void __launch_bounds__(kThreads, 1)
    down_fp4_few_of_ranks(Down a, DownShape s, const __grid_constant__ comm::Peers peers) {
    add_groups<kEach>(a, s, AddTermsOverRanks(peers));
}

static_assert(kThreads >= kTileRows * kFewStepRows, "a thread an output of down_fp4_few");

}  // namespace

void launch_down_few(Context& c, const Down& a, const comm::Peers* peers) {
    const DownLaunch l = down_few_launch(c, a.rows, a.used, a.experts.chunks, a.shared_chunks);
    const auto kernel = l.whole ? down_fp4_few<kDownEach> : down_fp4_few<0>;
    const auto of_ranks = l.whole ? down_fp4_few_of_ranks<kDownEach> : down_fp4_few_of_ranks<0>;
    if (peers == nullptr)
        launch(c, "moe_down few", kernel, a.experts.tiles, kThreads, l.bytes, a, l.shape);
    else
        launch(c, "moe_down few of ranks", of_ranks, a.experts.tiles, kThreads, l.bytes, a, l.shape, *peers);
}

}  // namespace quern::cuda::moe
