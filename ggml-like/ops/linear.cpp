#include "ggml-like/ops/linear.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {

void cpu::linear_rows(const Tensor& x, const Weight& w, float* y, int64_t ldy, Context& context) {
    const int64_t tokens = x.shape[0];
    if (tokens == 0) return;
    const ActivationRows rows = activation_rows(x, tokens, w.cols, x.stride[0], has_nvfp4(w), context, 0);
    const int64_t grain = rows_per_piece(w.rows, w.bytes() / std::max<int64_t>(w.rows, 1), w.cols * tokens,
                                         context.pool.size());
    context.pool.parallel_for(w.rows, grain, [&](int64_t begin, int64_t end, int) {
        std::vector<float*> to;
        for (int64_t t = 0; t < tokens; ++t) to.push_back(y + t * ldy + begin);
        weight_rows(context.dot, w, begin, end, rows, to.data());
    });
}

namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<LinearParams>().weight;
    if (y.dtype == DType::F32) return cpu::linear_rows(x, w, y.as<float>(), y.stride[0], context);
    float* sums = context.buffer(2, x.shape[0] * w.rows);
    cpu::linear_rows(x, w, sums, w.rows, context);
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) store_floats(y, t * y.stride[0], w.rows, sums + t * w.rows);
    });
}

Cost cost(const Node& node) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const Weight& w = *node.params<LinearParams>().weight;
    return {.weight_bytes = static_cast<double>(w.bytes()),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(y),
            .flops = 2.0 * static_cast<double>(x.shape[0] * w.rows * w.cols)};
}

}  // namespace

const Op kLinear{"linear", run, cost};

Tensor* linear(Graph& g, std::string_view name, Tensor* x, const Weight& w, DType dtype) {
    CHECK(x->rank == 2 && x->shape[1] == w.cols && x->stride[1] == 1,
          "[linear] {}: weight {} [{}, {}] does not fit x {}", name, w.name, w.rows, w.cols, describe(*x));
    cpu::check_weight("linear", name, w);
    Tensor* y = g.scratch(name, dtype, {x->shape[0], w.rows});
    g.add({.op = &kLinear,
           .name = std::string(name),
           .inputs = {x},
           .outputs = {y},
           .parameters = LinearParams{&w}});
    return y;
}

}  // namespace quern
