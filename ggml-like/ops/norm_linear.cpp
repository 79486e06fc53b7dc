#include "ggml-like/ops/norm_linear.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const auto& p = node.params<NormLinearParams>();
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &y = *node.outputs[0];
    const auto scale = [&](int64_t t, float* row) {
        const float factor = cpu::norm_factor(squares, t, h.shape[1], p.eps);
        for (int64_t i = 0; i < y.shape[1]; ++i) row[i] *= factor;
    };
    if (y.dtype == DType::F32) {
        cpu::linear_rows(h, *p.weight, y.as<float>(), y.stride[0], context);
        context.pool.parallel_for(y.shape[0], 1, [&](int64_t begin, int64_t end, int) {
            for (int64_t t = begin; t < end; ++t) scale(t, y.row<float>(t));
        });
        return;
    }
    cpu::linear(h, *p.weight, context, [&](int64_t t, float* row) {
        scale(t, row);
        store_floats(y, t * y.stride[0], y.shape[1], row);
    });
}

Cost cost(const Node& node) {
    const Tensor &h = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<NormLinearParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()),
            .activation_bytes = cpu::dense_bytes(h) + cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(h.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kNormLinear{"norm_linear", run, cost};

Tensor* norm_linear(Graph& g, std::string_view name, const Residual& in, const Weight& w, float eps,
                    StepKind kind, DType dtype) {
    check_normed("norm_linear", name, in, w.cols);
    cpu::check_weight("norm_linear", name, w);
    Tensor* y = g.scratch(name, dtype, {in.h->shape[0], w.rows});
    g.add({.op = &kNormLinear,
           .name = std::string(name),
           .inputs = {in.h, in.squares},
           .outputs = {y},
           .parameters = NormLinearParams{&w, eps, kind}});
    return y;
}

}  // namespace quern
