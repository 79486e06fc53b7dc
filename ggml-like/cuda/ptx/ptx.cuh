// PTX instructions that CUDA C++ has no words for, and sums over the lanes of a warp.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

namespace quern::cuda::ptx {

using bf16 = __nv_bfloat16;

/// Programmatic dependent launch: once every block has called this or ended, the next kernel of the stream may start,
/// and runs up to its wait_for_predecessor.
__device__ __forceinline__ void allow_successor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Returns when the kernel before this one has ended and its writes are visible; since every kernel waits, so have all
/// before.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Reads a word of each line of 64 bytes of a kernel's parameter. Parameters lie in constant memory that no cache has when a kernel begins,
/// and the first reader of a line waits some 0.3 us. To be called before wait_for_predecessor, for what is needed after it.
template <typename T>
__device__ __forceinline__ void bring_near(const T& parameter) {
    static_assert(sizeof(T) >= 4);
#if __CUDA_ARCH__ >= 900
    constexpr int kWords = sizeof(T) / 4, kLine = 16;
    const auto bring = [&](int i) {
        uint32_t word;
        memcpy(&word, reinterpret_cast<const char*>(&parameter) + 4 * i, 4);
        // An instruction that depends on the word, so that it is read: a nap if it is some number.
        asm volatile(
            "{\n.reg .pred some;\nsetp.eq.u32 some, %0, 0x9e3779b1;\n@some nanosleep.u32 1;\n}" ::"r"(word));
    };
#pragma unroll
    for (int i = 0; i < kWords; i += kLine) bring(i);
    if constexpr (kWords > kLine) bring(kWords - 1);
#endif
}

/// Makes the compiler compute the address, or the number, here. It computes what it can where it is used, and of an address that is after
/// wait_for_predecessor, where an instruction that runs once takes some eight cycles.
template <typename T>
__device__ __forceinline__ void pin(T*& address) {
    asm volatile("" : "+l"(address));
}
__device__ __forceinline__ void pin(int& number) { asm volatile("" : "+r"(number)); }

/// Brings a line of memory into L1, without a register that waits for it.
__device__ __forceinline__ void prefetch_line(const void* p) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(p));
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

/// Division by one number in a few instructions, where an integer division takes some twenty: for numbers below 2^24
/// and quotients below 2^20, not negative.
class Divisor {
  public:
    __device__ __forceinline__ explicit Divisor(int by) : by_(by) {
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse_) : "f"(static_cast<float>(by)));
    }
    __device__ __forceinline__ int quotient(int x) const {
        const int near = static_cast<int>(static_cast<float>(x) * inverse_), rest = x - near * by_;
        return near + (rest >= by_) - (rest < 0);
    }
    __device__ __forceinline__ int by() const { return by_; }

  private:
    int by_;
    float inverse_;
};
__device__ __forceinline__ int quotient(int x, int by) { return Divisor(by).quotient(x); }

/// Counts one up, and from `blocks` - 1 to zero again; the number before. What the block has done before comes before what others do
/// after their tickets.
__device__ __forceinline__ unsigned take_ticket(unsigned* counter, unsigned blocks) {
    unsigned before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(blocks - 1)
                 : "memory");
    return before;
}

/// All threads of a block: true in the last of `blocks` blocks to call with this counter, which is then zero again. It
/// sees what the others wrote before.
__device__ __forceinline__ bool last_block(unsigned* counter, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned before;
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        last = before + 1 == blocks;
        if (last) *counter = 0;
    }
    __syncthreads();
    return last;
}

/// cp.async: 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void copy_async16(void* to_shared, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to_shared)), "l"(from));
}
/// Four bytes, by way of L1.
__device__ __forceinline__ void copy_async4(void* to_shared, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to_shared)), "l"(from));
}
/// As copy_async16; `valid` false: writes zeros and reads nothing.
__device__ __forceinline__ void copy_async16(void* to_shared, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_shared)), "l"(from),
                 "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;"); }
/// Waits until at most N of this thread's groups of copies are under way.
template <int N>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// d += a b: a 16 x 16 row-major, b 16 x 8 column-major, BF16; sums in FP32.
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// ldmatrix: four 8 x 8 matrices of 16-bit elements; lane l gives the shared address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
}
/// Of BF16 bits.
__device__ __forceinline__ float as_float(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
/// Sums of N values over kLanes neighbouring lanes, with N - 1 + log2(kLanes / N) exchanges for all: lane l of these
/// gets the sum of value l / (kLanes / N). Lanes are added in the pairs of warp_sum.
template <int kLanes, int N>
__device__ __forceinline__ float lane_sums(float (&value)[N]) {
    int d = kLanes / 2;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, d /= 2)
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const bool upper = threadIdx.x & d;
            const float given = upper ? value[i] : value[i + n];
            value[i] = (upper ? value[i + n] : value[i]) + __shfl_xor_sync(0xffffffffu, given, d);
        }
    float sum = value[0];
#pragma unroll
    for (; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    return sum;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

}  // namespace quern::cuda::ptx
