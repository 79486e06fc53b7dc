// logits_top on the GPU, two kernels.
//   bound: a warp a group of ids: its maximum; the block that ends last takes the 64th largest maximum of the
//   row, less its last 8 bits, as a bound that at least 64 logits reach
//   collect: every logit at or above the bound is a candidate (hardly more than 64); sums of exponentials;
//   the block
//     that ends last ranks the candidates
// Traffic: the logits twice, from L2. Limit: latency.
#include "ggml-like/ops/logits_top.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/moe/route.cuh"
#include "ggml-like/cuda/ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace moe;

namespace {

constexpr int kBlock = 512, kGroups = 2048, kMaxKept = 4096;
/// A row's logits are shared out in kShares, whoever has how many of these: sums of shares are added in order.
constexpr int kShares = kGroups * 32 / kBlock, kMaxEach = 4;

/// Work space of a row.
struct Work {
    uint32_t maxima[kGroups];
    uint32_t bound;
    float highest;
    unsigned count;
    unsigned insane;
    float sums[kShares];
    float value[kMaxKept];
    int id[kMaxKept];
};
constexpr int64_t kWorkBytes = 64 << 10;
static_assert(sizeof(Work) <= kWorkBytes);

struct Top {
    const float *logits, *temperature;
    int64_t ld;
    int vocab;
    int* top;
    uint8_t* work;
    unsigned* counters;  // two a row

    __device__ Work& of(int row) const {
        return *reinterpret_cast<Work*>(work + static_cast<int64_t>(row) * kWorkBytes);
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

/// Of kGroups keys the largest, and a bound that n of them reach and hardly any other: the n-th largest but
/// for its last 8 bits. Three rounds of 8 bits.
__device__ Bound bound_of(const uint32_t* keys, int n) {
    __shared__ int histogram[256];
    __shared__ uint32_t prefix, largest;
    __shared__ int left;
    if (threadIdx.x == 0) prefix = 0, largest = 0, left = n;
    uint32_t own_keys[kGroups / kBlock], own_largest = 0;
#pragma unroll
    for (int i = 0; i < kGroups / kBlock; ++i) own_keys[i] = __ldcg(keys + i * kBlock + threadIdx.x);
    for (const uint32_t key : own_keys) own_largest = max(own_largest, key);
    own_largest = __reduce_max_sync(0xffffffffu, own_largest);
    __syncthreads();
    if (threadIdx.x % 32 == 0) atomicMax(&largest, own_largest);
    for (int shift = 24; shift > 0; shift -= 8) {
        if (threadIdx.x < 256) histogram[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t mask = shift == 24 ? 0u : ~0u << (shift + 8);
#pragma unroll
        for (const uint32_t key : own_keys)
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

__global__ void __launch_bounds__(kBlock) bound_kernel(Top t) {
    allow_successor();
    wait_for_predecessor();
    const int row = blockIdx.y, lane = threadIdx.x % 32;
    const float* logits = t.logits + row * t.ld;
    Work& work = t.of(row);
    for (int share = blockIdx.x; share < kShares; share += gridDim.x) {
        const int group = (share * kBlock + threadIdx.x) / 32;
        float highest = -INFINITY;
        bool insane = false;
#pragma unroll 4
        for (int i = group * 32 + lane; i < t.vocab; i += kGroups * 32) {
            const float x = __ldcg(logits + i) + 0.0f;  // -0 is 0
            insane |= !(x < INFINITY);
            highest = fmaxf(highest, x);
        }
        highest = warp_max(highest);
        insane = __any_sync(0xffffffffu, insane);
        if (lane == 0) work.maxima[group] = insane ? 0xffffffffu : ordered_bits(highest);
    }
    if (!last_block(t.counters + 2 * row, gridDim.x)) return;
    const auto [bound, top] = bound_of(work.maxima, kTopLogits);
    if (threadIdx.x == 0) {
        work.bound = bound;
        work.count = 0;
        work.insane = top == 0xffffffffu;
        work.highest = __uint_as_float(top & 0x80000000u ? top & 0x7fffffffu : ~top);
    }
}

/// Ranks candidates; ids beyond them are -1.
__device__ void write_top(const Top& t, int row, Work& work, int count) {
    int* ids = t.top + row * kTopWords;
    float* values = reinterpret_cast<float*>(ids + kTopLogits);
    for (int i = threadIdx.x; i < kTopLogits; i += kBlock)
        if (i >= count) ids[i] = -1, values[i] = -INFINITY;
    __shared__ float value[kMaxKept];
    __shared__ int id[kMaxKept];
    for (int i = threadIdx.x; i < count; i += kBlock)
        value[i] = __ldcg(work.value + i), id[i] = __ldcg(work.id + i);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kBlock) {
        int rank = 0;
#pragma unroll 4
        for (int j = 0; j < count; ++j)
            rank += value[j] > value[i] || (value[j] == value[i] && id[j] < id[i]);
        if (rank < kTopLogits) ids[rank] = id[i], values[rank] = value[i];
    }
}

__global__ void __launch_bounds__(kBlock) collect_kernel(Top t) {
    __shared__ float partial[kMaxEach][kBlock / 32];
    allow_successor();
    wait_for_predecessor();
    const int row = blockIdx.y, lane = threadIdx.x % 32;
    const float* logits = t.logits + row * t.ld;
    Work& work = t.of(row);
    const uint32_t bound = __ldcg(&work.bound);
    const float highest = __ldcg(&work.highest), temperature = __ldcg(t.temperature + row);
    const float scale = temperature > 0 ? 1.0f / temperature : 1.0f;
    const bool insane = __ldcg(&work.insane) != 0;
    int each = 0;
    for (int share = blockIdx.x; share < kShares; share += gridDim.x, ++each) {
        float sum = 0;
        for (int i = share * kBlock + threadIdx.x; i < t.vocab && !insane; i += kShares * kBlock) {
            const float x = __ldcg(logits + i) + 0.0f;
            sum += __expf((x - highest) * scale);
            if (ordered_bits(x) < bound || x == -INFINITY) continue;
            const unsigned at = atomicAdd(&work.count, 1);
            if (at < kMaxKept) work.value[at] = x, work.id[at] = i;
        }
        sum = warp_sum(sum);
        if (lane == 0) partial[each][threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < each) {
        float total = 0;
        for (const float sum : partial[threadIdx.x]) total += sum;
        work.sums[blockIdx.x + threadIdx.x * gridDim.x] = total;
    }
    if (!last_block(t.counters + 2 * row + 1, gridDim.x)) return;
    const unsigned count = __ldcg(&work.count);
    write_top(t, row, work, min(count, static_cast<unsigned>(kMaxKept)));
    if (threadIdx.x >= 32) return;
    float total = 0;
#pragma unroll
    for (int b = 0; b < kShares / 32; ++b) total += __ldcg(work.sums + lane + 32 * b);
    total = warp_sum(total);
    if (lane == 0) {
        int* end = t.top + row * kTopWords + 2 * kTopLogits;
        end[0] = __float_as_int(total);
        end[1] = !insane && count > 0 && count <= kMaxKept;
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
                  node.outputs[0]->as<int>(),
                  node.outputs[1]->as<uint8_t>(),
                  c.counters};
    constexpr int kRows = kCounters / 2;  // of a launch
    for (int first = 0; first < rows; first += kRows) {
        const Top t = all.from_row(first);
        // Many rows fill the GPU with fewer blocks, which wait less for each other.
        const dim3 grid(rows > 8 ? kShares / kMaxEach : kShares, min(kRows, rows - first));
        launch(c, "logits_top", bound_kernel, grid, kBlock, 0, t);
        launch(c, "logits_top", collect_kernel, grid, kBlock, 0, t);
    }
}

}  // namespace quern::cuda
