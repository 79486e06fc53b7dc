// moe_down with NVFP4 weights and few rows. Up to 8 rows: block = one tile of 16 output rows, all terms of
// it.
//   one row: 16 warps share the splits of all terms; the block's weights are all under way before it waits for
//     gate and up, because ids and weights come while it works (Choice::ready)
//   2 to 8 rows: a warp takes a group of up to 8 rows of an expert at a time
//   9 to 64: tiles of all groups shared out evenly (fp4_stream.cuh); terms meet in a kernel of their own
//   prompts of up to 64 rows: the same stream, terms as gemm.h makes them
// A term's bits depend on its row only, and a row's terms are added in the order of its choices. No atomics.
// Traffic: the weights of each needed expert once; up to 8 rows every block reads all rows of routed.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/deferred.cuh"
#include "ggml-like/cuda/moe/fp4_stream.cuh"
#include "ggml-like/cuda/moe/moe.h"
#include "ggml-like/cuda/moe/route.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

constexpr int kMaxTerms = 33;  // of a row

struct Shape {
    ColumnSplits routed, shared;
    int piece_splits;  // splits a piece
    int piece_bytes;
    int depth;
};

/// The block's tile of an expert, -1: the shared one.
struct Tile {
    const uint8_t* data;
    const float* factor;

    __device__ __forceinline__ Tile(const Down& a, int expert) {
        const int tile = blockIdx.x;
        data = expert < 0 ? a.shared.data + static_cast<int64_t>(tile) * a.shared_chunks * kFp4Chunk
                          : a.experts.data + expert * a.experts.expert_bytes +
                                static_cast<int64_t>(tile) * a.experts.chunks * kFp4Chunk;
        factor = expert < 0
                     ? a.shared.factor + tile * kTileRows
                     : a.experts.factor + (static_cast<int64_t>(expert) * a.experts.tiles + tile) * kTileRows;
    }
};

/// Where 16 numbers of routed or of shared come from and go to: block b of the rows in shared memory.
struct RowBlock {
    const bf16* from = nullptr;  // null: zeros
    uint8_t* row = nullptr;      // null: there is no such block
    int block = 0;

    __device__ __forceinline__ RowBlock(const Down& a, int b, uint8_t* routed, int routed_bytes,
                                        uint8_t* shared, int shared_bytes) {
        const int blocks = a.experts.chunks * 4, routed_blocks = a.rows * a.used * blocks;
        const int shared_blocks = a.shared_chunks * 4;
        if (b >= routed_blocks + a.rows * shared_blocks) return;
        const bool is_shared = b >= routed_blocks;
        const int at = is_shared ? b - routed_blocks : b, each = is_shared ? shared_blocks : blocks;
        const int n = quotient(at, each), width = is_shared ? a.shared_width : a.width;
        block = at - n * each;
        row = is_shared ? shared + n * shared_bytes : routed + n * routed_bytes;
        if (block * 16 < width)
            from = (is_shared ? a.shared_in : a.routed) + static_cast<int64_t>(n) * width + block * 16;
    }
    __device__ __forceinline__ void copy() const {
        Fp4Block numbers;
        if (from != nullptr) numbers.load(from);
        if (row != nullptr) numbers.store(row, block);
    }
};

/// Rows of routed and of shared into shared memory, all threads of the block, from block `first` on.
/// kTogether: loads of a thread that are under way at the same time.
template <int kTogether>
__device__ __forceinline__ void load_rows(const Down& a, int first, uint8_t* routed, int routed_bytes,
                                          uint8_t* shared, int shared_bytes) {
    const int all = a.rows * 4 * (a.used * a.experts.chunks + a.shared_chunks);
#pragma unroll(kTogether)
    for (int b = first + threadIdx.x; b < all; b += kThreads)
        RowBlock(a, b, routed, routed_bytes, shared, shared_bytes).copy();
}

/// What the end needs of row n of the step and row r of the tile.
struct Before {
    float residual = 0, norm = 0;

    __device__ __forceinline__ void load(const Down& a, int n, int r) {
        const int row = blockIdx.x * kTileRows + r;
        if (row >= a.experts.rows) return;
        residual = __ldcg(a.residual + n * a.ld + row);
        norm = a.next.norm[row];
    }
};
/// y of row r of the tile for row n of the step, from its terms [used + 1][16]; 16 neighbouring lanes.
__device__ __forceinline__ void add_terms(const Down& a, const float* terms, int n, int r,
                                          const Before& before) {
    const int row = blockIdx.x * kTileRows + r;
    if (row >= a.experts.rows) return;
    float sum = before.residual;
#pragma unroll 9
    for (int j = 0; j <= a.used; ++j) sum += terms[j * kTileRows + r];
    a.y[n * a.ld + row] = sum;
    defer_column(a.next, n, row, sum, before.norm);
}

// ---- one row ----

/// kEach: chunks of every split, if a warp's units are the same split of every so many terms; else 0.
template <int kEach>
__global__ void __launch_bounds__(kThreads, 1) down_fp4_one(Down a, Shape s) {
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
    // The end: thread = row r of term `last`.
    const int last = threadIdx.x / kTileRows, r = threadIdx.x % kTileRows;
    // One warp asks: thousands of requests for one line of memory take their time.
    if (warp == 0 && lane <= a.used) chosen[lane] = published(a.ready + lane);
    __syncthreads();
    const int id = term < a.used ? chosen[term].id : -1, last_id = last < a.used ? chosen[last].id : -1;
    const float weight = last <= a.used ? chosen[last].weight : 0.0f;
    const int begin = term < a.used ? s.routed.begin(split) : s.shared.begin(split);
    const int chunks = (term < a.used ? s.routed.end(split) : s.shared.end(split)) - begin;
    const Tile mine(a, id);
    const uint8_t* first = mine.data + begin * kFp4Chunk;
    const int count = __popc(__ballot_sync(0xffffffffu, own < units));
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const auto* from =
            reinterpret_cast<const uint8_t*>(__shfl_sync(0xffffffffu, reinterpret_cast<uint64_t>(first), i));
        const int n = (kEach > 0 ? kEach : __shfl_sync(0xffffffffu, chunks, i)) * kFp4Chunk;
#pragma unroll(kEach > 0 ? 3 : 1)
        for (int k = 16 * lane; k < n; k += 512) copy_async16(ring + i * s.piece_bytes + k, from + k);
    }
    commit_copies();
    const float factor = last <= a.used ? Tile(a, last_id).factor[r] * weight : 0.0f;
    Before before;
    if (last == 0) before.load(a, 0, r);
    const RowBlock own_block(a, threadIdx.x, rows, row_bytes, rows + a.used * row_bytes, 0);
    const int x_at = term * row_bytes + begin * 128;
    const uint8_t* x = rows + __shfl_sync(0xffffffffu, x_at, 0) + 16 * (lane & 3);
    const int x_step = quotient(kWarps, s.routed.count) * row_bytes;
    wait_for_predecessor();
    allow_successor();
    own_block.copy();
    load_rows<1>(a, kThreads, rows, row_bytes, rows + a.used * row_bytes, 0);
    wait_copies<0>();
    __syncthreads();
    float* to = sums + warp * kTileRows + (lane >> 2);
#pragma unroll(kEach == 1 ? 2 : 1)
    for (int i = 0; i < count; ++i, x += x_step, to += kWarps * kTileRows) {
        const int n = kEach > 0 ? kEach : __shfl_sync(0xffffffffu, chunks, i);
        if constexpr (kEach == 0) x = rows + __shfl_sync(0xffffffffu, x_at, i) + 16 * (lane & 3);
        float acc[4] = {};
#pragma unroll(kEach > 0 ? kEach : 1)
        for (int c = 0; c < n; ++c)
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
    if (last == 0) add_terms(a, terms, 0, r, before);
}

// ---- more rows ----

/// Until groups, ids and weights are complete.
__device__ __forceinline__ void wait_for_choice(const Down& a) {
    if (a.ready == nullptr) return wait_for_predecessor();
    if (threadIdx.x == 0) published(a.ready), __threadfence();
    __syncthreads();
}

/// The pieces of one warp's groups: group after group, every kWarps-th.
template <int kEach>
struct GroupPieces {
    const Down& a;
    const Shape& s;
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
        if (split == 0) from = Tile(a, expert).data;
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

/// Sums over a tile of `splits`.
template <int kEach, bool kHalf, class Ring>
__device__ __forceinline__ void sum_group(Ring& ring, const ColumnSplits& splits, const Shape& s,
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

/// kEach: chunks of every split if pieces are WholePieceRing's, else 0.
template <int kEach>
__global__ void __launch_bounds__(kThreads, 1) down_fp4_few(Down a, Shape s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ uint64_t barriers[kWarps][kMaxPieces];
    __shared__ ExpertGroups list;
    __shared__ float weights[kFewStepRows * kMaxTerms];  // of pairs, then of the shared expert
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
    load_rows<4>(a, 0, rows, routed_bytes, shared_rows, shared_bytes);
#pragma unroll 1
    for (int i = 1; i < s.depth; ++i) pieces.next(ring);
    __syncthreads();
    for (int index = warp; index < list.count; index += kWarps) {
        const ExpertGroup group = list.group[index];
        const bool is_shared = group.expert < 0;
        // Of the group's row i: its pair, or its row of the step for the shared expert.
        const auto pair_of = [&](int i) {
            const int at = group.first + min(i, group.count - 1);
            return is_shared ? at : static_cast<int>(list.pair[at]);
        };
        const Tile tile(a, group.expert);
        const float low_factor = tile.factor[g], high_factor = tile.factor[g + 8];
        // Of up to four rows, row i is columns 2i and 2i + 1 of the products, and the second is not summed.
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
    if (n < a.rows) add_terms(a, terms + n * (a.used + 1) * kTileRows, n, r, before);
}

// ---- 9 to 64 rows ----

template <bool kOfPrompt>
struct DownWork {
    const Down& a;
    static constexpr bool kPrompt = kOfPrompt;
    static constexpr bool kRowsFirst = false;

    __device__ __forceinline__ void before_rows() const {
        wait_for_predecessor();
        allow_successor();
    }
    __device__ __forceinline__ const bf16* row(bool is_shared, int index) const {
        return (is_shared ? a.shared_in : a.routed) + static_cast<int64_t>(index) * width(is_shared);
    }
    __device__ __forceinline__ int width(bool is_shared) const {
        return is_shared ? a.shared_width : a.width;
    }
    __device__ __forceinline__ float weight(bool is_shared, int index) const {
        return __ldcg((is_shared ? a.shared_gate : a.weights) + index);
    }
    struct Target {
        int64_t term;  // its first element
        float weight;
    };
    __device__ __forceinline__ Target target(bool is_shared, int index, float weight) const {
        const int term = is_shared ? index * (a.used + 1) + a.used : index + quotient(index, a.used);
        return {static_cast<int64_t>(term) * a.experts.rows, weight};
    }
    __device__ __forceinline__ void store(const Target& target, int tile, int r, float low, float high,
                                          float low_factor, float high_factor) const {
        const int at = tile * kTileRows + r;
        store_one(target, at, low, low_factor);
        store_one(target, at + 8, high, high_factor);
    }

  private:
    __device__ __forceinline__ void store_one(const Target& target, int at, float sum, float factor) const {
        if (at >= a.experts.rows) return;
        if constexpr (kPrompt)
            static_cast<bf16*>(a.terms)[target.term + at] =
                __float2bfloat16_rn(sum * (factor * kRowLift<Kind::nvfp4>));
        else
            static_cast<float*>(a.terms)[target.term + at] = factor * target.weight * sum;
    }
};

template <int kEach, bool kPrompt>
__global__ void __launch_bounds__(kThreads, 1) down_fp4_terms(Down a, Stream s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamShared k;
    wait_for_choice(a);
    list_groups(k.list, a.groups, a.experts.count, a.rows * a.used, a.rows);
    stream_groups<kEach>(DownWork<kPrompt>{a}, s, k, shared);
}

constexpr int kSumThreads = 256;

/// A thread 4 columns of a row of y.
__global__ void __launch_bounds__(kSumThreads) down_fp4_sum(Down a) {
    const int n = blockIdx.x, columns = a.experts.rows, column = (blockIdx.y * kSumThreads + threadIdx.x) * 4;
    wait_for_predecessor();
    allow_successor();
    if (column >= columns) return;
    const float* terms =
        static_cast<const float*>(a.terms) + static_cast<int64_t>(n) * (a.used + 1) * columns + column;
    float4 sum = __ldcg(reinterpret_cast<const float4*>(a.residual + n * a.ld + column));
#pragma unroll 9
    for (int j = 0; j <= a.used; ++j) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(terms + static_cast<int64_t>(j) * columns));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<float4*>(a.y + n * a.ld + column) = sum;
    defer_four(a.next, n, column, sum, *reinterpret_cast<const float4*>(a.next.norm + column));
}

static_assert(kThreads >= kTileRows * kFewStepRows, "a thread an output of down_fp4_few");
static_assert(kThreads >= kTileRows * 32, "a thread a row of a term of down_fp4_one");

template <bool kPrompt>
bool make_terms(Context& c, const Down& a, int limit) {
    if (a.rows > kGroupRows || a.rows * a.used > kGroupPairs || a.experts.rows % 4 != 0) return false;
    Stream s{{a.experts.data, a.experts.factor, a.experts.expert_bytes, a.experts.tiles, a.experts.chunks},
             {a.shared.data, a.shared.factor, 0, a.experts.tiles, a.shared_chunks}};
    if (!fit_stream(s, limit)) return false;
    const auto kernel = s.each == 1   ? down_fp4_terms<1, kPrompt>
                        : s.each == 2 ? down_fp4_terms<2, kPrompt>
                                      : down_fp4_terms<0, kPrompt>;
    launch(c, "moe_down", kernel, min(c.sms, a.rows * (a.used + 1) * a.experts.tiles), kThreads, s.bytes(), a,
           s);
    return true;
}

bool down_many(Context& c, const Down& a, int limit) {
    if (!make_terms<false>(c, a, limit)) return false;
    const dim3 grid(a.rows, (a.experts.rows + 4 * kSumThreads - 1) / (4 * kSumThreads));
    launch(c, "moe_down", down_fp4_sum, grid, kSumThreads, 0, a);
    return true;
}

/// A launch of down_fp4_one or down_fp4_few.
struct FewLaunch {
    Shape shape;
    void (*kernel)(Down, Shape) = nullptr;  // null: too little shared memory
    int bytes = 0;
};

/// Bytes of all rows of routed and of shared.
int rows_bytes(const Down& a) {
    return a.rows * (a.used * fp4_row_bytes(a.experts.chunks) + fp4_row_bytes(a.shared_chunks));
}

FewLaunch one_launch(const Down& a, Shape s, int limit) {
    const int units = a.used * s.routed.count + s.shared.count;
    s.piece_bytes = max(s.routed.each, s.shared.each) * kFp4Chunk;
    s.depth = (units + kWarps - 1) / kWarps;
    const int bytes = kWarps * s.depth * s.piece_bytes + rows_bytes(a) + units * kTileRows * 4;
    if (bytes > limit || s.depth > kMaxPieces || a.used >= 32) return {s};
    const bool whole = s.routed.chunks == s.shared.chunks && s.routed.chunks % s.routed.each == 0 &&
                       kWarps % s.routed.count == 0;
    const int each = whole ? s.routed.each : 0;
    return {s, each == 1 ? down_fp4_one<1> : each == 2 ? down_fp4_one<2> : down_fp4_one<0>, bytes};
}

FewLaunch rows_launch(const Down& a, Shape s, int limit) {
    const int rest = rows_bytes(a) + a.rows * (a.used + 1) * kTileRows * 4;
    const auto bytes = [&] { return kWarps * s.depth * s.piece_bytes + rest; };
    const int whole = whole_each(s.routed, s.shared), each = max(s.routed.each, s.shared.each);
    s.depth = kPieceDepth, s.piece_bytes = WholePieceRing::kBytes;
    if ((whole == 1 || whole == 2) && bytes() <= limit)
        return {s, whole == 1 ? down_fp4_few<1> : down_fp4_few<2>, bytes()};
    s.depth = 2;
    for (s.piece_splits = 4; s.piece_splits > 0; s.piece_splits /= 2) {
        s.piece_bytes = s.piece_splits * each * kFp4Chunk;
        if (bytes() <= limit) return {s, down_fp4_few<0>, bytes()};
    }
    return {s};
}

constexpr int kStatic = 8 * 1024;  // static shared memory at most

/// Up to kFewStepRows rows.
FewLaunch few_launch(const Context& c, const Down& a) {
    const Shape s{
        .routed = ColumnSplits(a.experts.chunks), .shared = ColumnSplits(a.shared_chunks), .piece_splits = 1};
    if (a.rows > kFewStepRows || a.used >= kMaxTerms - 1) return {s};
    const int limit = c.shared_bytes - kStatic;
    const FewLaunch one = a.rows == 1 ? one_launch(a, s, limit) : FewLaunch{s};
    return one.kernel != nullptr ? one : rows_launch(a, s, limit);
}

}  // namespace

bool down_fp4(Context& c, const Down& a) {
    const FewLaunch few = few_launch(c, a);
    Down arguments = a;
    const bool is_one =
        few.kernel == down_fp4_one<0> || few.kernel == down_fp4_one<1> || few.kernel == down_fp4_one<2>;
    // What comes there of one row says nothing of groups.
    if (a.rows == 1 && !is_one) arguments.ready = nullptr;
    if (few.kernel == nullptr) return down_many(c, arguments, c.shared_bytes - kStatic);
    launch(c, "moe_down", few.kernel, a.experts.tiles, kThreads, few.bytes, arguments, few.shape);
    return true;
}

bool down_fp4_prompt_terms(Context& c, const Down& a) {
    return make_terms<true>(c, a, c.shared_bytes - kStatic);
}

}  // namespace quern::cuda::moe
