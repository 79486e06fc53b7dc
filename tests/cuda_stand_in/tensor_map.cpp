// The one function of the driver that the backend asks for: descriptions of matrices for the copy engine.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "cuda_stand_in/errors.h"

namespace quern::cuda_stand_in {
namespace {

bool is_multiple(const void* address, uintptr_t of) { return reinterpret_cast<uintptr_t>(address) % of == 0; }

/// 0: a type that the stand-in does not know.
cuuint64_t element_bytes(CUtensorMapDataType type) {
    if (type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) return 2;
    return type == CU_TENSOR_MAP_DATA_TYPE_UINT64 ? 8 : 0;
}

/// What the driver refuses of matrices; empty: nothing.
std::string fault_of(const CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, const void* data,
                     const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* steps, CUtensorMapSwizzle swizzle) {
    constexpr cuuint64_t kMostSize = 1ull << 32, kMostStride = 1ull << 40;
    const cuuint64_t element = element_bytes(type);
    if (element == 0) return "elements other than BF16 and 64-bit numbers, which the stand-in does not know";
    if (!is_multiple(map, 64)) return "the map is not at a multiple of 64 bytes";
    if (data == nullptr || !is_multiple(data, 16)) return "the matrix is not at a multiple of 16 bytes";
    if (rank < 1 || rank > 5) return "not 1 to 5 dimensions";
    for (cuuint32_t i = 0; i < rank; ++i) {
        if (sizes[i] < 1 || sizes[i] > kMostSize) return "a size that is not 1 to 2^32";
        if (box[i] < 1 || box[i] > 256) return "a box that is not 1 to 256";
        if (steps[i] < 1 || steps[i] > 8) return "a step that is not 1 to 8";
        if (i + 1 < rank && (strides[i] % 16 != 0 || strides[i] >= kMostStride))
            return "a stride that is no multiple of 16 bytes, or 2^40 or more";
    }
    if (rank > 1 && strides[0] < sizes[0] * element) return "rows that overlap";
    for (cuuint32_t i = 1; i + 1 < rank; ++i)
        if (strides[i] < strides[i - 1] * sizes[i]) return "parts that overlap";
    if (box[0] * element % 16 != 0) return "a box whose rows are no multiple of 16 bytes";
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] * element > 128)
        return "a box whose rows are longer than the 128 bytes of the swizzle";
    return {};
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t* steps, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
    const std::string fault = fault_of(map, type, rank, data, sizes, strides, box, steps, swizzle);
    if (!fault.empty()) {
        fail(cudaErrorInvalidValue, "cuTensorMapEncodeTiled: " + fault);
        return CUDA_ERROR_INVALID_VALUE;
    }
    std::memset(map, 0, sizeof(*map));
    return CUDA_SUCCESS;
}

}  // namespace
}  // namespace quern::cuda_stand_in

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* found) {
    const bool known = std::string(symbol) == "cuTensorMapEncodeTiled";
    *function = known ? reinterpret_cast<void*>(quern::cuda_stand_in::encode_tiled) : nullptr;
    if (found != nullptr) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
