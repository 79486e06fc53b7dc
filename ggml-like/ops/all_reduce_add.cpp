#include "ggml-like/ops/all_reduce_add.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/cpu/rank_sums.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &y = *node.inputs[0], &residual = *node.inputs[1], &norm = *node.inputs[2];
    const Tensor &x = *node.outputs[0], &h = *node.outputs[1], &squares = *node.outputs[2];
    cpu::add_over_ranks(y.as<float>(), residual, norm, x, h, squares, context);
    const Weight* router = node.params<AllReduceAddParams>().router;
    if (router == nullptr) return;
    const Tensor& logits = *node.outputs[3];
    CHECK(logits.dtype == DType::F32, "[all_reduce_add] {}: the CPU makes logits in F32, not {}", node.name,
          dtype_name(logits.dtype));
    cpu::linear_rows(h, *router, logits.as<float>(), logits.stride[0], context);
}

Cost cost(const Node& node) {
    const Tensor& x = *node.outputs[0];
    const Weight* router = node.params<AllReduceAddParams>().router;
    Cost cost{.activation_bytes = 3 * cpu::dense_bytes(x) + cpu::dense_bytes(*node.outputs[1])};
    if (router == nullptr) return cost;
    cost.weight_bytes = static_cast<double>(router->bytes());
    cost.flops = 2.0 * static_cast<double>(x.shape[0] * router->rows * router->cols);
    return cost;
}

}  // namespace

const Op kAllReduceAdd{"all_reduce_add", run, cost};

Residual all_reduce_add(Graph& g, std::string_view name, Tensor* y, Tensor* residual, const NextNorm& next,
                        const Weight* router) {
    for (const Tensor* t : {y, residual})
        CHECK(t->rank == 2 && t->dtype == DType::F32 && t->contiguous() && t->shape[0] == y->shape[0] &&
                  t->shape[1] == y->shape[1],
              "[all_reduce_add] {}: {} should be F32 [{}, {}]", name, describe(*t), y->shape[0], y->shape[1]);
    Residual out = make_residual(g, "all_reduce_add", name, y->shape[0], y->shape[1], next);
    Node node{.op = &kAllReduceAdd,
              .name = std::string(name),
              .inputs = {y, residual, next.weight},
              .outputs = {out.x, out.h, out.squares},
              .parameters = AllReduceAddParams{router, next.kind}};
    if (router != nullptr) {
        CHECK(router->cols == y->shape[1], "[all_reduce_add] {}: router [{}, {}] does not fit x' [T, {}]",
              name, router->rows, router->cols, y->shape[1]);
        cpu::check_weight("all_reduce_add", name, *router);
        node.outputs.push_back(out.logits = make_router_logits(g, name, y->shape[0], *router, next));
    }
    g.add(std::move(node));
    return out;
}

}  // namespace quern
