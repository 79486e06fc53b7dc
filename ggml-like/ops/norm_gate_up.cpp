#include "ggml-like/ops/norm_gate_up.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/gate_up.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const auto& p = node.params<NormGateUpParams>();
    const Tensor &y = *node.outputs[0], &h = *node.outputs[1];
    if (y.shape[0] == 0) return;
    cpu::rms_norm(*node.inputs[0], *node.inputs[1], p.eps, h, context);
    cpu::GateUp pair{p.weight, {}, &y, {}};
    pair.x =
        cpu::activation_rows(h, h.shape[0], h.shape[1], h.stride[0], cpu::has_nvfp4(*p.weight), context, 0);
    for (int64_t t = 0; t < y.shape[0]; ++t) pair.to.push_back(t * y.stride[0]);
    cpu::gate_up({pair}, context);
}

Cost cost(const Node& node) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<NormGateUpParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()) + cpu::dense_bytes(*node.inputs[1]),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(x.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kNormGateUp{"norm_gate_up", run, cost};

Tensor* norm_gate_up(Graph& g, std::string_view name, Tensor* x, Tensor* norm, const Weight& w, float eps,
                     DType activation) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous() && x->shape[1] == w.cols,
          "[norm_gate_up] {}: weight {} [{}, {}] does not fit x {}", name, w.name, w.rows, w.cols,
          describe(*x));
    CHECK(norm->rank == 1 && norm->dtype == DType::F32 && norm->shape[0] == w.cols,
          "[norm_gate_up] {}: norm {} does not fit x {}", name, describe(*norm), describe(*x));
    CHECK(w.segments.size() == 2 && w.segments[0].rows == w.segments[1].rows,
          "[norm_gate_up] {}: weight {} should be gate and up of the same height", name, w.name);
    cpu::check_weight("norm_gate_up", name, w);
    Tensor* y = g.scratch(name, activation, {x->shape[0], w.rows / 2});
    Tensor* h = g.scratch(fmt::format("{}.h", name), activation, {x->shape[0], w.cols});
    g.add({.op = &kNormGateUp,
           .name = std::string(name),
           .inputs = {x, norm},
           .outputs = {y, h},
           .parameters = NormGateUpParams{&w, eps}});
    return y;
}

}  // namespace quern
