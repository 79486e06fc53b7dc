// moe_down with NVFP4 weights and 9 to 64 answer rows: the stream (fp4_stream.cuh) writes terms F32 [rows, used + 1,
// D], a second kernel adds each row's in order and does the next norm's part. Of prompt steps of up to 64 rows the same
// stream writes terms in BF16, summed as gemm.h does; ops/moe_down.cu adds these.
//
//   down_fp4_terms   fp4_stream.cuh has tiles and shared memory; weights first, rows after the wait for gate and up
//   down_fp4_sum     a thread 4 columns of one row; no shared memory. Of ranks: the blocks of comm/packets.cuh, which add up over them
//
// Measured with 64 rows: the terms 44 us for 133 MB (ncu), the op 51.7 us with launch gaps (H200, 2026-11).
#include "ggml-like/cuda/comm/packets.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/moe/down_fp4.cuh"
#include "ggml-like/cuda/moe/fp4_stream.cuh"

namespace quern::cuda::moe {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

/// A Work of stream_groups. kOfPrompt: terms of a prompt step.
template <bool kOfPrompt>
struct DownWork {
    const Down& a;
    // Where kernels begin early, blocks begin as gate and up's leave, in the order of their numbers.
#if __CUDA_ARCH__ >= 900
    static constexpr bool kLate = true;
#else
    static constexpr bool kLate = false;
#endif
    static constexpr bool kPrompt = kOfPrompt;
    static constexpr bool kRowsFirst = false;
    static constexpr bool kRowsAtPlaces = kPrompt, kTargetsAtPlaces = false;

    __device__ __forceinline__ void before_rows() const {
        wait_for_predecessor();
        allow_successor();
    }
    __device__ __forceinline__ const bf16* row(bool is_shared, int index) const {
        return (is_shared ? a.shared_in : a.routed) + static_cast<int64_t>(index) * width(is_shared);
    }
    __device__ __forceinline__ int width(bool is_shared) const {
        return is_shared ? a.shared_width : a.width;
    }
    __device__ __forceinline__ float weight(bool is_shared, int index) const {
        return __ldcg((is_shared ? a.shared_gate : a.weights) + index);
    }
    struct Target {
        int64_t term;  // its first element
        float weight;
    };
    __device__ __forceinline__ Target target(bool is_shared, int index, float weight) const {
        const int term = is_shared ? index * (a.used + 1) + a.used : index + quotient(index, a.used);
        return {static_cast<int64_t>(term) * a.experts.rows, weight};
    }
    __device__ __forceinline__ void store(const Target& target, int tile, int r, float low, float high,
                                          float low_factor, float high_factor) const {
        const int at = tile * kTileRows + r;
        store_one(target, at, low, low_factor);
        store_one(target, at + 8, high, high_factor);
    }

  private:
    __device__ __forceinline__ void store_one(const Target& target, int at, float sum, float factor) const {
        if (at >= a.experts.rows) return;
        if constexpr (kPrompt)
            static_cast<bf16*>(a.terms)[target.term + at] =
                __float2bfloat16_rn(sum * (factor * kRowLift<Kind::nvfp4>));
        else
            static_cast<float*>(a.terms)[target.term + at] = factor * target.weight * sum;
    }
};

template <int kEach, bool kPrompt>
__global__ void __launch_bounds__(kThreads, 1) down_fp4_terms(Down a, Stream s) {
    extern __shared__ __align__(128) uint8_t shared[];
    __shared__ StreamShared k;
    if constexpr (!kPrompt) bring_near(a), bring_near(s), wait_for_choice(a);
    list_groups(k.list, a.groups, a.experts.count, a.rows * a.used, a.rows);
    stream_groups<kEach>(DownWork<kPrompt>{a}, s, k, shared);
}

constexpr int kSumThreads = 256;

/// sum += the terms of four columns of row n, from `column` on.
__device__ __forceinline__ void add_four_terms(const Down& a, int n, int column, float4& sum) {
    const int columns = a.experts.rows;
    const float* terms =
        static_cast<const float*>(a.terms) + static_cast<int64_t>(n) * (a.used + 1) * columns + column;
#pragma unroll 9
    for (int j = 0; j <= a.used; ++j) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(terms + static_cast<int64_t>(j) * columns));
        sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
}

/// A thread 4 columns of a row: y, h and squares.
__global__ void __launch_bounds__(kSumThreads) down_fp4_sum(Down a) {
    const int n = blockIdx.x, columns = a.experts.rows, column = (blockIdx.y * kSumThreads + threadIdx.x) * 4;
    bring_near(a);
    wait_for_predecessor();
    allow_successor();
    if (column >= columns) return;
    float4 sum = __ldcg(reinterpret_cast<const float4*>(a.residual + n * a.ld + column));
    add_four_terms(a, n, column, sum);
    *reinterpret_cast<float4*>(a.y + n * a.ld + column) = sum;
    defer_four(a.next, n, column, sum, *reinterpret_cast<const float4*>(a.next.norm + column));
}

/// The same of the sums over ranks; y is contiguous.
__global__ void __launch_bounds__(comm::kSmallThreads)
    down_fp4_sum_of_ranks(Down a, const __grid_constant__ comm::Peers peers) {
    constexpr int kEach = (2 * comm::kSmallPairs + 4 * comm::Packets::kStep - 1) / (4 * comm::Packets::kStep);
    const int columns = a.experts.rows, fours = a.rows * columns / 4;
    allow_successor();
    wait_for_predecessor();
    comm::Packets packets(peers);
    float4 part[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int i = static_cast<int>(comm::Packets::first() + j * comm::Packets::kStep);
        if (i >= fours) break;
        part[j] = make_float4(0, 0, 0, 0);
        add_four_terms(a, 4 * i / columns, 4 * i % columns, part[j]);
        packets.send(i, part[j]);
    }
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
        const int i = static_cast<int>(comm::Packets::first() + j * comm::Packets::kStep);
        if (i >= fours) break;
        const float4 before = __ldcg(reinterpret_cast<const float4*>(a.residual) + i);
        const float4 sum = packets.sum(i, part[j]);
        const float4 x = make_float4(add_residual(before.x, sum.x), add_residual(before.y, sum.y),
                                     add_residual(before.z, sum.z), add_residual(before.w, sum.w));
        reinterpret_cast<float4*>(a.y)[i] = x;
        const int n = 4 * i / columns, column = 4 * i % columns;
        defer_four(a.next, n, column, x, *reinterpret_cast<const float4*>(a.next.norm + column));
    }
    packets.end();
}

template <bool kPrompt>
void make_terms(Context& c, const Down& a) {
    StreamShape shape(a.experts.chunks, a.shared_chunks, kPrompt ? 0 : kDownEach);
    fit_stream(shape, c.shared_bytes - kStatic);  // it does: the step was chosen
    const Stream s(
        shape, {a.experts.data, a.experts.factor, a.experts.expert_bytes, a.experts.tiles, a.experts.chunks},
        {a.shared.data, a.shared.factor, 0, a.experts.tiles, a.shared_chunks});
    const auto kernel = s.whole ? down_fp4_terms<kDownEach, kPrompt> : down_fp4_terms<0, kPrompt>;
    launch(c, kPrompt ? "moe_down prompt stream" : "moe_down stream", kernel,
           min(c.sms, a.rows * (a.used + 1) * a.experts.tiles), kThreads, shape.bytes(), a, s);
}

}  // namespace

void launch_down_stream(Context& c, const Down& a, const comm::Peers* peers) {
    make_terms<false>(c, a);
    if (peers != nullptr)
        return launch(c, "add terms of ranks", down_fp4_sum_of_ranks,
                      comm::packet_blocks(int64_t{a.rows} * a.experts.rows), comm::kSmallThreads, 0, a,
                      *peers);
    const dim3 grid(a.rows, (a.experts.rows + 4 * kSumThreads - 1) / (4 * kSumThreads));
    launch(c, "add terms", down_fp4_sum, grid, kSumThreads, 0, a);
}

void down_fp4_prompt_terms(Context& c, const Down& a) { make_terms<true>(c, a); }

}  // namespace quern::cuda::moe
