// Instructions of sm_90a: warpgroup products, the barriers between warps that copy and warps that multiply, and copies
// by the copy engine. Only code for sm_90a may call what is here.
//
// Products of a warpgroup (4 warps): A in registers, in the fragment order of mma.m16n8k16, or in shared memory as B; warp w
// owns rows 16w .. 16w + 15. B in shared memory: rows of 128 bytes whose 16-byte columns are XORed with the row (128-byte swizzle), from a
// multiple of 1024 on. D lies as in mma.m16n8k16.
#pragma once

#include <cuda.h>

#include "ggml-like/cuda/ptx/copy_bytes.cuh"
#include "ggml-like/cuda/ptx/phases.cuh"
#include "ggml-like/cuda/ptx/ptx.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define QUERN_WGMMA 1
#else
#define QUERN_WGMMA 0
#endif

#if QUERN_WGMMA

namespace quern::cuda::ptx {

/// Orders register writes before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/// Keeps the compiler from moving uses of sums across the wait.
template <int kN>
__device__ __forceinline__ void hold(float (&d)[kN][4]) {
#pragma unroll
    for (int j = 0; j < kN; ++j)
        asm volatile("" : "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])::"memory");
}
/// After the wait: until here products may read their registers of A. ptxas (13.0) gives these to others that are written
/// before the wait if nothing reads them after it, so here is a store of them, to any address; it never runs. `never`: false, which
/// only running shows.
template <int kBlocks>
__device__ __forceinline__ void hold(const uint32_t (&a)[kBlocks][4], bool never) {
    if (!never) return;
#pragma unroll
    for (int k = 0; k < kBlocks; ++k)
        asm volatile("st.shared.v4.b32 [%0], {%0, %1, %2, %3};" ::"r"(a[k][0]), "r"(a[k][1]), "r"(a[k][2]),
                     "r"(a[k][3])
                     : "memory");
}
/// The descriptor of B at shared address `at`; + 2 for every further 16 columns.
__device__ __forceinline__ uint64_t wgmma_rows(uint32_t at) {
    return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{1} << 16) | ((at & 0x3ffffu) >> 4);
}

/// d += a times 16 columns of kRows rows of B; d[j] has rows 8j .. 8j + 7.
template <int kRows>
__device__ __forceinline__ void wgmma(float (&d)[kRows / 8][4], const uint32_t (&a)[4], uint64_t rows);
/// d = the same.
template <int kRows>
__device__ __forceinline__ void wgmma_fresh(float (&d)[kRows / 8][4], const uint32_t (&a)[4], uint64_t rows);

// The registers of d by number.
#define QUERN_R16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define QUERN_R32 QUERN_R16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QUERN_R48 QUERN_R32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define QUERN_R64 QUERN_R48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define QUERN_R80 QUERN_R64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define QUERN_R96 QUERN_R80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define QUERN_R128 \
    QUERN_R96 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define QUERN_R160 \
    QUERN_R128 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define QUERN_R192 \
    QUERN_R160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define QUERN_R208 QUERN_R192 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define QUERN_R224 QUERN_R208 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define QUERN_R256 \
    QUERN_R224     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define QUERN_D1(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define QUERN_D2(j) QUERN_D1(j), QUERN_D1(j + 1)
#define QUERN_D4(j) QUERN_D2(j), QUERN_D2(j + 2)
#define QUERN_D8(j) QUERN_D4(j), QUERN_D4(j + 4)
#define QUERN_D16(j) QUERN_D8(j), QUERN_D8(j + 8)
#define QUERN_D32(j) QUERN_D16(j), QUERN_D16(j + 16)
#define QUERN_F1(j) "=f"(d[j][0]), "=f"(d[j][1]), "=f"(d[j][2]), "=f"(d[j][3])
#define QUERN_F2(j) QUERN_F1(j), QUERN_F1(j + 1)
#define QUERN_F4(j) QUERN_F2(j), QUERN_F2(j + 2)
#define QUERN_F8(j) QUERN_F4(j), QUERN_F4(j + 4)
#define QUERN_F16(j) QUERN_F8(j), QUERN_F8(j + 8)

// add: "eq", to what d has; "ne", to nothing. b_rows: how B lies, "0", or "1" by columns.
#define QUERN_TEXT(add, n, d_registers, a_registers, b, b_rows)                                         \
    "{\n.reg .pred p;\nsetp." add                                                                       \
    ".b32 p, 0, 0;\n"                                                                                   \
    "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" d_registers "}, {" a_registers "}, " b \
    ", p, 1, 1, " b_rows ";\n}\n"
#define QUERN_PRODUCT(name, add, n, a_registers, b, ...)                                                 \
    template <>                                                                                          \
    __device__ __forceinline__ void name<n>(float(&d)[n / 8][4], const uint32_t(&a)[4], uint64_t rows) { \
        asm volatile(QUERN_TEXT(add, n, QUERN_R##n, a_registers, b, "0")                                 \
                     : __VA_ARGS__                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));                           \
    }
QUERN_PRODUCT(wgmma, "eq", 16, "%8, %9, %10, %11", "%12", QUERN_D2(0))
QUERN_PRODUCT(wgmma, "eq", 32, "%16, %17, %18, %19", "%20", QUERN_D4(0))
QUERN_PRODUCT(wgmma, "eq", 48, "%24, %25, %26, %27", "%28", QUERN_D4(0), QUERN_D2(4))
QUERN_PRODUCT(wgmma, "eq", 64, "%32, %33, %34, %35", "%36", QUERN_D8(0))
QUERN_PRODUCT(wgmma, "eq", 80, "%40, %41, %42, %43", "%44", QUERN_D8(0), QUERN_D2(8))
QUERN_PRODUCT(wgmma, "eq", 96, "%48, %49, %50, %51", "%52", QUERN_D8(0), QUERN_D4(8))
QUERN_PRODUCT(wgmma, "eq", 128, "%64, %65, %66, %67", "%68", QUERN_D16(0))
QUERN_PRODUCT(wgmma, "eq", 160, "%80, %81, %82, %83", "%84", QUERN_D16(0), QUERN_D4(16))
QUERN_PRODUCT(wgmma, "eq", 192, "%96, %97, %98, %99", "%100", QUERN_D16(0), QUERN_D8(16))
QUERN_PRODUCT(wgmma, "eq", 208, "%104, %105, %106, %107", "%108", QUERN_D16(0), QUERN_D8(16), QUERN_D2(24))
QUERN_PRODUCT(wgmma, "eq", 224, "%112, %113, %114, %115", "%116", QUERN_D16(0), QUERN_D8(16), QUERN_D4(24))
QUERN_PRODUCT(wgmma, "eq", 256, "%128, %129, %130, %131", "%132", QUERN_D32(0))
QUERN_PRODUCT(wgmma_fresh, "ne", 16, "%8, %9, %10, %11", "%12", QUERN_F2(0))
QUERN_PRODUCT(wgmma_fresh, "ne", 32, "%16, %17, %18, %19", "%20", QUERN_F4(0))
QUERN_PRODUCT(wgmma_fresh, "ne", 48, "%24, %25, %26, %27", "%28", QUERN_F4(0), QUERN_F2(4))
QUERN_PRODUCT(wgmma_fresh, "ne", 64, "%32, %33, %34, %35", "%36", QUERN_F8(0))
QUERN_PRODUCT(wgmma_fresh, "ne", 80, "%40, %41, %42, %43", "%44", QUERN_F8(0), QUERN_F2(8))
QUERN_PRODUCT(wgmma_fresh, "ne", 96, "%48, %49, %50, %51", "%52", QUERN_F8(0), QUERN_F4(8))
QUERN_PRODUCT(wgmma_fresh, "ne", 128, "%64, %65, %66, %67", "%68", QUERN_F16(0))
QUERN_PRODUCT(wgmma_fresh, "ne", 160, "%80, %81, %82, %83", "%84", QUERN_F16(0), QUERN_F4(16))

/// The descriptor of 16 rows of 128 or 256 columns at shared address `at`: 64 columns of a row are 128 bytes, `apart` bytes before
/// the next 64. + 128 for every further 16 rows.
__device__ __forceinline__ uint64_t wgmma_columns(uint32_t at, uint32_t apart) {
    return (uint64_t{1} << 62) | (uint64_t{64} << 32) | (uint64_t{apart >> 4} << 16) | ((at & 0x3ffffu) >> 4);
}
/// d += a times 16 rows of 256 columns.
__device__ __forceinline__ void wgmma_by_columns(float (&d)[32][4], const uint32_t (&a)[4],
                                                 uint64_t columns) {
    asm volatile(QUERN_TEXT("eq", 256, QUERN_R256, "%128, %129, %130, %131", "%132", "1")
                 : QUERN_D32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
}
/// d += a times 16 rows of 128 columns.
__device__ __forceinline__ void wgmma_by_columns(float (&d)[16][4], const uint32_t (&a)[4],
                                                 uint64_t columns) {
    asm volatile(QUERN_TEXT("eq", 128, QUERN_R128, "%64, %65, %66, %67", "%68", "1")
                 : QUERN_D16(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns));
}

#define QUERN_WGMMA_SHARED_64(add)                                                      \
    "{\n.reg .pred p;\nsetp." add                                                       \
    ".b32 p, 0, 0;\n"                                                                   \
    "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "            \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
    "%32, %33, p, 1, 1, 0, 0;\n}\n"

/// d += 16 columns of 64 rows of A in shared memory times those of 64 rows of B.
__device__ __forceinline__ void wgmma_shared(float (&d)[8][4], uint64_t a, uint64_t rows) {
    asm volatile(QUERN_WGMMA_SHARED_64("eq") : QUERN_D8(0) : "l"(a), "l"(rows));
}
/// d = the same.
__device__ __forceinline__ void wgmma_shared_fresh(float (&d)[8][4], uint64_t a, uint64_t rows) {
    asm volatile(QUERN_WGMMA_SHARED_64("ne") : QUERN_F8(0) : "l"(a), "l"(rows));
}
#undef QUERN_WGMMA_SHARED_64

#undef QUERN_F16
#undef QUERN_F8
#undef QUERN_F4
#undef QUERN_F2
#undef QUERN_F1
#undef QUERN_D32
#undef QUERN_D16
#undef QUERN_D8
#undef QUERN_D4
#undef QUERN_D2
#undef QUERN_D1
#undef QUERN_PRODUCT
#undef QUERN_TEXT
#undef QUERN_R256
#undef QUERN_R224
#undef QUERN_R208
#undef QUERN_R192
#undef QUERN_R160
#undef QUERN_R128
#undef QUERN_R96
#undef QUERN_R80
#undef QUERN_R64
#undef QUERN_R48
#undef QUERN_R32
#undef QUERN_R16

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
/// The box of a matrix from (column, row) on to shared memory, by the copy engine; zeros beyond the matrix's edges.
__device__ __forceinline__ void copy_box(void* to_shared, const CUtensorMap& map, int column, int row,
                                         uint64_t* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
        "%3}], [%4];" ::"r"(shared_address(to_shared)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}
/// The same of packed weights: chunks of tiles, from chunk `chunk` of tile `tile` of expert `expert` on. No later kernel reads them, so
/// they are evicted from L2 first, unless this one reads them `again`. (Dense products do not say so: 50 tokens would take 5 % longer.)
__device__ __forceinline__ void copy_chunks(void* to_shared, const CUtensorMap& map, int chunk, int tile,
                                            int expert, uint64_t* barrier, bool again = false) {
    if (again)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
            "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to_shared)),
            "l"(&map), "r"(0), "r"(chunk), "r"(tile), "r"(expert), "r"(shared_address(barrier))
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(shared_address(to_shared)),
            "l"(&map), "r"(0), "r"(chunk), "r"(tile), "r"(expert), "r"(shared_address(barrier)),
            "l"(kReadOnce)
            : "memory");
}

/// stmatrix, transposed: of four 8 x 8 matrices of 16-bit elements, a register each, lane l gives the shared address where
/// column l % 8 of matrix l / 8 goes, 16 bytes.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}
__device__ __forceinline__ uint4 load_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

/// A whole warpgroup: from here on kRegisters registers a thread, fewer or more than before.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace quern::cuda::ptx

#endif
