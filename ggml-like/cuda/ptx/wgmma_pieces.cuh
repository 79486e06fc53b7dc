// Products of a warpgroup (wgmma.cuh) whose operands lie in shared memory as pieces, without a swizzle: a piece is 8 columns of
// all rows, 16 bytes a row, one row after the other. A piece may begin at any multiple of 128, so heads of any multiple of 8
// take no more room than they have elements, and plain bulk copies bring them.
#pragma once

#include "ggml-like/cuda/ptx/wgmma.cuh"

#if QUERN_WGMMA

namespace quern::cuda::ptx {

/// The descriptor of A, or of B by rows: 16 columns, made of 8 x 8 matrices of 128 bytes; bytes to the one on the right, and to
/// the one below.
__device__ __forceinline__ uint64_t wgmma_matrices(uint32_t at, uint32_t right, uint32_t below) {
    return (uint64_t{below >> 4} << 32) | (uint64_t{right >> 4} << 16) | ((at & 0x3ffffu) >> 4);
}
/// The same of two pieces that are `apart` bytes from each other.
__device__ __forceinline__ uint64_t wgmma_pieces(uint32_t at, uint32_t apart) {
    return wgmma_matrices(at, apart, 128);
}
/// The descriptor of B by columns: 16 rows of all pieces; + 16 for the next 16 rows.
__device__ __forceinline__ uint64_t wgmma_piece_columns(uint32_t at, uint32_t apart) {
    return (uint64_t{apart >> 4} << 32) | (uint64_t{128 >> 4} << 16) | ((at & 0x3ffffu) >> 4);
}

#define QUERN_D1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define QUERN_D4(j) QUERN_D1(j), QUERN_D1(j + 1), QUERN_D1(j + 2), QUERN_D1(j + 3)
#define QUERN_F1(j) "=f"(d[j][0]), "=f"(d[j][1]), "=f"(d[j][2]), "=f"(d[j][3])
#define QUERN_F4(j) QUERN_F1(j), QUERN_F1(j + 1), QUERN_F1(j + 2), QUERN_F1(j + 3)

#define QUERN_WGMMA_SHARED_128(add)                                                     \
    "{\n.reg .pred p;\nsetp." add                                                       \
    ".b32 p, 0, 0;\n"                                                                   \
    "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"                           \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
    "%64, %65, p, 1, 1, 0, 0;\n}\n"

/// d += 16 columns of 64 rows of A in shared memory times those of 128 rows of B.
__device__ __forceinline__ void wgmma_shared(float (&d)[16][4], uint64_t a, uint64_t rows) {
    asm volatile(QUERN_WGMMA_SHARED_128("eq")
                 : QUERN_D4(0), QUERN_D4(4), QUERN_D4(8), QUERN_D4(12)
                 : "l"(a), "l"(rows));
}
/// d = the same.
__device__ __forceinline__ void wgmma_shared_fresh(float (&d)[16][4], uint64_t a, uint64_t rows) {
    asm volatile(QUERN_WGMMA_SHARED_128("ne")
                 : QUERN_F4(0), QUERN_F4(4), QUERN_F4(8), QUERN_F4(12)
                 : "l"(a), "l"(rows));
}
#undef QUERN_WGMMA_SHARED_128

/// d += a times 16 rows of 72 columns of B.
__device__ __forceinline__ void wgmma_by_columns(float (&d)[9][4], const uint32_t (&a)[4], uint64_t columns) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35}, "
        "{%36, %37, %38, %39}, %40, p, 1, 1, 1;\n}\n"
        : QUERN_D4(0), QUERN_D4(4), QUERN_D1(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
}

#undef QUERN_F4
#undef QUERN_F1
#undef QUERN_D4
#undef QUERN_D1

}  // namespace quern::cuda::ptx

#endif
