// A list of pieces, each copied by one block of threads.
//
//   block b: pieces b, b + blocks, ...; a thread has 8 loads of 16 bytes under way, a block 32 KB
//
// No shared memory. Traffic: each byte once. Bound: PCIe, which needs some 100 KB under way for its 50 GB/s; the driver takes
// a few microseconds for each copy that it is asked for, as long as PCIe takes for 250 KB.
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/pack/copy_pieces.h"

namespace quern::cuda::pack {

namespace {

constexpr int kBlock = 256, kAtOnce = 8;

__global__ void __launch_bounds__(kBlock) copy_pieces_kernel(const __grid_constant__ PieceList list) {
    for (int p = static_cast<int>(blockIdx.x); p < list.count; p += static_cast<int>(gridDim.x)) {
        const uint4* from = reinterpret_cast<const uint4*>(list.piece[p].from);
        uint4* to = reinterpret_cast<uint4*>(list.piece[p].to);
        const int64_t count = list.piece[p].bytes / kPieceAlignment;
        for (int64_t begin = threadIdx.x; begin < count; begin += kBlock * kAtOnce) {
            uint4 value[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (begin + i * kBlock < count) value[i] = from[begin + i * kBlock];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (begin + i * kBlock < count) to[begin + i * kBlock] = value[i];
        }
    }
}

}  // namespace

void copy_pieces(cudaStream_t stream, const PieceList& list, int blocks) {
    // As launch.cuh says: beside an SM's other kernels.
    check_launch(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(copy_pieces_kernel),
                             cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "copy_pieces");
    const int grid = list.count < blocks ? list.count : blocks;
    copy_pieces_kernel<<<grid, kBlock, 0, stream>>>(list);
    check_launch(cudaGetLastError(), "copy_pieces");
}

}  // namespace quern::cuda::pack
