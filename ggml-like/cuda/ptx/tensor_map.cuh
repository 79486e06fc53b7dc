// Maps of matrices for the copy engine (ptx/wgmma.cuh, copy_box).
#pragma once

#include <cudaTypedefs.h>

#include "ggml-like/cuda/launch.cuh"

namespace quern::cuda {

/// How a matrix lies in memory, for the copy engine.
struct MapShape {
    CUtensorMapDataType type;
    cuuint32_t dimensions;
    cuuint64_t size[4];    // elements
    cuuint64_t stride[3];  // bytes; of all dimensions but the first
    cuuint32_t box[4];     // elements
    CUtensorMapSwizzle swizzle;
};
inline CUtensorMap make_map(const void* data, const MapShape& shape) {
    static const auto encode = [] {
        void* f = nullptr;
        cudaDriverEntryPointQueryResult found{};
        check_launch(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found),
            "the copy engine's maps");
        return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
    }();
    CUtensorMap map{};
    const cuuint32_t each[4] = {1, 1, 1, 1};
    const CUresult made = encode(&map, shape.type, shape.dimensions, const_cast<void*>(data), shape.size,
                                 shape.stride, shape.box, each, CU_TENSOR_MAP_INTERLEAVE_NONE, shape.swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check_launch(made == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue, "the map of a matrix");
    return map;
}

}  // namespace quern::cuda
