// logits_top on the GPU, in one kernel.
//   group  of 128 ids, four runs of 32 neighbours far apart, a warp: its highest logit, and the sum of exponentials to that
//   row    the block that ends last counts the groups by the distance of their maxima from the highest logit, which gives a limit that
//          the 64 highest maxima are within and few others; looks through these groups for logits within it, and ranks them;
//          where one is wanted, the limit is the highest logit itself
// Traffic: the logits once. Bound: latency; with many rows bytes.
#include "ggml-like/ops/logits_top.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/ptx/ordered_bits.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda {

using namespace ptx;

namespace {

constexpr int kBlock = 512, kWarps = kBlock / 32, kMaxKept = 4096;
constexpr int kGroups = 2048, kPass = kGroups * 128;  // ids of all groups at a time; a longer row has several
constexpr int kBins = 512;                            // of distances from the highest logit
constexpr int kTogether = 6;                          // groups of a warp at a time
constexpr int kLookups = 5;                           // the same where candidates are looked for

/// Work space of a row.
struct Work {
    uint32_t maxima[kGroups];
    float sums[kGroups];
};
constexpr int64_t kWorkBytes = 16 << 10;
static_assert(sizeof(Work) == kWorkBytes);

struct Top {
    const float *logits, *temperature;
    int64_t ld;
    int vocab;
    bool in_fours;  // rows begin at multiples of 16 bytes
    int* top;
    uint8_t* work;
    unsigned* counters;  // one a row

    __device__ Work& of(int row) const {
        return *reinterpret_cast<Work*>(work + static_cast<int64_t>(row) * kWorkBytes);
    }
    /// Four neighbours; those beyond the vocabulary are -infinity.
    __device__ float4 four(int row, int id) const {
        const float* p = logits + row * ld + id;
        if (in_fours && id + 3 < vocab) return __ldcg(reinterpret_cast<const float4*>(p));
        const auto one = [&](int j) { return id + j < vocab ? __ldcg(p + j) : -INFINITY; };
        return {one(0), one(1), one(2), one(3)};
    }
    Top from_row(int row) const {
        Top t = *this;
        t.logits += row * ld;
        t.temperature += row;
        t.top += row * kTopWords;
        t.work += row * kWorkBytes;
        return t;
    }
};

/// What a thread of the last block has of all groups: number i is of group threadIdx.x + i * kBlock.
struct OwnGroups {
    static constexpr int kEach = kGroups / kBlock;
    uint32_t maxima[kEach];
    float sums[kEach];

    __device__ explicit OwnGroups(const Work& work) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            maxima[i] = __ldcg(work.maxima + i * kBlock + threadIdx.x);
            sums[i] = __ldcg(work.sums + i * kBlock + threadIdx.x);
        }
    }
};

/// Logits whose distance is below the limit, in any order, each with its id as a key: of two keys the greater one has the higher logit, or
/// the same and the lower id.
struct Candidates {
    int count;
    uint64_t key[kMaxKept];

    __device__ void add(float x, int id) {
        const int at = atomicAdd(&count, 1);
        if (at < kMaxKept) key[at] = uint64_t{ordered_bits(x)} << 32 | ~static_cast<uint32_t>(id);
    }
    __device__ int kept() const { return min(count, kMaxKept); }
};

/// Shared memory of the last block.
struct Shared {
    Candidates found;
    alignas(16) uint32_t maxima[kWarps];  // of warps
    alignas(16) float sums[kWarps];
    alignas(16) int histogram[kBins];
    int bin, before;  // of find_bin
    int groups;       // whose maxima have a distance below the limit
    uint16_t group[kGroups];
};

/// Distances of logits from the highest one in bins, by the bits of the distance, which are in the order of the distances. Bin i holds
/// those from start + (i << shift) on.
struct Bins {
    uint32_t start = 0x3b000000;  // 1/512
    int shift = 18;               // 32 bins to each doubling, up to 128
    bool ends = false;  // the first and the last bin hold what is beyond them, too, until one of them is cut

    __device__ int of(uint32_t distance) const {  // or one that does not exist
        if (!ends)
            return min(max(static_cast<int>(distance >> shift) - static_cast<int>(start >> shift), 0),
                       kBins - 1);
        return distance < start ? -1 : static_cast<int>(min((distance - start) >> shift, uint32_t{kBins}));
    }
    /// Distances of bin i and of those before are less.
    __device__ uint32_t limit(int i) const {
        return !ends && i == kBins - 1 ? 0xffffffffu : start + (static_cast<uint32_t>(i + 1) << shift);
    }
    /// Cuts bin i.
    __device__ void cut(int i) {
        const bool beyond = !ends && (i == 0 || i == kBins - 1);
        start = !ends && i == 0 ? 0 : start + (static_cast<uint32_t>(i) << shift);
        shift = beyond ? 21 : max(shift - 9, 0);
        ends = true;
    }
};
static_assert(kBins == (7 + 9) << 5 && kBins == 1 << 9 && kBins == kBlock);
constexpr int kFew = 256;  // groups of a bin that need no more bins

/// One warp: the bin in which the n-th distance is, and how many are before it.
__device__ void find_bin(int n, Shared& shared) {
    constexpr int kEach = kBins / 32;
    const int lane = threadIdx.x;
    int bins[kEach], own = 0;
#pragma unroll
    for (int j = 0; j < kEach; ++j) bins[j] = shared.histogram[lane * kEach + j], own += bins[j];
    int before = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, before, d);
        if (lane >= d) before += other;
    }
    before -= own;
    if (before >= n || before + own < n) return;
    int bin = lane * kEach;
#pragma unroll
    for (int j = 0; j + 1 < kEach; ++j)
        if (bin == lane * kEach + j && before + bins[j] < n) before += bins[j], ++bin;
    shared.bin = bin, shared.before = before;
}

/// A limit that the distances of at least n groups' maxima are below, and of few others: those that share the n-th one's bin, of which there
/// are few or which is as narrow as numbers are. `distance`: of the thread's groups. All threads.
__device__ uint32_t limit_of(const uint32_t (&distance)[OwnGroups::kEach], int n, Shared& shared) {
    for (Bins bins;;) {
#pragma unroll
        for (const uint32_t d : distance)
            if (const int bin = bins.of(d); bin >= 0 && bin < kBins) atomicAdd(&shared.histogram[bin], 1);
        __syncthreads();
        if (threadIdx.x < 32) find_bin(n, shared);
        __syncthreads();
        const int bin = shared.bin;
        if (shared.histogram[bin] <= kFew || bins.shift == 0) return bins.limit(bin);
        n -= shared.before;
        bins.cut(bin);
        __syncthreads();
        shared.histogram[threadIdx.x] = 0;
        __syncthreads();
    }
}

/// The highest logit of all, as a key. All threads; a barrier inside.
__device__ uint32_t largest_of(const OwnGroups& own_groups, Shared& shared) {
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t key : own_groups.maxima) largest = max(largest, key);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) shared.maxima[threadIdx.x / 32] = largest;
    shared.histogram[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.groups = 0, shared.found.count = 0;
    __syncthreads();
#pragma unroll
    for (const uint32_t key : shared.maxima) largest = max(largest, key);
    return largest;
}

/// The first of a lane's four ids of a group.
__device__ int id_of(int group, int lane) { return group * 32 + lane % 8 * 4 + lane / 8 * (kPass / 4); }

/// The highest logit, and the sum of exp((logit - highest) * scale), 0 where nothing but -infinity is.
struct Sum {
    float highest = -INFINITY, sum = 0;
    bool insane = false;  // a NaN or +infinity

    __device__ void add(const float4& four, float scale) {
        const float x[4] = {four.x, four.y, four.z, four.w};
        float next = highest;
#pragma unroll
        for (const float v : x) insane |= !(v < INFINITY), next = fmaxf(next, v);
        if (next == -INFINITY) return;
        sum = sum_to(next, scale);
#pragma unroll
        for (const float v : x) sum += __expf((v - next) * scale);
        highest = next;
    }
    /// To a highest logit that is no lower.
    __device__ float sum_to(float other, float scale) const {
        return highest == other ? sum : sum * __expf((highest - other) * scale);
    }
};

/// Whole warp: `group`'s maximum and sum.
__device__ void write_group(Work& work, int group, const Sum& own, float scale) {
    const uint32_t key = __reduce_max_sync(0xffffffffu, ordered_bits(own.highest + 0.0f));  // -0 is 0
    const float sum = warp_sum(own.sum_to(from_ordered_bits(key), scale));
    const bool insane = __any_sync(0xffffffffu, own.insane);
    if (threadIdx.x % 32 == 0) work.maxima[group] = insane ? 0xffffffffu : key, work.sums[group] = sum;
}

/// A thread's part of the sum over all groups.
__device__ float own_sum(const OwnGroups& groups, float highest, float scale) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < OwnGroups::kEach; ++i) {
        const float own = from_ordered_bits(groups.maxima[i]);
        sum += groups.sums[i] * (own > -INFINITY ? __expf((own - highest) * scale) : 0.0f);
    }
    return sum;
}

/// All threads: looks for candidates, and leaves warps' parts of the sum over all groups. A barrier at the end. `distance`: of the
/// thread's groups.
__device__ void collect(const Top& t, int row, const OwnGroups& own,
                        const uint32_t (&distance)[OwnGroups::kEach], uint32_t limit, float highest,
                        float scale, Shared& shared) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < OwnGroups::kEach; ++i)
        if (distance[i] < limit)
            shared.group[atomicAdd(&shared.groups, 1)] = static_cast<uint16_t>(i * kBlock + threadIdx.x);
    __syncthreads();
    const auto look = [&](const float4& four, int id) {
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (__float_as_uint(highest - x[j]) < limit && x[j] > -INFINITY)
                shared.found.add(x[j] + 0.0f, id + j);
    };
    const int groups = shared.groups;
    float4 four[kLookups];
    int id[kLookups];
    const auto load = [&](int begin) {
#pragma unroll
        for (int j = 0; j < kLookups; ++j) {
            const int i = begin + j * kWarps;
            id[j] = i < groups ? id_of(shared.group[i], lane) : t.vocab;
            four[j] = t.four(row, id[j]);
        }
    };
    load(warp);
    const float sum = warp_sum(own_sum(own, highest, scale));  // while logits come
    if (lane == 0) shared.sums[warp] = sum;
    for (int begin = warp; begin < groups;) {
#pragma unroll
        for (int j = 0; j < kLookups; ++j) {
            look(four[j], id[j]);
            for (int more = id[j] + kPass; more < t.vocab; more += kPass) look(t.four(row, more), more);
        }
        begin += kLookups * kWarps;
        if (begin < groups) load(begin);
    }
    __syncthreads();
}

/// Ranks candidates, four lanes each; ids beyond them, and beyond the first `wanted`, are -1.
__device__ void write_top(int* ids, const Candidates& found, int wanted) {
    float* values = reinterpret_cast<float*>(ids + kTopLogits);
    const int count = found.kept(), part = threadIdx.x % 4;
    for (int i = threadIdx.x; i < kTopLogits; i += kBlock)
        if (i >= min(count, wanted)) ids[i] = -1, values[i] = -INFINITY;
    for (int first = 0; first < count; first += kBlock / 4) {
        const int i = first + threadIdx.x / 4;
        const uint64_t own = i < count ? found.key[i] : 0;
        int rank = 0;
#pragma unroll 4
        for (int j = part; j < count; j += 4) rank += found.key[j] > own;
        rank += __shfl_xor_sync(0xffffffffu, rank, 1);
        rank += __shfl_xor_sync(0xffffffffu, rank, 2);
        if (part > 0 || i >= count || rank >= wanted) continue;
        ids[rank] = static_cast<int>(~static_cast<uint32_t>(own));
        values[rank] = from_ordered_bits(static_cast<uint32_t>(own >> 32));
    }
}

__global__ void __launch_bounds__(kBlock, 2) top_kernel(Top t) {
    __shared__ Shared shared;
    allow_successor();
    bring_near(t.vocab), bring_near(t.counters);
    wait_for_predecessor();
    const int row = blockIdx.y, lane = threadIdx.x % 32, warps = static_cast<int>(gridDim.x) * kWarps;
    const int first = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
    const float temperature = __ldcg(t.temperature + row),
                scale = temperature > 0 ? 1.0f / temperature : 1.0f;
    const bool one = temperature < 0;
    Work& work = t.of(row);
    float4 four[kTogether];  // of the groups that come
    const auto load = [&](int j, int group) {
        if (group < kGroups) four[j] = t.four(row, id_of(group, lane));
    };
#pragma unroll
    for (int j = 0; j < kTogether; ++j) load(j, first + j * warps);
    for (int begin = first; begin < kGroups; begin += kTogether * warps) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
            const int group = begin + j * warps;
            if (group >= kGroups) break;
            Sum own;
            own.add(four[j], scale);
            load(j, group + kTogether * warps);
            for (int id = id_of(group, lane) + kPass; id < t.vocab; id += kPass)
                own.add(t.four(row, id), scale);
            write_group(work, group, own, scale);
        }
    }
    if (!last_block(t.counters + row, gridDim.x)) return;

    const OwnGroups groups(work);
    const uint32_t largest = largest_of(groups, shared);
    const bool insane = largest == 0xffffffffu;
    const float highest = from_ordered_bits(largest);
    uint32_t distance[OwnGroups::kEach];
#pragma unroll
    for (int i = 0; i < OwnGroups::kEach; ++i)
        distance[i] = __float_as_uint(highest - from_ordered_bits(groups.maxima[i]));
    const uint32_t limit = insane ? 0 : one ? 1 : limit_of(distance, kTopLogits, shared);
    collect(t, row, groups, distance, limit, highest, scale, shared);
    int* top = t.top + row * kTopWords;
    if (shared.found.count <= kMaxKept) write_top(top, shared.found, one ? 1 : kTopLogits);
    if (threadIdx.x > 0) return;
    float total = 0;
#pragma unroll
    for (const float part : shared.sums) total += part;
    const int found = shared.found.count;
    top[2 * kTopLogits] = __float_as_int(total);
    top[2 * kTopLogits + 1] = !insane && found > 0 && found <= kMaxKept;
}

}  // namespace

void logits_top(const Node& node, Context& c) {
    const Tensor& logits = *node.inputs[0];
    const int rows = static_cast<int>(logits.shape[0]);
    const Top all{logits.as<float>(),
                  node.inputs[1]->as<float>(),
                  logits.stride[0],
                  static_cast<int>(node.params<LogitsTopParams>().vocab),
                  logits.stride[0] % 4 == 0,
                  node.outputs[0]->as<int>(),
                  node.outputs[1]->as<uint8_t>(),
                  c.counters};
    int blocks = kGroups / kWarps;  // of a row: in all no more than run at once
    while (blocks > 4 && blocks * rows > 2 * c.sms) blocks /= 2;
    for (int first = 0; first < rows; first += kCounters) {
        const dim3 grid(blocks, min(kCounters, rows - first));
        launch(c, "logits_top", top_kernel, grid, kBlock, 0, all.from_row(first));
    }
}

}  // namespace quern::cuda
