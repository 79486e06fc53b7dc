// A row's elements by all threads of a block, several loads on their way at a time.
#pragma once

namespace quern::cuda::ptx {

/// Calls store(k, load(k)) for every k below `count` that is the thread's. kTogether elements are loaded before the first of them is
/// stored: as far as the compiler knows a store may change what a later load reads, so in a plain loop each load waits for the
/// one before.
template <int kThreads, int kTogether, typename Load, typename Store>
__device__ __forceinline__ void in_batches(int count, const Load& load, const Store& store) {
    for (int first = static_cast<int>(threadIdx.x); first < count; first += kThreads * kTogether) {
        decltype(load(0)) x[kTogether];
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
            if (const int k = first + j * kThreads; k < count) x[j] = load(k);
#pragma unroll
        for (int j = 0; j < kTogether; ++j)
            if (const int k = first + j * kThreads; k < count) store(k, x[j]);
    }
}

}  // namespace quern::cuda::ptx
