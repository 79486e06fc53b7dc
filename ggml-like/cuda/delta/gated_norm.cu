// The gated norm of many rows. A warp goes from head to head, a lane 4 neighbours (or 8) of each; the next head's o and z are asked
// for before this one's are used. No shared memory.
// Traffic: o, z and h once. Bound: bytes.
#include "ggml-like/cuda/delta/gated_norm.h"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

namespace quern::cuda::delta {

using namespace ptx;

namespace {

constexpr int kNormThreads = 256, kBlocksPerSm = 6;

/// The lane's kEach neighbours of a head. kWhole: heads of 32 * kEach that begin at multiples of 8 bytes.
template <int kEach, bool kWhole>
struct HeadPart {
    uint2 words[kEach / 4];

    __device__ __forceinline__ void load(const bf16* head, int at, int dim) {
        if constexpr (kWhole) {
#pragma unroll
            for (int j = 0; j < kEach / 4; ++j)
                words[j] = __ldcg(reinterpret_cast<const uint2*>(head + at) + j);
        } else {
            auto* each = reinterpret_cast<uint16_t*>(words);
            const auto* from = reinterpret_cast<const uint16_t*>(head);
#pragma unroll
            for (int j = 0; j < kEach; ++j) each[j] = at + j < dim ? __ldcg(from + at + j) : uint16_t{0};
        }
    }
    __device__ __forceinline__ void unpack(float (&to)[kEach]) const {
#pragma unroll
        for (int j = 0; j < kEach; ++j) {
            const uint32_t word = j % 4 < 2 ? words[j / 4].x : words[j / 4].y;
            to[j] = __uint_as_float(j % 2 == 0 ? word << 16 : word & 0xffff0000u);
        }
    }
    __device__ __forceinline__ void store(bf16* head, int at, int dim, const float (&from)[kEach]) {
#pragma unroll
        for (int j = 0; j < kEach / 4; ++j)
            words[j] = make_uint2(pack_bf16(from[4 * j], from[4 * j + 1]),
                                  pack_bf16(from[4 * j + 2], from[4 * j + 3]));
        if constexpr (kWhole) {
#pragma unroll
            for (int j = 0; j < kEach / 4; ++j) reinterpret_cast<uint2*>(head + at)[j] = words[j];
        } else {
            const auto* each = reinterpret_cast<const bf16*>(words);
#pragma unroll
            for (int j = 0; j < kEach; ++j)
                if (at + j < dim) head[at + j] = each[j];
        }
    }
};

/// Heads of up to 32 * kEach.
template <int kEach, bool kWhole>
__global__ void __launch_bounds__(kNormThreads, kBlocksPerSm) gated_kernel(GatedNormRows a) {
    allow_successor();
    const int at = threadIdx.x % 32 * kEach, dim = kWhole ? 32 * kEach : a.dim;
    float norm[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) norm[j] = at + j < dim ? a.norm[at + j] : 0.0f;
    const Divisor heads(a.heads);
    const int all = a.rows * a.heads, step = static_cast<int>(gridDim.x) * (kNormThreads / 32);
    int item = static_cast<int>(blockIdx.x * (kNormThreads / 32) + threadIdx.x / 32);
    HeadPart<kEach, kWhole> o, z;
    const auto load = [&] {
        const int row = heads.quotient(item), head = item - row * a.heads;
        o.load(static_cast<const bf16*>(a.o) + int64_t{item} * dim, at, dim);
        z.load(static_cast<const bf16*>(a.z) + row * a.z_ld + head * dim, at, dim);
    };
    wait_for_predecessor();
    if (item < all) load();
#pragma unroll 1
    while (item < all) {
        float value[kEach], gate[kEach], sum = 0;
        o.unpack(value), z.unpack(gate);
        bf16* h = static_cast<bf16*>(a.h) + int64_t{item} * dim;
        item += step;
        if (item < all) load();
#pragma unroll
        for (const float v : value) sum += v * v;
        const float r = rsqrtf(warp_sum(sum) / static_cast<float>(dim) + a.eps);
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            value[j] = value[j] * r * norm[j] * __fdividef(gate[j], 1.0f + __expf(-gate[j]));
        HeadPart<kEach, kWhole>().store(h, at, dim, value);
    }
}

bool begins_at_eights(const void* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; }

}  // namespace

void gated_norm_rows(Context& c, const GatedNormRows& a) {
    if (a.dim > 256) unsupported("conv_gated_delta_net", "heads of more than 256");
    if (a.rows >= 1 << 20 || int64_t{a.rows} * a.heads >= 1 << 24)  // Divisor takes no more
        unsupported("conv_gated_delta_net", "so many rows at once");
    const bool whole = a.dim == 128 && a.z_ld % 4 == 0 && begins_at_eights(a.o) && begins_at_eights(a.z) &&
                       begins_at_eights(a.h);
    const int warps = kNormThreads / 32, blocks = (a.rows * a.heads + warps - 1) / warps;
    launch(c, "gated_norm_rows",
           whole          ? gated_kernel<4, true>
           : a.dim <= 128 ? gated_kernel<4, false>
                          : gated_kernel<8, false>,
           static_cast<unsigned>(min(blocks, kBlocksPerSm * c.sms)), kNormThreads, 0, a);
}

}  // namespace quern::cuda::delta
