// Attention of few rows: norm, rotary embedding, KV write, split keys, combine and gate in one kernel.
//
//   cluster = one chunk of the keys of one (row, KV head):  block 0 | block 1 | ... | block 7
//   block   = four warps, each a run of 16-key units:       K0 V0 K1 V1 ...  through its own ring of 3 x 8 KB
//   warp    = S^T[16 keys, 8 heads] = K q^T;  O^T[256, 8 heads] += V^T P^T;  no barrier before the block's merge
//
// Memory: K and V of old keys once from the cache, started before the predecessor ends; keys of this step from the
// inputs. Blocks of a cluster exchange results through shared memory; only rows of more than 1024 keys go through
// `work`. How keys are split depends on the row's position alone, so a row's result does not depend on its batch.
// Limits: head_dim 256, 64 rotary dims, at most 8 query heads a KV head, 96 KB of shared memory.
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
constexpr int kUnit = 16, kUnitBytes = kUnit * kDim * 2, kRing = 3;
constexpr int kRingBytes = kWarps * kRing * kUnitBytes;
constexpr int kPartRow = kDim + 4;                             // floats; the pad spreads heads over the banks
constexpr int kPartSums = kWarps * kHeads * kPartRow;          // float index: float2 [warp][head]
constexpr int kMerged = kPartSums + 2 * kWarps * kHeads;       // float [head][256]
constexpr int kMergedSums = kMerged + kHeads * kDim;           // float2 [head]
constexpr int kSharedBytes = kRingBytes + 16;                  // the ring, then the ticket's answer
static_assert((kMergedSums + 2 * kHeads) * 4 <= kRingBytes && kSharedBytes <= 99 * 1024);

#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

/// Where a block's row stands. Keys from `fresh` on belong to this step and are not in the cache yet.
struct Row {
    int t, kv_head, group, keys, fresh, fresh_row;
    const int* pages;
};

/// Keys of one warp: units of 16 from `begin`.
struct Share {
    int begin, units;
    int page_base, page;  // lane i holds the page of index page_base + i
};

__device__ __forceinline__ int chunk_count(int keys, int slots) {
    const int most = kClusters ? kMaxChunks : slots / kSplitBlocks;
    return min((keys + kChunkKeys - 1) / kChunkKeys, most);
}

__device__ __forceinline__ void load_pages(const Row& row, Share& share, int base, int lane) {
    share.page_base = base;
    share.page = row.pages[min(base + lane, (row.keys - 1) / kKeysPerPage)];
}

__device__ __forceinline__ Share share_of(const Row& row, int chunk, int chunks, int warp, int lane) {
    const int units = (row.keys + kUnit - 1) / kUnit, shares = chunks * kSplitBlocks * kWarps;
    const int each = (units + shares - 1) / shares;
    const int mine = (chunk * kSplitBlocks + static_cast<int>(blockIdx.x) % kSplitBlocks) * kWarps + warp;
    Share share{mine * each * kUnit, max(0, min(each, units - mine * each)), 0, 0};
    if (share.units > 0) load_pages(row, share, share.begin / kKeysPerPage, lane);
    return share;
}

__device__ __forceinline__ int64_t cache_place(const AttentionCall& c, const Row& row, int page, int key) {
    return ((static_cast<int64_t>(page) * c.kv_heads + row.kv_head) * kKeysPerPage + key % kKeysPerPage) * kDim;
}

/// Starts copying item `item` of the share: K (even) or V (odd) of unit item / 2. Row r's 16-byte pieces lie at
/// piece ^ (r % 8). Fresh keys become zeros for now.
__device__ __forceinline__ void start_item(const AttentionCall& c, const Row& row, Share& share, int item, char* ring,
                                           int lane) {
    if (item < 2 * share.units) {
        const int key = share.begin + item / 2 * kUnit, index = key / kKeysPerPage;
        if (index - share.page_base >= 32) load_pages(row, share, index, lane);
        const int page = __shfl_sync(0xffffffffu, share.page, index - share.page_base);
        const bf16* from = (item & 1 ? c.v_cache : c.k_cache) + cache_place(c, row, page, key) + lane * 8;
        char* to = ring + item % kRing * kUnitBytes;
#pragma unroll
        for (int r = 0; r < kUnit; ++r)
            copy_async16(to + r * kDim * 2 + ((lane ^ (r & 7)) << 4), from + r * kDim, key + r < row.fresh);
    }
    commit_copies();
}

/// Eight elements of a normed and rotated key; lane l holds elements 8l .. 8l+7.
__device__ __forceinline__ uint4 normed_key(const AttentionCall& c, const bf16* k, int position, int lane) {
    const uint4 raw = *reinterpret_cast<const uint4*>(k + lane * 8);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float x[8], sum = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 v = unpack_bf16(words[i]);
        x[2 * i] = v.x, x[2 * i + 1] = v.y;
        sum += v.x * v.x + v.y * v.y;
    }
    const float r = rsqrtf(warp_sum(sum) / kDim + c.eps);
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= r * c.k_norm[lane * 8 + i];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, x[i], 4);
        if (lane < 8) {
            const float2 turn = rotation(c, position, (lane & 3) * 8 + i);
            x[i] = lane < 4 ? x[i] * turn.x - other * turn.y : x[i] * turn.x + other * turn.y;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    return {out[0], out[1], out[2], out[3]};
}

/// Puts this step's keys or values of a unit into its slot, and the row's own ones into the cache.
__device__ __noinline__ void place_fresh(const AttentionCall& c, const Row& row, int first, char* slot, bool values,
                                         int lane) {
    for (int key = max(first, row.fresh); key < min(first + kUnit, row.keys); ++key) {
        const int t = row.fresh_row + key - row.fresh, r = key - first;
        const uint4 x = values ? *reinterpret_cast<const uint4*>(c.v.at(t, row.kv_head) + lane * 8)
                               : normed_key(c, c.k.at(t, row.kv_head), key, lane);
        *reinterpret_cast<uint4*>(slot + r * kDim * 2 + ((lane ^ (r & 7)) << 4)) = x;
        if (key == row.keys - 1) {
            const int64_t place = cache_place(c, row, row.pages[key / kKeysPerPage], key);
            bf16* to = (values ? c.v_cache : c.k_cache) + place + lane * 8;
            *reinterpret_cast<uint4*>(to) = x;
        }
    }
}

/// The B operand of S^T: lane l holds elements 16s + 2(l%4) + {0, 1, 8, 9} of head l / 4.
struct Query {
    uint32_t b[kDim / 16][2];
};

/// What of the query is known before the predecessor ends.
struct QueryWeights {
    float2 norm[kDim / 16][2];
    float2 turn[2][4];
};

__device__ __forceinline__ void load_query_weights(const AttentionCall& c, int position, int lane, QueryWeights& w) {
    const int column = 2 * (lane % 4);
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            w.norm[s][h] = *reinterpret_cast<const float2*>(c.q_norm + 16 * s + 8 * h + column);
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) w.turn[s][i] = rotation(c, position, 16 * s + 8 * (i / 2) + column + i % 2);
}

/// Elements i and i + 32 rotate together: the same lane holds both, in steps s and s + 2.
__device__ __forceinline__ void rotate_pair(float2& a, float2& b, float2 turn0, float2 turn1) {
    const float2 x = a, y = b;
    a = {x.x * turn0.x - y.x * turn0.y, x.y * turn1.x - y.y * turn1.y};
    b = {y.x * turn0.x + x.x * turn0.y, y.y * turn1.x + x.y * turn1.y};
}

__device__ __forceinline__ void load_query(const AttentionCall& c, const Row& row, const QueryWeights& w, int lane,
                                           Query& q) {
    const int head = min(lane / 4, row.group - 1);
    const bf16* from = c.q.at(row.t, row.kv_head * row.group + head) + 2 * (lane % 4);
    float2 x[kDim / 16][2];
    float sum = 0;
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) q.b[s][h] = *reinterpret_cast<const uint32_t*>(from + 16 * s + 8 * h);
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            x[s][h] = unpack_bf16(q.b[s][h]);
            sum += x[s][h].x * x[s][h].x + x[s][h].y * x[s][h].y;
        }
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float r = rsqrtf(sum / kDim + c.eps);
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            x[s][h].x *= r * w.norm[s][h].x;
            x[s][h].y *= r * w.norm[s][h].y;
        }
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) rotate_pair(x[s][h], x[s + 2][h], w.turn[s][2 * h], w.turn[s][2 * h + 1]);
#pragma unroll
    for (int s = 0; s < kDim / 16; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) q.b[s][h] = pack_bf16(x[s][h].x, x[s][h].y);
}

/// A warp's results. Lane l holds heads 2(l%4) + {0, 1}, elements 16j + l/4 (+8) of each; sums are still per lane.
struct Part {
    float o[kDim / 16][4];
    float maximum[2], sum[2];
};

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

/// Scores of a unit's 16 keys: s[0], s[1] of key lane / 4, s[2], s[3] of key lane / 4 + 8.
__device__ __forceinline__ void score_unit(uint32_t slot, const Query& q, int lane, float (&s)[4]) {
    float parts[4][4] = {};
    const uint32_t base = slot + lane % 16 * kDim * 2 + ((lane / 16 ^ (lane & 7)) << 4);
#pragma unroll
    for (int i = 0; i < kDim / 16; ++i) {
        uint32_t k[4];
        load_matrices(k, (base ^ ((2 * i & 7) << 4)) + (i >> 2) * 128);
        mma(parts[i % 4], k, q.b[i][0], q.b[i][1]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = (parts[0][e] + parts[1][e]) + (parts[2][e] + parts[3][e]);
}

/// Scores to probabilities under the running maximum; earlier sums are scaled when it grows.
__device__ __forceinline__ void softmax_unit(float (&s)[4], float scale, int keys_left, int lane, Part& part) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = lane / 4 + e / 2 * 8 < keys_left ? s[e] * scale : -INFINITY;
    float highest[2];
    bool grew = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        highest[h] = fmaxf(part.maximum[h], over_keys_max(fmaxf(s[h], s[h + 2])));
        grew |= highest[h] > part.maximum[h];
    }
    if (__any_sync(0xffffffffu, grew)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float f = exp2f(part.maximum[h] - highest[h]);
            part.sum[h] *= f;
            part.maximum[h] = highest[h];
#pragma unroll
            for (int j = 0; j < kDim / 16; ++j) part.o[j][h] *= f, part.o[j][h + 2] *= f;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        s[h] = exp2f(s[h] - part.maximum[h]);
        s[h + 2] = exp2f(s[h + 2] - part.maximum[h]);
        part.sum[h] += s[h] + s[h + 2];
    }
}

__device__ __forceinline__ uint32_t transpose(uint32_t x) {
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ void add_values(uint32_t slot, const float (&p)[4], int lane, Part& part) {
    const uint32_t p0 = transpose(pack_bf16(p[0], p[1])), p1 = transpose(pack_bf16(p[2], p[3]));
    const uint32_t base = slot + (lane % 8 + lane / 16 * 8) * kDim * 2 + (((lane / 8 & 1) ^ (lane & 7)) << 4);
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j) {
        uint32_t v[4];
        load_matrices_transposed(v, (base ^ ((2 * j & 7) << 4)) + (j >> 2) * 128);
        mma(part.o[j], v, p0, p1);
    }
}

__device__ __forceinline__ void clear(Part& part) {
#pragma unroll
    for (int j = 0; j < kDim / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) part.o[j][e] = 0;
    part.maximum[0] = part.maximum[1] = -INFINITY;
    part.sum[0] = part.sum[1] = 0;
}

__device__ __forceinline__ void attend(const AttentionCall& c, const Row& row, Share& share, const Query& q, char* ring,
                                       int lane, Part& part) {
    const float scale = score_scale(kDim);
    clear(part);
    for (int unit = 0; unit < share.units; ++unit) {
        const int key = share.begin + unit * kUnit;
        const bool fresh = key + kUnit > row.fresh;
        float s[4];
#pragma unroll
        for (int values = 0; values < 2; ++values) {
            const int item = 2 * unit + values;
            char* slot = ring + item % kRing * kUnitBytes;
            wait_copies<kRing - 1>();
            __syncwarp();
            if (fresh) {
                place_fresh(c, row, key, slot, values, lane);
                __syncwarp();
            }
            if (values) {
                add_values(shared_address(slot), s, lane, part);
            } else {
                score_unit(shared_address(slot), q, lane, s);
                softmax_unit(s, scale, row.keys - key, lane, part);
            }
            __syncwarp();
            start_item(c, row, share, item + kRing, ring, lane);
        }
    }
    part.sum[0] = over_keys_sum(part.sum[0]);
    part.sum[1] = over_keys_sum(part.sum[1]);
}

/// The block's four parts to one, in shared memory at kMerged and kMergedSums. The ring has been drained.
__device__ __forceinline__ void merge_warps(const Part& part, float* shared, int warp, int lane) {
    wait_copies<0>();
    __syncthreads();
    float2* sums = reinterpret_cast<float2*>(shared + kPartSums);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int head = 2 * (lane % 4) + h;
        float* to = shared + (warp * kHeads + head) * kPartRow + lane / 4;
#pragma unroll
        for (int j = 0; j < kDim / 16; ++j) to[16 * j] = part.o[j][h], to[16 * j + 8] = part.o[j][h + 2];
        if (lane < 4) sums[warp * kHeads + head] = {part.maximum[h], part.sum[h]};
    }
    __syncthreads();
    for (int pair = threadIdx.x; pair < kHeads * kDim / 2; pair += kThreads) {
        const int head = pair / (kDim / 2), element = pair % (kDim / 2) * 2;
        float highest = -INFINITY, total = 0;
        float2 out{0, 0};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, sums[w * kHeads + head].x);
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            const float2 own = sums[w * kHeads + head];
            const float f = part_weight(own.x, highest);
            const float2 x = *reinterpret_cast<const float2*>(shared + (w * kHeads + head) * kPartRow + element);
            out = {fmaf(x.x, f, out.x), fmaf(x.y, f, out.y)};
            total = fmaf(own.y, f, total);
        }
        *reinterpret_cast<float2*>(shared + kMerged + 2 * pair) = out;
        if (element == 0) reinterpret_cast<float2*>(shared + kMergedSums)[head] = {highest, total};
    }
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

__device__ __forceinline__ float4 merge_slots(const AttentionCall& c, const Row& row, int pair, int slots) {
    const float4* from = work_at(c, row, pair / (kDim / 2), 0) + pair % (kDim / 2);
    float4 all = __ldcg(from);
    for (int i = 1; i < slots; ++i) all = merge(all, __ldcg(from + i * (kDim / 2)));
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

/// The float2 that block `rank` of the cluster has where this block has `p`.
__device__ __forceinline__ float2 peer_value(const float* p, int rank) {
    uint32_t at;
    float2 v;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}

/// The cluster's result for one pair of elements.
__device__ __forceinline__ float4 merge_cluster(const float* shared, int pair) {
    float2 values[kSplitBlocks], sums[kSplitBlocks];
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        values[b] = peer_value(shared + kMerged + 2 * pair, b);
        sums[b] = peer_value(shared + kMergedSums + pair / (kDim / 2) * 2, b);
    }
    float4 all{0, 0, -INFINITY, 0};
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) all.z = fmaxf(all.z, sums[b].x);
#pragma unroll
    for (int b = 0; b < kSplitBlocks; ++b) {
        const float f = part_weight(sums[b].x, all.z);
        all.x = fmaf(values[b].x, f, all.x);
        all.y = fmaf(values[b].y, f, all.y);
        all.w = fmaf(sums[b].y, f, all.w);
    }
    return all;
}

#endif

__device__ __forceinline__ void start_share(const AttentionCall& c, const Row& row, Share& share, char* ring, int lane) {
#pragma unroll
    for (int item = 0; item < kRing; ++item) start_item(c, row, share, item, ring, lane);
}

CLUSTER_OF(kSplitBlocks)
__global__ void __launch_bounds__(kThreads, 2) attention_decode_kernel(const __grid_constant__ AttentionCall c) {
    extern __shared__ __align__(1024) char shared[];
    allow_successor();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int t = blockIdx.z, sequence = c.row_sequence[t];
    const int clusters = gridDim.x / kSplitBlocks, rank = blockIdx.x % kSplitBlocks;
    int chunk = blockIdx.x / kSplitBlocks;
    const int position = c.positions[t];
    const int chunks = chunk_count(position + 1, c.slots);
    if (sequence < 0 || chunk >= chunks) {
        wait_for_predecessor();
        return;
    }
    const int fresh_row = c.start[sequence];
    const Row row{t,         static_cast<int>(blockIdx.y), c.heads / c.kv_heads, position + 1, c.positions[fresh_row],
                  fresh_row, c.pages + sequence * c.page_row};
    char* ring = shared + warp * kRing * kUnitBytes;
    Share share = share_of(row, chunk, chunks, warp, lane);
    start_share(c, row, share, ring, lane);
    Query q;
    {
        QueryWeights weights;
        load_query_weights(c, position, lane, weights);
        wait_for_predecessor();
        load_query(c, row, weights, lane, q);
    }

    const int counted = min(clusters, chunks);
    unsigned* answer = reinterpret_cast<unsigned*>(shared + kRingBytes);
    float* floats = reinterpret_cast<float*>(shared);
    Part part;
#if __CUDA_ARCH__ >= 900
    // Each block of the cluster ends with its eighth of the output: one pair of elements a thread.
    const bool has_pair = static_cast<int>(threadIdx.x) < row.group * 16;
    const int pair = rank * row.group * 16 + (has_pair ? threadIdx.x : 0);
    const uint32_t gate = gate_pair(c, row, pair);
    float4 all;
    for (bool first = true;; first = false) {
        attend(c, row, share, q, ring, lane, part);
        merge_warps(part, floats, warp, lane);
        cluster_arrive();
        cluster_wait();
        const float4 mine = merge_cluster(floats, pair);
        cluster_arrive();
        if (counted == 1)
            all = first ? mine : merge(all, mine);
        else if (has_pair)
            work_at(c, row, pair / (kDim / 2), chunk)[pair % (kDim / 2)] = mine;
        chunk += clusters;
        if (chunk >= chunks) break;
        cluster_wait();
        share = share_of(row, chunk, chunks, warp, lane);
        start_share(c, row, share, ring, lane);
    }
    bool last = true;
    if (counted > 1) {
        last = last_to_arrive(c.counters + (t * c.kv_heads + row.kv_head) * kSplitBlocks + rank, counted, answer);
        if (last) all = merge_slots(c, row, pair, chunks);
    }
    if (last && has_pair) store_pair(c, row, pair, all, gate);
    cluster_wait();  // peers may still read this block's shared memory
#else
    for (;;) {
        attend(c, row, share, q, ring, lane, part);
        merge_warps(part, floats, warp, lane);
        __syncthreads();
        const float2* sums = reinterpret_cast<const float2*>(floats + kMergedSums);
        for (int p = threadIdx.x; p < row.group * kDim / 2; p += kThreads) {
            const int head = p / (kDim / 2);
            work_at(c, row, head, chunk * kSplitBlocks + rank)[p % (kDim / 2)] = {
                floats[kMerged + 2 * p], floats[kMerged + 2 * p + 1], sums[head].x, sums[head].y};
        }
        chunk += clusters;
        if (chunk >= chunks) break;
        __syncthreads();
        share = share_of(row, chunk, chunks, warp, lane);
        start_share(c, row, share, ring, lane);
    }
    unsigned* counter = c.counters + (t * c.kv_heads + row.kv_head) * kSplitBlocks;
    if (last_to_arrive(counter, counted * kSplitBlocks, answer))
        for (int p = threadIdx.x; p < row.group * kDim / 2; p += kThreads)
            store_pair(c, row, p, merge_slots(c, row, p, chunks * kSplitBlocks), gate_pair(c, row, p));
#endif
}

}  // namespace

void attention_decode(const AttentionCall& call, Context& context) {
    const int units = call.tokens * call.kv_heads;
    const int most = context.capability >= 90 ? kMaxChunks : call.slots / kSplitBlocks;
    int clusters = 2 * context.sms / (kSplitBlocks * units);
    clusters = clusters < 1 ? 1 : clusters > most ? most : clusters;
    launch(context, "gated_attention decode", attention_decode_kernel,
           dim3(clusters * kSplitBlocks, call.kv_heads, call.tokens), dim3(kThreads), kSharedBytes, call);
}

}  // namespace quern::cuda
