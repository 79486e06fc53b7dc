#include "ggml-like/ops/moe_route.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/linear.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// The `used` highest logits, falling, ties to the lower id; NaN counts as lowest and may not be chosen.
void choose(const Node& node, const float* logits, int64_t experts, int used, int32_t* ids, float* weights) {
    float sum = 0;
    for (int j = 0; j < used; ++j) {
        int32_t best = -1;
        for (int32_t e = 0; e < experts; ++e) {
            const bool taken = std::find(ids, ids + j, e) != ids + j;
            if (!taken && std::isfinite(logits[e]) && (best < 0 || logits[e] > logits[best])) best = e;
        }
        CHECK(best >= 0, "[moe_route] {}: fewer than {} of {} router logits are finite", node.name, used,
              experts);
        ids[j] = best;
        weights[j] = std::exp(logits[best] - logits[ids[0]]);
        sum += weights[j];
    }
    for (int j = 0; j < used; ++j) weights[j] /= sum;
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &ids = *node.outputs[0], &weights = *node.outputs[1],
                 &shared = *node.outputs[2];
    const auto& p = node.params<MoeRouteParams>();
    const int64_t experts = p.router->rows - 1, tokens = x.shape[0];
    float* logits = context.buffer(3, tokens * p.router->rows);
    cpu::linear_rows(x, *p.router, logits, p.router->rows, context);
    context.pool.parallel_for(tokens, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            const float* row = logits + t * p.router->rows;
            choose(node, row, experts, p.used, ids.row<int32_t>(t), weights.row<float>(t));
            shared.as<float>()[t] = cpu::sigmoid(row[experts]);
        }
    });
}

Cost cost(const Node& node) {
    const Tensor& x = *node.inputs[0];
    const Weight& router = *node.params<MoeRouteParams>().router;
    return {.weight_bytes = static_cast<double>(router.bytes()),
            .activation_bytes = cpu::dense_bytes(x),
            .flops = 2.0 * static_cast<double>(x.shape[0] * router.rows * router.cols)};
}

}  // namespace

const Op kMoeRoute{"moe_route", run, cost};

MoeRouteResult moe_route(Graph& g, std::string_view name, Tensor* x, const Weight& router, int used) {
    CHECK(x->rank == 2 && x->shape[1] == router.cols, "[moe_route] {}: router [{}, {}] does not fit x {}",
          name, router.rows, router.cols, describe(*x));
    CHECK(used > 0 && used < router.rows, "[moe_route] {}: {} experts used of {}", name, used,
          router.rows - 1);
    const int64_t tokens = x->shape[0];
    Tensor* ids = g.scratch(fmt::format("{}.ids", name), DType::I32, {tokens, used});
    Tensor* weights = g.scratch(fmt::format("{}.weights", name), DType::F32, {tokens, used});
    Tensor* shared = g.scratch(fmt::format("{}.shared", name), DType::F32, {tokens});
    g.add({.op = &kMoeRoute,
           .name = std::string(name),
           .inputs = {x},
           .outputs = {ids, weights, shared},
           .parameters = MoeRouteParams{&router, used}});
    return {ids, weights, shared};
}

}  // namespace quern
