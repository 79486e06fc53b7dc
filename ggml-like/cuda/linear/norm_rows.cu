// Products of up to 8 rows, in BF16 16, whose norm was deferred (norm_rows.h). dense_rows.cuh has the loop: who owns which tile,
// limits.
#include "ggml-like/cuda/linear/norm_rows.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/dense_rows.cuh"

namespace quern::cuda::linear {

using namespace ptx;
using namespace pack;

namespace {

/// Sums times the rows' factors, BF16 or F32; paired ones BF16.
template <bool kPairs>
struct StoreNormed {
    static constexpr bool kPaired = kPairs;
    struct Loaded {};
    void* y;
    int ld;  // 32 bits, so that f32 lies in the same line of parameters as the columns of x, which are read before the wait (bring_near)
    bool f32;
    const float* factor;

    __device__ __forceinline__ void early(Loaded&, int, int) const {}
    __device__ __forceinline__ void load(Loaded&, int, int) const {}
    __device__ __forceinline__ void store(int row, int n, float gate, float up) const {
        static_cast<bf16*>(y)[n * ld + row] = gated(scaled(gate, factor[n]), scaled(up, factor[n]));
    }
    __device__ __forceinline__ void store(int row, int n, const Loaded&, float sum) const {
        const float v = scaled(sum, factor[n]);
        if (f32)
            static_cast<float*>(y)[n * ld + row] = v;
        else
            static_cast<bf16*>(y)[n * ld + row] = __float2bfloat16(v);
    }
};

template <Kind K, bool kPairs, int NT>
__global__ void __launch_bounds__(kThreads, NT == 1 ? 2 : 1)
    norm_rows_kernel(Part part, DenseLaunch dense, RowsOfX rows, RowScale scale, StoreNormed<kPairs> store) {
    __shared__ float factor[8 * NT];
    store.factor = factor;
    dense_rows<K, NT>(part, dense, ScaledRows<K>{FewRows<K>(rows), scale, factor}, store);
}

template <Kind K, bool kPairs, int NT = 1>
void run(Context& c, const char* what, const Part& part, const Packed& w, const StepRows& x,
         const StepOutput& out) {
    launch_reading(c, {part.data, weight_bytes(part, w.chunks)}, what, norm_rows_kernel<K, kPairs, NT>,
                   min(c.sms, dense_groups(K, part.tiles, w.chunks)), kThreads,
                   dense_shared_bytes(K, dense_is_deep(c), x.rows, w.chunks), part,
                   DenseLaunch{w.chunks, x.rows}, RowsOfX{x.x, x.ld, w.cols, x.rows}, out.scale,
                   StoreNormed<kPairs>{out.y, static_cast<int>(out.ld), out.f32, nullptr});
}
template <Kind K>
void run(Context& c, const char* what, const Part& part, const Packed& w, const StepRows& x,
         const StepOutput& out) {
    if constexpr (K == Kind::bf16)
        if (x.rows > kPassRows && !out.paired) return run<K, false, 2>(c, what, part, w, x, out);
    if (x.rows > kPassRows) unsupported(what, "so many rows");
    out.paired ? run<K, true>(c, what, part, w, x, out) : run<K, false>(c, what, part, w, x, out);
}

}  // namespace

void norm_rows(Context& c, const char* what, const Part& part, const Packed& w, const StepRows& x,
               const StepOutput& out) {
    if (part.kind == Kind::bf16) return run<Kind::bf16>(c, what, part, w, x, out);
    if (part.kind == Kind::fp8) return run<Kind::fp8>(c, what, part, w, x, out);
    run<Kind::nvfp4>(c, what, part, w, x, out);
}

}  // namespace quern::cuda::linear
