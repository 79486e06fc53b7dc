#include "ggml-like/ops/rms_norm.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &w = *node.inputs[1], &y = *node.outputs[0];
    const float eps = node.params<RmsNormParams>().eps;
    const int64_t width = x.shape[1];
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width));
        for (int64_t t = begin; t < end; ++t) {
            load_floats(x, t * x.stride[0], width, row.data());
            const float r = cpu::inverse_rms(row.data(), width, eps);
            for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)] *= r * w.as<float>()[i];
            store_floats(y, t * y.stride[0], width, row.data());
        }
    });
}

Cost cost(const Node& node) {
    const Tensor& x = *node.inputs[0];
    return {.weight_bytes = cpu::dense_bytes(*node.inputs[1]),
            .activation_bytes = 2 * cpu::dense_bytes(x),
            .flops = 4.0 * static_cast<double>(x.elements())};
}

}  // namespace

const Op kRmsNorm{"rms_norm", run, cost};

Tensor* rms_norm(Graph& g, std::string_view name, Tensor* x, Tensor* w, float eps) {
    CHECK(x->rank == 2 && w->rank == 1 && w->dtype == DType::F32 && w->shape[0] == x->shape[1],
          "[rms_norm] {}: weight {} does not fit x {}", name, describe(*w), describe(*x));
    Tensor* y = g.scratch(name, x->dtype, {x->shape[0], x->shape[1]});
    g.add({.op = &kRmsNorm,
           .name = std::string(name),
           .inputs = {x, w},
           .outputs = {y},
           .parameters = RmsNormParams{eps}});
    return y;
}

}  // namespace quern
