// Two pieces, many threads each.
//
//   block b: 8 KB of one of them; a thread has 4 loads of 8 bytes under way, next to those of its neighbours
//
// No shared memory. Traffic: each byte once. Bound: the latency of PCIe, some 1.5 us.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/pack/copy_inputs.h"

namespace quern::cuda::pack {

namespace {

constexpr int kBlock = 256, kAtOnce = 4, kUnits = kBlock * kAtOnce;  // units of a block

struct Units {
    uint2* to;
    const uint2* from;
    int count, blocks;

    explicit Units(const Piece& p)
        : to(reinterpret_cast<uint2*>(p.to)),
          from(reinterpret_cast<const uint2*>(p.from)),
          count(static_cast<int>(p.bytes / static_cast<int64_t>(sizeof(uint2)))),
          blocks((count + kUnits - 1) / kUnits) {}
};

__global__ void __launch_bounds__(kBlock) copy_inputs_kernel(Units one, Units other) {
    const bool second = static_cast<int>(blockIdx.x) >= one.blocks;
    const Units own = second ? other : one;
    const int block = static_cast<int>(blockIdx.x) - (second ? one.blocks : 0);
    const int first = block * kUnits + static_cast<int>(threadIdx.x);
    uint2 value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
        if (first + i * kBlock < own.count) value[i] = own.from[first + i * kBlock];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
        if (first + i * kBlock < own.count) own.to[first + i * kBlock] = value[i];
}

}  // namespace

void copy_inputs(cudaStream_t stream, const Piece& first, const Piece& second) {
    const Units one(first), other(second);
    if (one.blocks + other.blocks == 0) return;
    // As launch.cuh says: beside an SM's other kernels.
    check_launch(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(copy_inputs_kernel),
                             cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "copy_inputs");
    copy_inputs_kernel<<<one.blocks + other.blocks, kBlock, 0, stream>>>(one, other);
    check_launch(cudaGetLastError(), "copy_inputs");
}

}  // namespace quern::cuda::pack
