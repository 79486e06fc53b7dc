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
    const Tensor &y = *node.outputs[0], &h = *node.outputs[1];
    cpu::rms_norm(*node.inputs[0], *node.inputs[1], p.eps, h, context);
    cpu::linear(h, *p.weight, nullptr, y, context);
}

Cost cost(const Node& node) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<NormLinearParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()) + cpu::dense_bytes(*node.inputs[1]),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(x.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kNormLinear{"norm_linear", run, cost};

Tensor* norm_linear(Graph& g, std::string_view name, Tensor* x, Tensor* norm, const Weight& w, float eps,
                    DType activation, DType dtype) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous() && x->shape[1] == w.cols,
          "[norm_linear] {}: weight {} [{}, {}] does not fit x {}", name, w.name, w.rows, w.cols,
          describe(*x));
    CHECK(norm->rank == 1 && norm->dtype == DType::F32 && norm->shape[0] == w.cols,
          "[norm_linear] {}: norm {} does not fit x {}", name, describe(*norm), describe(*x));
    cpu::check_weight("norm_linear", name, w);
    Tensor* y = g.scratch(name, dtype, {x->shape[0], w.rows});
    Tensor* h = g.scratch(fmt::format("{}.h", name), activation, {x->shape[0], w.cols});
    g.write_ahead(x, h);
    g.add({.op = &kNormLinear,
           .name = std::string(name),
           .inputs = {x, norm},
           .outputs = {y, h},
           .parameters = NormLinearParams{&w, eps}});
    return y;
}

}  // namespace quern
