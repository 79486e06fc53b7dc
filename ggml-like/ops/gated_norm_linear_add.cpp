#include "ggml-like/ops/gated_norm_linear_add.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const auto& p = node.params<GatedNormLinearAddParams>();
    const Tensor &y = *node.outputs[0], &h = *node.outputs[1];
    cpu::gated_rms_norm(*node.inputs[0], *node.inputs[1], *node.inputs[2], p.eps, h, context);
    cpu::linear(h, *p.weight, node.inputs[3], y, context);
}

Cost cost(const Node& node) {
    const Tensor &o = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<GatedNormLinearAddParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()),
            .activation_bytes = 2 * cpu::dense_bytes(o) + 2 * cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(o.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kGatedNormLinearAdd{"gated_norm_linear_add", run, cost};

Tensor* gated_norm_linear_add(Graph& g, std::string_view name, Tensor* o, Tensor* z, Tensor* norm, float eps,
                              const Weight& w, Tensor* residual) {
    CHECK(o->rank == 3 && o->contiguous() && z->rank == 3 && z->shape[0] == o->shape[0] && z->shape[1] == o->shape[1] &&
              z->shape[2] == o->shape[2] && z->stride[2] == 1 && z->stride[1] == o->shape[2],
          "[gated_norm_linear_add] {}: gate {} does not fit o {}", name, describe(*z), describe(*o));
    CHECK(norm->rank == 1 && norm->dtype == DType::F32 && norm->shape[0] == o->shape[2] &&
              w.cols == o->shape[1] * o->shape[2],
          "[gated_norm_linear_add] {}: norm {} or weight {} [{}, {}] does not fit o {}", name, describe(*norm), w.name,
          w.rows, w.cols, describe(*o));
    CHECK(residual->rank == 2 && residual->dtype == DType::F32 && residual->contiguous() &&
              residual->shape[0] == o->shape[0] && residual->shape[1] == w.rows,
          "[gated_norm_linear_add] {}: residual {} should be F32 [{}, {}]", name, describe(*residual), o->shape[0],
          w.rows);
    cpu::check_weight("gated_norm_linear_add", name, w);
    Tensor* y = g.scratch(name, DType::F32, {o->shape[0], w.rows});
    Tensor* h = g.scratch(fmt::format("{}.h", name), o->dtype, {o->shape[0], w.cols});
    g.add({.op = &kGatedNormLinearAdd,
           .name = std::string(name),
           .inputs = {o, z, norm, residual},
           .outputs = {y, h},
           .parameters = GatedNormLinearAddParams{&w, eps}});
    return y;
}

}  // namespace quern
