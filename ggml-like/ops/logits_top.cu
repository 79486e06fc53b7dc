// logits_top on the GPU, in one kernel.
//   group  of 128 ids, four runs of 32 neighbours far apart, a warp: its highest logit, and the sum of exponentials to that
//   row    the block that ends last takes the 64th largest maximum of the row, less its last 8 bits, as a bound that at least
//          64 logits reach; looks through the groups that reach it (hardly more than 64) for such logits, and ranks them
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
constexpr int kTogether = 6;                          // groups of a warp at a time
constexpr int kLookups = 4;                           // the same where candidates are looked for

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
    __device__ float scale(int row) const {
        const float t = __ldcg(temperature + row);
        return t > 0 ? 1.0f / t : 1.0f;
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

struct Bound {
    uint32_t bound, largest;
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

/// Of all groups' maxima the largest, and a bound that n of them reach and hardly any other: the n-th largest but
/// for its last 8 bits. Three rounds of 8 bits.
__device__ Bound bound_of(const OwnGroups& own_groups, int n) {
    __shared__ int histogram[256];
    __shared__ uint32_t prefix, largest;
    __shared__ int left;
    if (threadIdx.x == 0) prefix = 0, largest = 0, left = n;
    uint32_t own_largest = 0;
    for (const uint32_t key : own_groups.maxima) own_largest = max(own_largest, key);
    own_largest = __reduce_max_sync(0xffffffffu, own_largest);
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&largest, own_largest);
    for (int shift = 24; shift > 0; shift -= 8) {
        if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t mask = shift == 24 ? 0u : ~0u << (shift + 8);
#pragma unroll
        for (const uint32_t key : own_groups.maxima)
            if ((key & mask) == prefix) atomicAdd(&histogram[key >> shift & 255], 1);
        __syncthreads();
        if (threadIdx.x < 32) {
            // lane l looks at bins 255 - 8l .. 248 - 8l, from the top
            int own = 0;
            for (int j = 0; j < 8; ++j) own += histogram[255 - 8 * threadIdx.x - j];
            int above = own;
            for (int d = 1; d < 32; d *= 2) {
                const int v = __shfl_up_sync(0xffffffffu, above, d);
                if (threadIdx.x >= d) above += v;
            }
            above -= own;
            const int want = left;
            __syncwarp();
            if (above < want && above + own >= want) {
                for (int j = 0; j < 8; ++j) {
                    const int bin = 255 - 8 * threadIdx.x - j, here = histogram[bin];
                    if (above + here >= want) {
                        prefix |= static_cast<uint32_t>(bin) << shift;
                        left = want - above;
                        break;
                    }
                    above += here;
                }
            }
        }
        __syncthreads();
    }
    return {prefix, largest};
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

/// Logits that reach the bound, in any order.
struct Candidates {
    int count;
    float value[kMaxKept];
    int id[kMaxKept];

    __device__ void add(float x, int i) {
        const int at = atomicAdd(&count, 1);
        if (at < kMaxKept) value[at] = x, id[at] = i;
    }
    __device__ int kept() const { return min(count, kMaxKept); }
};

/// All threads: looks for candidates.
__device__ void collect(const Top& t, int row, const OwnGroups& own, uint32_t bound, Candidates& found) {
    __shared__ int groups;
    __shared__ uint16_t group[kGroups];
    if (threadIdx.x == 0) groups = 0, found.count = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < OwnGroups::kEach; ++i)
        if (own.maxima[i] >= bound)
            group[atomicAdd(&groups, 1)] = static_cast<uint16_t>(i * kBlock + threadIdx.x);
    __syncthreads();
    const auto look = [&](const float4& four, int id) {
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (ordered_bits(x[j] + 0.0f) >= bound && x[j] > -INFINITY) found.add(x[j] + 0.0f, id + j);
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int begin = warp; begin < groups; begin += kLookups * kWarps) {
        float4 four[kLookups];
        int id[kLookups];
#pragma unroll
        for (int j = 0; j < kLookups; ++j) {
            const int i = begin + j * kWarps;
            id[j] = i < groups ? id_of(group[i], lane) : t.vocab;
            four[j] = t.four(row, id[j]);
        }
#pragma unroll
        for (int j = 0; j < kLookups; ++j) {
            look(four[j], id[j]);
            for (int more = id[j] + kPass; more < t.vocab; more += kPass) look(t.four(row, more), more);
        }
    }
    __syncthreads();
}

/// Ranks candidates; ids beyond them are -1.
__device__ void write_top(int* ids, const Candidates& found) {
    float* values = reinterpret_cast<float*>(ids + kTopLogits);
    const int count = found.kept();
    for (int i = threadIdx.x; i < kTopLogits; i += kBlock)
        if (i >= count) ids[i] = -1, values[i] = -INFINITY;
    for (int i = threadIdx.x; i < count; i += kBlock) {
        const float value = found.value[i];
        const int id = found.id[i];
        int rank = 0;
#pragma unroll 4
        for (int j = 0; j < count; ++j)
            rank += found.value[j] > value || (found.value[j] == value && found.id[j] < id);
        if (rank < kTopLogits) ids[rank] = id, values[rank] = value;
    }
}

/// All threads, thread 0 gets it: the sum over all groups, in one order.
__device__ float sum_of_row(const OwnGroups& groups, float highest, float scale) {
    __shared__ float partial[kWarps];
    float sum = 0;
#pragma unroll
    for (int i = 0; i < OwnGroups::kEach; ++i) {
        const float own = from_ordered_bits(groups.maxima[i]);
        sum += groups.sums[i] * (own > -INFINITY ? __expf((own - highest) * scale) : 0.0f);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0;
    for (const float part : partial) total += part;
    return total;
}

__global__ void __launch_bounds__(kBlock, 2) top_kernel(Top t) {
    __shared__ Candidates found;
    allow_successor();
    wait_for_predecessor();
    const int row = blockIdx.y, lane = threadIdx.x % 32, warps = static_cast<int>(gridDim.x) * kWarps;
    const int first = static_cast<int>(blockIdx.x) * kWarps + static_cast<int>(threadIdx.x) / 32;
    const float scale = t.scale(row);
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
    const auto [bound, largest] = bound_of(groups, kTopLogits);
    const bool insane = largest == 0xffffffffu;
    collect(t, row, groups, insane ? 0xffffffffu : bound, found);
    int* top = t.top + row * kTopWords;
    write_top(top, found);
    const float total = sum_of_row(groups, from_ordered_bits(largest), scale);
    if (threadIdx.x == 0) {
        top[2 * kTopLogits] = __float_as_int(total);
        top[2 * kTopLogits + 1] = !insane && found.count > 0 && found.count <= kMaxKept;
    }
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
