#include "ggml-like/ops/all_reduce.h"

#include "ggml-like/check.h"
#include "ggml-like/communicator.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    CHECK(context.communicator != nullptr, "[all_reduce] {}: this backend is no rank of several", node.name);
    const Tensor& x = *node.inputs[0];
    context.communicator->all_reduce(context.rank, x.as<float>(), node.outputs[0]->as<float>(), x.elements());
}

Cost cost(const Node& node) { return {.activation_bytes = 2 * cpu::dense_bytes(*node.inputs[0])}; }

}  // namespace

const Op kAllReduce{"all_reduce", run, cost};

Tensor* all_reduce(Graph& g, std::string_view name, Tensor* x) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous(),
          "[all_reduce] {}: {} should be F32 [T, D]", name, describe(*x));
    Tensor* y = g.scratch(name, DType::F32, {x->shape[0], x->shape[1]});
    g.add({.op = &kAllReduce, .name = std::string(name), .inputs = {x}, .outputs = {y}});
    return y;
}

}  // namespace quern
