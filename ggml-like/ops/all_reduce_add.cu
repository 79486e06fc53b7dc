// all_reduce_add on the GPU: the sum over ranks (cuda/comm), x' = residual + sum, h and squares of it
// (cuda/linear/epilogue.cuh), then a router's logits.
//   answers: four lanes for 16 columns. Messages that fit packets are added up in the same kernel:
//
//     thread  y, 4 columns -> 2 packets to every rank | poll theirs, add in order | + residual -> x', h, squares
//
//     The logits are those of cuda/moe/route_logits.h
//   prompts: added up in the same kernel (cuda/comm/chunks.cuh), a block a row; the logits' product is that of linear_add
//
// Traffic: y and the residual once, x' and h once. Bound: answers by the launch and one way over the link, prompts by the link.
#include "ggml-like/ops/all_reduce_add.h"

#include "ggml-like/cuda/comm/all_reduce.h"
#include "ggml-like/cuda/comm/packets.cuh"
#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/epilogue.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/linear/rank_rows.cuh"
#include "ggml-like/cuda/moe/route_logits.h"
#include "ggml-like/cuda/ops.h"
#include "ggml-like/cuda/parts_of_ranks.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;
using namespace moe;

namespace {

constexpr int kAnswerThreads = 128, kPromptThreads = 512;

struct Add {
    const float *y, *residual;
    float* x;
    Defer defer;

    /// Four columns from number `at` on, all rows counted: x'.
    __device__ __forceinline__ float4 store(int64_t at, const float4& b) const {
        const float4 a = __ldcg(reinterpret_cast<const float4*>(residual + at));
        const float4 v = make_float4(add_residual(a.x, b.x), add_residual(a.y, b.y), add_residual(a.z, b.z),
                                     add_residual(a.w, b.w));
        *reinterpret_cast<float4*>(x + at) = v;
        return v;
    }
    __device__ __forceinline__ float4 part(int64_t at) const {
        return __ldcg(reinterpret_cast<const float4*>(y + at));
    }
    __device__ __forceinline__ float4 norm(int column) const {
        return *reinterpret_cast<const float4*>(defer.norm + column);
    }
};

/// Of the row and column of number `at`: h and squares too.
__device__ __forceinline__ void finish(const Add& a, int64_t at, const float4& sum) {
    const int columns = a.defer.columns, n = static_cast<int>(at / columns),
              column = static_cast<int>(at % columns);
    const float4 norm = a.norm(column);
    defer_four(a.defer, n, column, a.store(at, sum), norm);
}

/// One rank, or a sum that has been made before.
__global__ void __launch_bounds__(kAnswerThreads) add_answer(Add a, int64_t count) {
    allow_successor();
    wait_for_predecessor();
    const int64_t at = 4 * (static_cast<int64_t>(blockIdx.x) * kAnswerThreads + threadIdx.x);
    if (at < count) finish(a, at, a.part(at));
}

__global__ void __launch_bounds__(comm::kSmallThreads)
    add_answer_of_ranks(const __grid_constant__ comm::Peers p, Add a, int64_t count) {
    allow_successor();
    wait_for_predecessor();
    comm::Packets packets(p);
    for (int64_t i = packets.first(); 4 * i < count; i += packets.kStep) packets.send(i, a.part(4 * i));
    for (int64_t i = packets.first(); 4 * i < count; i += packets.kStep)
        finish(a, 4 * i, packets.sum(i, a.part(4 * i)));
    packets.end();
}

__global__ void __launch_bounds__(kPromptThreads) add_prompt(Add a) {
    allow_successor();
    wait_for_predecessor();
    const int64_t n = blockIdx.x;
    float sum = 0;
    for (int column = threadIdx.x * 4; column < a.defer.columns; column += kPromptThreads * 4) {
        const int64_t at = n * a.defer.columns + column;
        const float4 v = a.store(at, a.part(at)), norm = a.norm(column);
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        *reinterpret_cast<uint2*>(a.defer.h + at) =
            make_uint2(pack_bf16(v.x * norm.x, v.y * norm.y), pack_bf16(v.z * norm.z, v.w * norm.w));
    }
    write_squares<kPromptThreads>(a.defer, n, sum);
}

/// y: float or bf16, [rows, columns].
template <typename T, bool kWhole>
struct PartRows : RankRows<kWhole> {
    const T* y;

    __device__ __forceinline__ uint2 part(int64_t row, int column) const {
        const T* from = y + this->at(row, column);
        if constexpr (sizeof(T) == 2)
            return __ldcg(reinterpret_cast<const uint2*>(from));
        else
            return this->round(__ldcg(reinterpret_cast<const float4*>(from)));
    }
};

template <typename T, bool kWhole>
__global__ void __launch_bounds__(kRankRowThreads, 1)
    add_prompt_of_ranks(const __grid_constant__ comm::Peers p, PartRows<T, kWhole> rows,
                        const __grid_constant__ comm::Cut cut) {
    allow_successor();
    wait_for_predecessor();
    comm::Chunks<PartRows<T, kWhole>>(p, cut, rows).run();
}

template <bool kWhole, typename T>
void prompt_of_ranks(Context& c, const T* y, const float* residual, float* x, const Defer& defer,
                     int64_t count) {
    const comm::Cut cut = cut_rows<kWhole>(c, defer.columns, count);
    launch(c, "all_reduce_add prompt", add_prompt_of_ranks<T, kWhole>, static_cast<unsigned>(cut.blocks),
           kRankRowThreads, 0, *c.peers, PartRows<T, kWhole>{{residual, x, defer}, y}, cut);
}

void answer(Context& c, Add add, int64_t count) {
    if (c.peers != nullptr && comm::fits_packets(count))
        return launch(c, "all_reduce_add answer", add_answer_of_ranks, comm::packet_blocks(count),
                      comm::kSmallThreads, 0, *c.peers, add, count);
    if (c.peers != nullptr) {
        comm::all_reduce(c, add.y, add.x, count);
        add.y = add.x;
    }
    const int64_t blocks = (count / 4 + kAnswerThreads - 1) / kAnswerThreads;
    launch(c, "add answer", add_answer, static_cast<unsigned>(blocks), kAnswerThreads, 0, add, count);
}

void prompt(Context& c, const Add& add, int64_t count) {
    if (c.peers != nullptr) return prompt_of_ranks<true>(c, add.y, add.residual, add.x, add.defer, count);
    launch(c, "add prompt", add_prompt, static_cast<unsigned>(count / add.defer.columns), kPromptThreads, 0,
           add);
}

void add_logits(const Node& node, Context& c, const Defer& defer, int rows) {
    const auto& p = node.params<AllReduceAddParams>();
    const Packed& router = *static_cast<const Packed*>(p.router->placed);
    const Tensor& logits = *node.outputs[3];
    if (p.kind == StepKind::answer)
        route_logits(c, router, defer.h, rows, logits.as<int64_t>(), static_cast<int>(logits.stride[0]));
    else
        gemm(c, router, defer.h, defer.columns, rows, {.y = logits.data, .ld = logits.stride[0], .f32 = true},
             Split::by_matrix);
}

}  // namespace

void add_parts_of_answer(Context& c, const float* y, const float* residual, float* x, const Defer& defer,
                         int64_t count) {
    answer(c, {y, residual, x, defer}, count);
}

void add_parts_of_prompt(Context& c, const float* residual, float* x, const Defer& defer, int64_t count,
                         bool whole) {
    whole ? prompt_of_ranks<true>(c, defer.h, residual, x, defer, count)
          : prompt_of_ranks<false>(c, defer.h, residual, x, defer, count);
}

void all_reduce_add(const Node& node, Context& c) {
    const Tensor &y = *node.inputs[0], &residual = *node.inputs[1], &x = *node.outputs[0];
    const auto& p = node.params<AllReduceAddParams>();
    const Defer defer = defer_of(*node.inputs[2], *node.outputs[1], *node.outputs[2]);
    const Add add{y.as<float>(), residual.as<float>(), x.as<float>(), defer};
    p.kind == StepKind::answer ? answer(c, add, x.elements()) : prompt(c, add, x.elements());
    if (p.router != nullptr) add_logits(node, c, defer, static_cast<int>(x.shape[0]));
}

}  // namespace quern::cuda
