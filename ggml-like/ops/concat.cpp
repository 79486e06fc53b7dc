#include "ggml-like/ops/concat.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor& y = *node.outputs[0];
    context.pool.parallel_for(y.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            int64_t at = t * y.stride[0];
            for (const Tensor* x : node.inputs) {
                store_floats(y, at, x->shape[1], x->row<float>(t));
                at += x->shape[1];
            }
        }
    });
}

Cost cost(const Node& node) {
    double bytes = cpu::dense_bytes(*node.outputs[0]);
    for (const Tensor* x : node.inputs) bytes += cpu::dense_bytes(*x);
    return {.activation_bytes = bytes};
}

}  // namespace

const Op kConcat{"concat", run, cost};

Tensor* concat(Graph& g, std::string_view name, const std::vector<Tensor*>& x, DType dtype) {
    CHECK(!x.empty() && x.size() <= kMaxConcat, "[concat] {}: {} tensors; expected 1 to {}", name, x.size(),
          kMaxConcat);
    for (const Tensor* t : x)
        CHECK(t->rank == 2 && t->dtype == DType::F32 && t->contiguous() && t->shape[0] == x[0]->shape[0] &&
                  t->shape[1] == x[0]->shape[1],
              "[concat] {}: {} beside {}", name, describe(*t), describe(*x[0]));
    Tensor* y = g.scratch(name, dtype, {x[0]->shape[0], static_cast<int64_t>(x.size()) * x[0]->shape[1]});
    g.add({.op = &kConcat, .name = std::string(name), .inputs = x, .outputs = {y}});
    return y;
}

}  // namespace quern
