#include "ggml-like/ops/linear_add.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    cpu::linear(*node.inputs[0], *node.params<LinearAddParams>().weight, node.inputs[1], *node.outputs[0],
                context);
}

Cost cost(const Node& node) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<LinearAddParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()),
            .activation_bytes = cpu::dense_bytes(x) + 2 * cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(x.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kLinearAdd{"linear_add", run, cost};

Tensor* linear_add(Graph& g, std::string_view name, Tensor* x, const Weight& w, Tensor* residual) {
    CHECK(x->rank == 2 && x->shape[1] == w.cols && x->stride[1] == 1,
          "[linear_add] {}: weight {} [{}, {}] does not fit x {}", name, w.name, w.rows, w.cols,
          describe(*x));
    CHECK(residual->rank == 2 && residual->dtype == DType::F32 && residual->contiguous() &&
              residual->shape[0] == x->shape[0] && residual->shape[1] == w.rows,
          "[linear_add] {}: residual {} should be F32 [{}, {}]", name, describe(*residual), x->shape[0],
          w.rows);
    cpu::check_weight("linear_add", name, w);
    Tensor* y = g.scratch(name, DType::F32, {x->shape[0], w.rows});
    g.add({.op = &kLinearAdd,
           .name = std::string(name),
           .inputs = {x, residual},
           .outputs = {y},
           .parameters = LinearAddParams{&w}});
    return y;
}

}  // namespace quern
