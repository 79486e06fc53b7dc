#include "ggml-like/ops/linear_add.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/cpu/rank_sums.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &residual = *node.inputs[1], &norm = *node.inputs[2];
    const Tensor &x = *node.outputs[0], &h = *node.outputs[1], &squares = *node.outputs[2];
    const auto& p = node.params<LinearAddParams>();
    if (p.sums != Sums::none) {
        float* part = context.buffer(3, x.elements());
        cpu::linear_rows(*node.inputs[0], *p.weight, part, x.shape[1], context);
        cpu::add_over_ranks(part, residual, norm, x, h, squares, context);
    } else {
        cpu::linear(*node.inputs[0], *p.weight, context, [&](int64_t t, float* row) {
            float* to = x.row<float>(t);
            for (int64_t i = 0; i < x.shape[1]; ++i) to[i] = residual.row<float>(t)[i] + row[i];
            cpu::defer_norm(to, norm, h, squares, t);
        });
    }
    if (p.router == nullptr) return;
    const Tensor& logits = *node.outputs[3];
    CHECK(logits.dtype == DType::F32, "[linear_add] {}: the CPU makes logits in F32, not {}", node.name,
          dtype_name(logits.dtype));
    cpu::linear_rows(h, *p.router, logits.as<float>(), logits.stride[0], context);
}

Cost cost(const Node& node) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const auto& p = node.params<LinearAddParams>();
    Cost cost{.weight_bytes = static_cast<double>(p.weight->bytes()),
              .activation_bytes =
                  cpu::dense_bytes(x) + 2 * cpu::dense_bytes(y) + cpu::dense_bytes(*node.outputs[1]),
              .flops = 2.0 * static_cast<double>(x.shape[0] * p.weight->rows * p.weight->cols)};
    if (p.router == nullptr) return cost;
    cost.weight_bytes += static_cast<double>(p.router->bytes());
    cost.flops += 2.0 * static_cast<double>(x.shape[0] * p.router->rows * p.router->cols);
    return cost;
}

}  // namespace

const Op kLinearAdd{"linear_add", run, cost};

Tensor* no_residual(Graph& g, std::string_view name, int64_t tokens, int64_t width, StepKind kind) {
    if (kind == StepKind::answer) return g.zeros(name, DType::F32, {tokens, width});
    Tensor* row = g.zeros(fmt::format("{}.row", name), DType::F32, {1, width});
    return g.view(name, row, 0, {tokens, width}, {0, 1});
}

Residual linear_add(Graph& g, std::string_view name, Tensor* x, const Weight& w, Tensor* residual,
                    const NextNorm& next, const Weight* router, const OverRanks& ranks) {
    CHECK(x->rank == 2 && x->shape[1] == w.cols && x->stride[1] == 1,
          "[linear_add] {}: weight {} [{}, {}] does not fit x {}", name, w.name, w.rows, w.cols,
          describe(*x));
    const bool repeated = next.kind == StepKind::prompt && ranks.zeros == nullptr &&
                          residual->stride[0] == 0 && residual->stride[1] == 1;
    CHECK(residual->rank == 2 && residual->dtype == DType::F32 && (residual->contiguous() || repeated) &&
              residual->shape[0] == x->shape[0] && residual->shape[1] == w.rows,
          "[linear_add] {}: residual {} should be F32 [{}, {}]", name, describe(*residual), x->shape[0],
          w.rows);
    cpu::check_weight("linear_add", name, w);
    check_zeros("linear_add", name, ranks.zeros, *residual);
    const LinearAddParams parameters{&w, router, next.kind, ranks.sums()};
    Residual out =
        make_residual(g, "linear_add", name, x->shape[0], w.rows, next, squares_in_parts(parameters));
    Node node{.op = &kLinearAdd,
              .name = std::string(name),
              .inputs = {x, residual, next.weight},
              .outputs = {out.x, out.h, out.squares},
              .parameters = parameters};
    if (ranks.zeros != nullptr) node.inputs.push_back(ranks.zeros);
    if (router != nullptr) {
        CHECK(router->cols == w.rows, "[linear_add] {}: router [{}, {}] does not fit x' [T, {}]", name,
              router->rows, router->cols, w.rows);
        cpu::check_weight("linear_add", name, *router);
        node.outputs.push_back(out.logits = make_router_logits(g, name, x->shape[0], *router, next));
    }
    g.add(std::move(node));
    return out;
}

}  // namespace quern
