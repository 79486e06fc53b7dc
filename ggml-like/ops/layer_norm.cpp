#include "ggml-like/ops/layer_norm.h"

#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void norm_row(const float* x, const float* weight, const float* bias, int64_t width, float eps, float* y) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < width; ++i) sum += double{x[i]};
    const double mean = sum / static_cast<double>(width);
    for (int64_t i = 0; i < width; ++i) squares += (double{x[i]} - mean) * (double{x[i]} - mean);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + double{eps});
    for (int64_t i = 0; i < width; ++i)
        y[i] = static_cast<float>((double{x[i]} - mean) * factor) * weight[i] + bias[i];
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const float eps = node.params<LayerNormParams>().eps;
    const int64_t width = x.shape[1];
    context.pool.parallel_for(y.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width));
        for (int64_t t = begin; t < end; ++t) {
            norm_row(x.row<float>(t), node.inputs[1]->as<float>(), node.inputs[2]->as<float>(), width, eps,
                     row.data());
            store_floats(y, t * width, width, row.data());
        }
    });
}

Cost cost(const Node& node) {
    return {.activation_bytes = cpu::dense_bytes(*node.inputs[0]) + cpu::dense_bytes(*node.outputs[0])};
}

}  // namespace

const Op kLayerNorm{"layer_norm", run, cost};

Tensor* layer_norm(Graph& g, std::string_view name, Tensor* x, Tensor* weight, Tensor* bias, float eps,
                   DType activation) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous(), "[layer_norm] {}: x is {}", name,
          describe(*x));
    for (const Tensor* w : {weight, bias})
        CHECK(w->dtype == DType::F32 && w->elements() == x->shape[1], "[layer_norm] {}: {} of x {}", name,
              describe(*w), describe(*x));
    Tensor* y = g.scratch(name, activation, {x->shape[0], x->shape[1]});
    g.add({.op = &kLayerNorm,
           .name = std::string(name),
           .inputs = {x, weight, bias},
           .outputs = {y},
           .parameters = LayerNormParams{eps}});
    return y;
}

}  // namespace quern
