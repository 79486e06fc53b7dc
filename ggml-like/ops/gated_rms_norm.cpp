#include "ggml-like/ops/gated_rms_norm.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &z = *node.inputs[1], &w = *node.inputs[2], &y = *node.outputs[0];
    const float eps = node.params<GatedRmsNormParams>().eps;
    const int64_t heads = x.shape[1], width = x.shape[2];
    context.pool.parallel_for(x.shape[0], 4, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width)), gate(row.size());
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t h = 0; h < heads; ++h) {
                load_floats(x, t * x.stride[0] + h * x.stride[1], width, row.data());
                load_floats(z, t * z.stride[0] + h * z.stride[1], width, gate.data());
                const float r = cpu::inverse_rms(row.data(), width, eps);
                for (size_t i = 0; i < row.size(); ++i)
                    row[i] = row[i] * r * w.as<float>()[i] * cpu::silu(gate[i]);
                store_floats(y, t * y.stride[0] + h * width, width, row.data());
            }
        }
    });
}

Cost cost(const Node& node) {
    const Tensor& x = *node.inputs[0];
    return {.weight_bytes = cpu::dense_bytes(*node.inputs[2]),
            .activation_bytes = 3 * cpu::dense_bytes(x),
            .flops = 8.0 * static_cast<double>(x.elements())};
}

}  // namespace

const Op kGatedRmsNorm{"gated_rms_norm", run, cost};

Tensor* gated_rms_norm(Graph& g, std::string_view name, Tensor* x, Tensor* z, Tensor* w, float eps) {
    CHECK(x->rank == 3 && z->rank == 3 && z->shape[0] == x->shape[0] && z->shape[1] == x->shape[1] &&
              z->shape[2] == x->shape[2] && z->stride[2] == 1,
          "[gated_rms_norm] {}: gate {} does not fit x {}", name, describe(*z), describe(*x));
    CHECK(w->rank == 1 && w->dtype == DType::F32 && w->shape[0] == x->shape[2],
          "[gated_rms_norm] {}: weight {} does not fit x {}", name, describe(*w), describe(*x));
    Tensor* y = g.scratch(name, x->dtype, {x->shape[0], x->shape[1] * x->shape[2]});
    g.add({.op = &kGatedRmsNorm,
           .name = std::string(name),
           .inputs = {x, z, w},
           .outputs = {y},
           .parameters = GatedRmsNormParams{eps}});
    return y;
}

}  // namespace quern
