// linear_bias on the GPU: the tiled product of prompts (cuda/linear/gemm.h), which adds `add`, then bias and function in
// place: a thread eight neighbours. The sums of a BF16 result are rounded twice. Bound of the second kernel: memory.
#include "ggml-like/ops/linear_bias.h"

#include "ggml-like/cuda/launch.cuh"
#include "ggml-like/cuda/linear/gemm.h"
#include "ggml-like/cuda/vision_ops.h"

namespace quern::cuda {

using namespace ptx;
using namespace pack;
using namespace linear;

namespace {

constexpr int kBlock = 256, kEach = 8;

__device__ __forceinline__ float function_of(Activation activation, float v) {
    if (activation == Activation::gelu_tanh) {  // tanh(u) = 1 - 2 / (1 + exp(2u))
        const float u = 0.7978845608028654f * (v + 0.044715f * v * v * v);
        return v * (1.0f - __fdividef(1.0f, 1.0f + __expf(2.0f * u)));
    }
    return activation == Activation::gelu_erf ? 0.5f * v * (1.0f + erff(v * 0.7071067811865475f)) : v;
}

__device__ __forceinline__ void load(const float* from, float (&v)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
        *reinterpret_cast<float4*>(v + i) = *reinterpret_cast<const float4*>(from + i);
}
__device__ __forceinline__ void load(const bf16* from, float (&v)[kEach]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i)
        v[2 * i] = __uint_as_float(words[i] << 16), v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
}
__device__ __forceinline__ void store(float* to, const float (&v)[kEach]) {
#pragma unroll
    for (int i = 0; i < kEach; i += 4)
        *reinterpret_cast<float4*>(to + i) = *reinterpret_cast<const float4*>(v + i);
}
__device__ __forceinline__ void store(bf16* to, const float (&v)[kEach]) {
    *reinterpret_cast<uint4*>(to) = {pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                                     pack_bf16(v[6], v[7])};
}

template <typename T>
__global__ void __launch_bounds__(kBlock)
    add_bias_kernel(T* y, const float* bias, int64_t groups, int groups_a_row, Activation activation) {
    allow_successor();
    wait_for_predecessor();
    const int64_t group = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
    if (group >= groups) return;
    float v[kEach], b[kEach];
    load(bias + group % groups_a_row * kEach, b);
    load(y + group * kEach, v);
#pragma unroll
    for (int i = 0; i < kEach; ++i) v[i] = function_of(activation, v[i] + b[i]);
    store(y + group * kEach, v);
}

template <typename T>
void add_bias(Context& c, const Tensor& y, const Tensor& bias, Activation activation) {
    const int64_t groups = y.elements() / kEach;
    launch(c, "linear_bias bias", add_bias_kernel<T>, static_cast<unsigned>((groups + kBlock - 1) / kBlock),
           kBlock, 0, y.as<T>(), bias.as<const float>(), groups, static_cast<int>(y.shape[1] / kEach),
           activation);
}

}  // namespace

void linear_bias(const Node& node, Context& c) {
    const auto& p = node.params<LinearBiasParams>();
    const Tensor &x = *node.inputs[0], &bias = *node.inputs[1], &y = *node.outputs[0];
    const Tensor* add = node.inputs.size() > 2 ? node.inputs[2] : nullptr;
    const bool f32 = y.dtype == DType::F32;
    if (x.dtype != DType::BF16 || (!f32 && y.dtype != DType::BF16))
        unsupported("linear_bias", "activations other than BF16");
    if (x.shape[1] % kEach != 0 || y.shape[1] % kEach != 0)
        unsupported("linear_bias", "widths that are no multiples of 8");
    if (add != nullptr && (!f32 || p.activation != Activation::none))
        unsupported("linear_bias", "a sum with a function of the product");
    gemm(c, *static_cast<const Packed*>(p.weight->placed), x.data, x.stride[0], static_cast<int>(x.shape[0]),
         {.y = y.data,
          .ld = y.stride[0],
          .f32 = f32,
          .residual = add != nullptr ? add->as<const float>() : nullptr,
          .residual_ld = add != nullptr ? add->stride[0] : 0},
         Split::never);
    f32 ? add_bias<float>(c, y, bias, p.activation) : add_bias<bf16>(c, y, bias, p.activation);
}

}  // namespace quern::cuda
