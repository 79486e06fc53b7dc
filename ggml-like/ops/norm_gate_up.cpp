#include "ggml-like/ops/norm_gate_up.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/gate_up.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const auto& p = node.params<NormGateUpParams>();
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &y = *node.outputs[0];
    if (y.shape[0] == 0) return;
    cpu::GateUp pair{p.weight, {}, {}, &y, {}};
    pair.x =
        cpu::activation_rows(h, h.shape[0], h.shape[1], h.stride[0], cpu::has_nvfp4(*p.weight), context, 0);
    for (int64_t t = 0; t < y.shape[0]; ++t) {
        pair.factor.push_back(cpu::norm_factor(squares, t, h.shape[1], p.eps));
        pair.to.push_back(t * y.stride[0]);
    }
    cpu::gate_up({pair}, context);
}

Cost cost(const Node& node) {
    const Tensor &h = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<NormGateUpParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()),
            .activation_bytes = cpu::dense_bytes(h) + cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(h.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kNormGateUp{"norm_gate_up", run, cost};

Tensor* norm_gate_up(Graph& g, std::string_view name, const Residual& in, const Weight& w, float eps,
                     StepKind kind) {
    check_normed("norm_gate_up", name, in, w.cols);
    CHECK(w.segments.size() == 2 && w.segments[0].rows == w.segments[1].rows,
          "[norm_gate_up] {}: weight {} should be gate and up of the same height", name, w.name);
    cpu::check_weight("norm_gate_up", name, w);
    Tensor* y = g.scratch(name, in.h->dtype, {in.h->shape[0], w.rows / 2});
    g.add({.op = &kNormGateUp,
           .name = std::string(name),
           .inputs = {in.h, in.squares},
           .outputs = {y},
           .parameters = NormGateUpParams{&w, eps, kind}});
    return y;
}

}  // namespace quern
