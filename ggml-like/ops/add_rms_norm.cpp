#include "ggml-like/ops/add_rms_norm.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &delta = *node.inputs[1], &w = *node.inputs[2];
    const Tensor &sum = *node.outputs[0], &y = *node.outputs[1];
    const float eps = node.params<AddRmsNormParams>().eps;
    const int64_t width = x.shape[1];
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width)), other(row.size());
        for (int64_t t = begin; t < end; ++t) {
            load_floats(x, t * x.stride[0], width, row.data());
            load_floats(delta, t * delta.stride[0], width, other.data());
            for (size_t i = 0; i < row.size(); ++i) row[i] += other[i];
            store_floats(sum, t * sum.stride[0], width, row.data());
            load_floats(sum, t * sum.stride[0], width, row.data());  // the norm sees the rounded sum
            const float r = cpu::inverse_rms(row.data(), width, eps);
            for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)] *= r * w.as<float>()[i];
            store_floats(y, t * y.stride[0], width, row.data());
        }
    });
}

Cost cost(const Node& node) {
    const Tensor& x = *node.inputs[0];
    return {.weight_bytes = cpu::dense_bytes(*node.inputs[2]),
            .activation_bytes = 2 * cpu::dense_bytes(x) + 2 * cpu::dense_bytes(*node.inputs[1]),
            .flops = 5.0 * static_cast<double>(x.elements())};
}

}  // namespace

const Op kAddRmsNorm{"add_rms_norm", run, cost};

AddRmsNormResult add_rms_norm(Graph& g, std::string_view name, Tensor* x, Tensor* delta, Tensor* w,
                              float eps) {
    CHECK(
        x->rank == 2 && delta->rank == 2 && delta->shape[0] == x->shape[0] && delta->shape[1] == x->shape[1],
        "[add_rms_norm] {}: delta {} does not fit x {}", name, describe(*delta), describe(*x));
    CHECK(w->rank == 1 && w->dtype == DType::F32 && w->shape[0] == x->shape[1],
          "[add_rms_norm] {}: weight {} does not fit x {}", name, describe(*w), describe(*x));
    Tensor* sum = g.scratch(fmt::format("{}.sum", name), x->dtype, {x->shape[0], x->shape[1]});
    Tensor* y = g.scratch(name, delta->dtype, {x->shape[0], x->shape[1]});
    g.add({.op = &kAddRmsNorm,
           .name = std::string(name),
           .inputs = {x, delta, w},
           .outputs = {sum, y},
           .parameters = AddRmsNormParams{eps}});
    return {sum, y};
}

}  // namespace quern
