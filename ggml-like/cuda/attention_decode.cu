// Attention of few rows: norm, rotary embedding, KV write, split keys, combine and gate in one kernel.
//
//   cluster = one chunk of the keys of one (row, KV head):  block 0 | block 1 | ... | block 7
//   block   = a run of 64-key tiles:  K0 V0 K1 V1 ... through a ring of three 32 KB slots
//   warp    = scores of 16 keys of the tile, S^T[16, 8 heads] = K q^T; then 64 elements, O^T[64, 8 heads] += V^T P^T
//
// Memory: K and V of old keys once from the cache, started before the predecessor ends; keys of this step from the
// inputs. Blocks of a cluster exchange results through shared memory; only rows of more than 1024 keys go through
// `work`. How keys are split depends on the row's position alone, so a row's result does not depend on its batch
// (steps of more than 8 rows are split less).
// Limits: head_dim 256, 64 rotary dims, at most 8 query heads a KV head, 98 KB of shared memory.
#include "ggml-like/cuda/attention.cuh"
#include "ggml-like/cuda/launch.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER_OF(n) __cluster_dims__(n, 1, 1)
#else
#define CLUSTER_OF(n)
#endif

namespace quern::cuda {
namespace {

constexpr int kDim = 256, kHeads = 8;
constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kTileKeys = kKeysPerPage, kWarpKeys = kTileKeys / kWarps, kWarpDims = kDim / kWarps;
constexpr int kRowBytes = kDim * 2, kSlotBytes = kTileKeys * kRowBytes, kRing = 3;
static_assert(kWarpKeys == 16 && kWarpDims == 64);

/// Shared memory. Slot 2 first takes q, between chunks the block's result: head h's sums begin at h * kOutRow.
struct Shared {
    char ring[kRing][kSlotBytes];
    char p[kHeads * kTileKeys * 2];     // probabilities [head][key], BF16
    float2 highest[kWarps][kHeads / 2]; // of each warp's scores, two heads
    float2 sums[kWarps][kHeads / 2];
    float2 totals[kHeads];              // the block's maximum and sum
    unsigned answer;
};
constexpr int kSpare = 2, kOutRow = kDim + 4;  // the pad spreads heads over the banks
constexpr int kQueryRows = 8;                  // rows of slot 2 that q takes
static_assert(sizeof(Shared) <= 99 * 1024 && kHeads * kOutRow * 4 <= kSlotBytes);

#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

__host__ __device__ constexpr int most_chunks(int tokens, bool clusters) {
    return tokens > kSplitRows ? 1 : clusters ? kMaxChunks : kSoloChunks;
}

/// Where a block's row stands. Keys from `fresh` on belong to this step and are not in the cache yet.
struct Row {
    int t, kv_head, group, keys, fresh, fresh_row;
    const int* pages;
    int64_t own_place;  // of the row's own key in the caches
};

/// A block's run of tiles. Pages of a tile are read one step ahead.
struct Share {
    int tile, tiles, page, next_page;
};

__device__ __forceinline__ int page_of(const Row& row, int tile) {
    return row.pages[min(tile, (row.keys - 1) / kTileKeys)];
}

__device__ __forceinline__ Share share_of(const Row& row, int chunk, int chunks) {
    const int tiles = (row.keys + kTileKeys - 1) / kTileKeys, shares = chunks * kSplitBlocks;
    const int each = (tiles + shares - 1) / shares;
    const int first = (chunk * kSplitBlocks + static_cast<int>(blockIdx.x) % kSplitBlocks) * each;
    return {first, max(0, min(each, tiles - first)), page_of(row, first), page_of(row, first + 1)};
}

__device__ __forceinline__ int64_t cache_place(const AttentionCall& c, const Row& row, int page, int key) {
    return ((static_cast<int64_t>(page) * c.kv_heads + row.kv_head) * kKeysPerPage + key % kKeysPerPage) * kDim;
}

/// Where 16-byte piece `piece` of row r of a tile lies: one column of eight rows meets all banks.
__device__ __forceinline__ int piece_at(int r, int piece) { return r * kRowBytes + ((piece ^ (r & 7)) << 4); }

__device__ __forceinline__ char* slot_of(Shared& shared, int item) { return shared.ring[item % kRing]; }

/// Starts copying the warp's rows begin .. end-1 of item `item` of the share: K (even) or V (odd) of tile item / 2.
/// Skips fresh keys; zeros follow the last key.
__device__ __forceinline__ void start_old(const AttentionCall& c, const Row& row, const Share& share, int item, int page,
                                          Shared& shared, int begin, int end) {
    if (item / 2 >= share.tiles) return;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;
    const int key = (share.tile + item / 2) * kTileKeys + first;
    const bf16* from = (item & 1 ? c.v_cache : c.k_cache) + cache_place(c, row, page, key) + lane * 8;
    char* to = slot_of(shared, item) + first * kRowBytes;
    if (key + kWarpKeys <= row.fresh && end - begin == kWarpKeys) {
#pragma unroll
        for (int r = 0; r < kWarpKeys; ++r) copy_async16(to + piece_at(r, lane), from + r * kDim);
    } else {
#pragma unroll 1
        for (int r = begin; r < end; ++r)
            if (key + r < row.fresh || key + r >= row.keys)
                copy_async16(to + piece_at(r, lane), from + r * kDim, key + r < row.fresh);
    }
}

/// Starts copying the warp's fresh keys or values of an item, raw, from the inputs.
__device__ __forceinline__ void start_fresh(const AttentionCall& c, const Row& row, const Share& share, int item,
                                            Shared& shared) {
    if (item / 2 >= share.tiles) return;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;
    const int key = (share.tile + item / 2) * kTileKeys + first;
    char* to = slot_of(shared, item) + first * kRowBytes;
#pragma unroll 1
    for (int r = max(0, row.fresh - key); r < min(kWarpKeys, row.keys - key); ++r) {
        const HeadRows& from = item & 1 ? c.v : c.k;
        copy_async16(to + piece_at(r, lane), from.at(row.fresh_row + key + r - row.fresh, row.kv_head) + lane * 8);
    }
}

__device__ __forceinline__ void start_item(const AttentionCall& c, const Row& row, const Share& share, int item,
                                           int page, Shared& shared) {
    start_old(c, row, share, item, page, shared, 0, kWarpKeys);
    start_fresh(c, row, share, item, shared);
}

/// Norm and rotary embedding of a head of which lane l holds elements 8l .. 8l+7.
__device__ __forceinline__ uint4 norm_rope(const AttentionCall& c, uint4 raw, const float (&norm)[8], int position,
                                           int lane) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float x[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(words[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
        sum += v.x * v.x + v.y * v.y;
    }
    const float r = rsqrtf(warp_sum(sum) / kDim + c.eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= r * norm[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // elements 0 .. 31 are in lanes 0 .. 3, their partners in lanes 4 .. 7
        const float other = __shfl_xor_sync(0xffffffffu, x[i], 4);
        if (lane < 8) {
            const float2 turn = rotation(c, position, (lane & 3) * 8 + i);
            x[i] = lane < 4 ? x[i] * turn.x - other * turn.y : x[i] * turn.x + other * turn.y;
        }
    }
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}

__device__ __forceinline__ void load_norm(const float* from, int lane, float (&norm)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) norm[i] = from[lane * 8 + i];
}

/// Norms the warp's raw keys of an item in their slot; the row's own key or value goes to the cache.
__device__ __forceinline__ void finish_fresh(const AttentionCall& c, const Row& row, const Share& share,
                                             const float (&k_norm)[8], int item, Shared& shared) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * kWarpKeys;
    const int key = (share.tile + item / 2) * kTileKeys + first, end = min(kWarpKeys, row.keys - key);
    const bool values = item & 1;
#pragma unroll 1
    for (int r = max(0, (values ? row.keys - 1 : row.fresh) - key); r < end; ++r) {
        uint4* at = reinterpret_cast<uint4*>(slot_of(shared, item) + piece_at(first + r, lane));
        uint4 x = *at;
        if (!values) *at = x = norm_rope(c, x, k_norm, key + r, lane);
        if (key + r == row.keys - 1)
            *reinterpret_cast<uint4*>((values ? c.v_cache : c.k_cache) + row.own_place + lane * 8) = x;
    }
    __syncwarp();
}

/// The B operand of S^T: lane l holds elements 16s + 2(l%4) + {0, 1, 8, 9} of head l / 4.
struct Query {
    uint32_t b[kDim / 16][2];
};

/// Each warp norms two heads; all get all of them through the spare slot.
__device__ __forceinline__ void load_query(const AttentionCall& c, const Row& row, const float (&q_norm)[8],
                                           Shared& shared, Query& q) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint4 raw[kHeads / kWarps];
#pragma unroll
    for (int i = 0; i < kHeads / kWarps; ++i) {
        const int head = row.kv_head * row.group + min(warp + i * kWarps, row.group - 1);
        raw[i] = *reinterpret_cast<const uint4*>(c.q.at(row.t, head) + lane * 8);
    }
#pragma unroll
    for (int i = 0; i < kHeads / kWarps; ++i)
        *reinterpret_cast<uint4*>(shared.ring[kSpare] + piece_at(warp + i * kWarps, lane)) =
            norm_rope(c, raw[i], q_norm, row.keys - 1, lane);
    __syncthreads();
#pragma unroll
    for (int s = 0; s < kDim / 16; s += 2) {
        uint32_t b[4];
        load_matrices(b, shared_address(shared.ring[kSpare] + piece_at(lane % 8, 2 * s + lane / 8)));
        q.b[s][0] = b[0], q.b[s][1] = b[1], q.b[s + 1][0] = b[2], q.b[s + 1][1] = b[3];
    }
    __syncthreads();
}

__device__ __forceinline__ float over_keys_max(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}
__device__ __forceinline__ float over_keys_sum(float x) {
#pragma unroll
    for (int d = 4; d < 32; d *= 2) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}

/// Scores of the warp's 16 keys: lane l has heads 2(l%4) + {0, 1}: s[0], s[1] of key l / 4, s[2], s[3] of key l / 4 + 8.
__device__ __forceinline__ void score(const char* rows, const Query& q, int keys_left, float (&s)[4]) {
    const int lane = threadIdx.x % 32;
    const float scale = score_scale(kDim);
    float parts[4][4] = {};
    const uint32_t base = shared_address(rows + piece_at(lane % 16, lane / 16));
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
        uint32_t k[4];
        load_matrices(k, (base ^ ((2 * i & 7) << 4)) + (i >> 2) * 128);
        mma(parts[i % 4], k, q.b[i][0], q.b[i][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        s[e] = (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e]);
        s[e] = lane / 4 + e / 2 * 8 < keys_left ? s[e] * scale : -INFINITY;
    }
}

/// Running result. Lane l holds heads 2(l%4) + {0, 1}: o[j] elements 64w + 16j + l/4 (+8) of both, the maximum over
/// all keys so far, and its share of the sum over its warp's keys.
struct Part {
    float o[kWarpDims / 16][4];
    float maximum[2], sum[2];
};

__device__ __forceinline__ void clear(Part& part) {
#pragma unroll
    for (int j = 0; j < kWarpDims / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = 0;
    part.maximum[0] = part.maximum[1] = -INFINITY;
    part.sum[0] = part.sum[1] = 0;
}

/// Takes in the tile's maximum, which all warps have left in shared memory.
__device__ __forceinline__ void raise_maximum(const Shared& shared, Part& part) {
    float now[2] = {part.maximum[0], part.maximum[1]};
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        const float2 other = shared.highest[w][threadIdx.x % 4];
        now[0] = fmaxf(now[0], other.x), now[1] = fmaxf(now[1], other.y);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float f = fast_exp2(part.maximum[h] - now[h]);
        part.maximum[h] = now[h];
        part.sum[h] *= f;
#pragma unroll
        for (int j = 0; j < kWarpDims / 16; ++j) part.o[j][h] *= f, part.o[j][h + 2] *= f;
    }
}

__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/// Scores to probabilities of the warp's keys, for all warps.
__device__ __forceinline__ void share_probabilities(float (&s)[4], Shared& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = lane / 4;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        s[e] = fast_exp2(s[e] - part.maximum[e % 2]);
        part.sum[e % 2] += s[e];
    }
    char* to = shared.p + head * kTileKeys * 2 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(to + ((2 * warp ^ head) << 4)) = transpose(pack_bf16(s[0], s[1]));
    *reinterpret_cast<uint32_t*>(to + ((2 * warp + 1 ^ head) << 4)) = transpose(pack_bf16(s[2], s[3]));
}

__device__ __forceinline__ void add_values(const char* tile, const Shared& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t p[kTileKeys / 16][2];
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; k += 2) {
        uint32_t b[4];
        load_matrices(b, shared_address(shared.p + lane % 8 * kTileKeys * 2 + ((2 * k + lane / 8 ^ lane % 8) << 4)));
        p[k][0] = b[0], p[k][1] = b[1], p[k + 1][0] = b[2], p[k + 1][1] = b[3];
    }
    const uint32_t base = shared_address(tile + piece_at(lane % 8 + lane / 16 * 8, lane / 8 & 1)) + warp * kWarpDims * 2;
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; ++k)
#pragma unroll
        for (int j = 0; j < kWarpDims / 16; ++j) {
            uint32_t v[4];
            load_matrices_transposed(v, (base ^ (2 * j << 4)) + k * 16 * kRowBytes);
            mma(part.o[j], v, p[k][0], p[k][1]);
        }
}

/// All tiles of the share. On entry items 0 .. 2 are on their way, one group each; fresh keys came with the last.
__device__ __forceinline__ void attend(const AttentionCall& c, const Row& row, Share& share, const Query& q,
                                       const float (&k_norm)[8], Shared& shared, Part& part) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    clear(part);
    if ((share.tile + 1) * kTileKeys > row.fresh) wait_copies<0>();
    for (int tile = 0; tile < share.tiles; ++tile) {
        const int item = 2 * tile, key = (share.tile + tile) * kTileKeys + warp * kWarpKeys;
        const bool fresh = key + kWarpKeys > row.fresh;
        if (tile > 0) {
            __syncthreads();  // the last tile's V has been read
            start_item(c, row, share, item + 2, share.next_page, shared);
            commit_copies();
        }
        wait_copies<2>();
        __syncwarp();
        if (fresh) finish_fresh(c, row, share, k_norm, item, shared);
        float s[4];
        score(slot_of(shared, item) + warp * kWarpKeys * kRowBytes, q, row.keys - key, s);
        const float2 highest{over_keys_max(fmaxf(s[0], s[2])), over_keys_max(fmaxf(s[1], s[3]))};
        if (lane < 4) shared.highest[warp][lane] = highest;
        __syncwarp();
        start_item(c, row, share, item + 3, share.next_page, shared);  // over the warp's own rows of K
        commit_copies();
        share.next_page = page_of(row, share.tile + tile + 2);
        wait_copies<2>();
        if (fresh) finish_fresh(c, row, share, k_norm, item + 1, shared);
        __syncthreads();
        raise_maximum(shared, part);
        share_probabilities(s, shared, part);
        __syncthreads();
        add_values(slot_of(shared, item + 1), shared, part);
    }
    const float2 sums{over_keys_sum(part.sum[0]), over_keys_sum(part.sum[1])};
    if (lane < 4) shared.sums[warp][lane] = sums;
}

/// The block's result into the spare slot and `totals`. All warps are through with the ring.
__device__ __forceinline__ void leave_result(const Part& part, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* to = reinterpret_cast<float*>(shared.ring[kSpare]) + 2 * (lane % 4) * kOutRow + warp * kWarpDims + lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < kWarpDims / 16; ++j) {
            to[h * kOutRow + 16 * j] = part.o[j][h];
            to[h * kOutRow + 16 * j + 8] = part.o[j][h + 2];
        }
    if (threadIdx.x < 4) {
        float2 sum{0, 0};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum.x += shared.sums[w][lane].x, sum.y += shared.sums[w][lane].y;
        shared.totals[2 * lane] = {part.maximum[0], sum.x};
        shared.totals[2 * lane + 1] = {part.maximum[1], sum.y};
    }
}

__device__ __forceinline__ const float* result_at(const Shared& shared, int pair) {
    return reinterpret_cast<const float*>(shared.ring[kSpare]) + pair / (kDim / 2) * kOutRow + pair % (kDim / 2) * 2;
}

/// True in every thread of the block that comes last of `expected`; leaves the counter at zero.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, unsigned expected, unsigned* answer) {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        *answer = before + 1 == expected;
        if (before + 1 == expected) *counter = 0;
    }
    __syncthreads();
    return *answer;
}

/// Parts of (row, query head), pair by pair.
__device__ __forceinline__ float4* work_at(const AttentionCall& c, const Row& row, int head, int slot) {
    const int64_t head_row = static_cast<int64_t>(row.t) * c.heads + row.kv_head * row.group + head;
    return c.work + (head_row * c.slots + slot) * (kDim / 2);
}

/// Merges in order, but loads eight at a time.
__device__ __forceinline__ float4 merge_slots(const AttentionCall& c, const Row& row, int pair, int slots) {
    const float4* from = work_at(c, row, pair / (kDim / 2), 0) + pair % (kDim / 2);
    float4 all{0, 0, -INFINITY, 0};
    for (int base = 0; base < slots; base += kMaxChunks) {
        float4 parts[kMaxChunks];
#pragma unroll
        for (int i = 0; i < kMaxChunks; ++i)
            parts[i] = base + i < slots ? __ldcg(from + (base + i) * (kDim / 2)) : float4{0, 0, -INFINITY, 0};
#pragma unroll
        for (int i = 0; i < kMaxChunks; ++i) all = merge(all, parts[i]);
    }
    return all;
}

__device__ __forceinline__ uint32_t gate_pair(const AttentionCall& c, const Row& row, int pair) {
    const bf16* from = c.gate.at(row.t, row.kv_head * row.group + pair / (kDim / 2)) + pair % (kDim / 2) * 2;
    return *reinterpret_cast<const uint32_t*>(from);
}

__device__ __forceinline__ void store_pair(const AttentionCall& c, const Row& row, int pair, float4 part,
                                           uint32_t gate) {
    bf16* y = c.y + (static_cast<int64_t>(row.t) * c.heads + row.kv_head * row.group) * kDim + 2 * pair;
    *reinterpret_cast<uint32_t*>(y) = gated_pair(part, gate);
}

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// The float2 that block `rank` of the cluster has where this block has the address.
__device__ __forceinline__ float2 peer_value(uint32_t address, int rank) {
    uint32_t at;
    float2 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

/// The cluster's result for one pair of elements.
__device__ __forceinline__ float4 merge_cluster(const Shared& shared, int pair) {
    float2 values[kSplitBlocks], totals[kSplitBlocks];
    const uint32_t value_at = shared_address(result_at(shared, pair));
    const uint32_t total_at = shared_address(&shared.totals[pair / (kDim / 2)]);
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        totals[b] = peer_value(total_at, b);
        values[b] = peer_value(value_at, b);
    }
    float4 all{0, 0, -INFINITY, 0};
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) all.z = fmaxf(all.z, totals[b].x);
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        const float f = part_weight(totals[b].x, all.z);
        all.x = fmaf(values[b].x, f, all.x);
        all.y = fmaf(values[b].y, f, all.y);
        all.w = fmaf(totals[b].y, f, all.w);
    }
    return all;
}

#endif

CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, 2) attention_decode_kernel(const __grid_constant__ AttentionCall c) {
    extern __shared__ __align__(1024) char memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    allow_successor();
    const int lane = threadIdx.x % 32;
    const int t = blockIdx.z, sequence = c.row_sequence[t], position = c.positions[t];
    const int clusters = gridDim.x / kSplitBlocks, rank = blockIdx.x % kSplitBlocks;
    int chunk = blockIdx.x / kSplitBlocks;
    const int chunks = min(position / kChunkKeys + 1, most_chunks(c.tokens, kClusters));
    if (sequence < 0 || chunk >= chunks) {
        wait_for_predecessor();
        return;
    }
    const int fresh_row = c.start[sequence];
    Row row{t,         static_cast<int>(blockIdx.y), c.heads / c.kv_heads, position + 1, c.positions[fresh_row],
            fresh_row, c.pages + sequence * c.page_row, 0};
    Share share = share_of(row, chunk, chunks);
    start_old(c, row, share, 0, share.page, shared, 0, kWarpKeys);
    commit_copies();
    start_old(c, row, share, 1, share.page, shared, 0, kWarpKeys);
    commit_copies();
    const int kept = threadIdx.x < 32 ? kQueryRows : 0;  // q goes there first
    start_old(c, row, share, 2, share.next_page, shared, kept, kWarpKeys);
    row.own_place = cache_place(c, row, row.pages[position / kKeysPerPage], position);
    float q_norm[8], k_norm[8];
    load_norm(c.q_norm, lane, q_norm);
    load_norm(c.k_norm, lane, k_norm);
    wait_for_predecessor();
    start_fresh(c, row, share, 0, shared);
    start_fresh(c, row, share, 1, shared);
    Query q;
    load_query(c, row, q_norm, shared, q);
    if (kept > 0) start_old(c, row, share, 2, share.next_page, shared, 0, kept);
    start_fresh(c, row, share, 2, shared);
    commit_copies();

    const int counted = min(clusters, chunks);
    Part part;
#if __CUDA_ARCH__ >= 900
    // Each block of the cluster ends with its eighth of the output: one pair of elements a thread.
    const bool has_pair = static_cast<int>(threadIdx.x) < row.group * 16;
    const int pair = rank * row.group * 16 + (has_pair ? threadIdx.x : 0);
    const uint32_t gate = gate_pair(c, row, pair);
    float4 all{0, 0, -INFINITY, 0};
    for (;;) {
        attend(c, row, share, q, k_norm, shared, part);
        __syncthreads();
        leave_result(part, shared);
        const int next = chunk + clusters;
        if (next < chunks) {
            share = share_of(row, next, chunks);
            start_item(c, row, share, 0, share.page, shared);
            commit_copies();
            start_item(c, row, share, 1, share.page, shared);
            commit_copies();
        }
        cluster_arrive();
        cluster_wait();
        const float4 mine = merge_cluster(shared, pair);
        cluster_arrive();
        if (counted == 1)
            all = merge(all, mine);
        else if (has_pair)
            work_at(c, row, pair / (kDim / 2), chunk)[pair % (kDim / 2)] = mine;
        chunk = next;
        if (chunk >= chunks) break;
        cluster_wait();
        start_item(c, row, share, 2, share.next_page, shared);
        commit_copies();
    }
    bool last = true;
    if (counted > 1) {
        last = last_to_arrive(c.counters + (t * c.kv_heads + row.kv_head) * kSplitBlocks + rank, counted, &shared.answer);
        if (last) all = merge_slots(c, row, pair, chunks);
    }
    if (last && has_pair) store_pair(c, row, pair, all, gate);
    cluster_wait();  // peers may still read this block's shared memory
#else
    for (;;) {
        attend(c, row, share, q, k_norm, shared, part);
        __syncthreads();
        leave_result(part, shared);
        __syncthreads();
        for (int p = threadIdx.x; p < row.group * kDim / 2; p += kThreads) {
            const int head = p / (kDim / 2);
            const float* from = result_at(shared, p);
            work_at(c, row, head, chunk * kSplitBlocks + rank)[p % (kDim / 2)] = {from[0], from[1], shared.totals[head].x,
                                                                                  shared.totals[head].y};
        }
        chunk += clusters;
        if (chunk >= chunks) break;
        __syncthreads();
        share = share_of(row, chunk, chunks);
        for (int item = 0; item < kRing; ++item) {
            start_item(c, row, share, item, item < 2 ? share.page : share.next_page, shared);
            commit_copies();
        }
    }
    unsigned* counter = c.counters + (t * c.kv_heads + row.kv_head) * kSplitBlocks;
    if (last_to_arrive(counter, counted * kSplitBlocks, &shared.answer))
        for (int p = threadIdx.x; p < row.group * kDim / 2; p += kThreads)
            store_pair(c, row, p, merge_slots(c, row, p, chunks * kSplitBlocks), gate_pair(c, row, p));
#endif
}

}  // namespace

void attention_decode(const AttentionCall& call, Context& context) {
    // Clusters that run at once, two blocks on a multiprocessor; one in sixteen does not fit the card's groups.
    const int at_once = 2 * (context.sms / kSplitBlocks - 1), units = call.tokens * call.kv_heads;
    const int most = most_chunks(call.tokens, context.capability >= 90);
    const int wanted = at_once / units, clusters = wanted < 1 ? 1 : wanted > most ? most : wanted;
    launch(context, "gated_attention decode", attention_decode_kernel,
           dim3(clusters * kSplitBlocks, call.kv_heads, call.tokens), dim3(kThreads), static_cast<int>(sizeof(Shared)),
           call);
}

}  // namespace quern::cuda
