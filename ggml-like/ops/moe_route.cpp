#include "ggml-like/ops/moe_route.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/cpu/weight_rows.h"
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

/// Pairs by expert, in their own order inside each.
void group(const Tensor& ids, int64_t experts, int32_t* groups) {
    const int64_t pairs = ids.elements();
    int32_t* place = groups + 1;  // counts, then offsets, of the expert after
    std::fill(groups, groups + experts + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) ++place[ids.as<int32_t>()[i]];
    for (int64_t e = 1; e < experts; ++e) place[e] += place[e - 1];
    std::vector<int32_t> next(groups, groups + experts);
    for (int64_t i = 0; i < pairs; ++i)
        groups[experts + 1 + next[static_cast<size_t>(ids.as<int32_t>()[i])]++] = static_cast<int32_t>(i);
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &h = *node.outputs[0], &ids = *node.outputs[1], &weights = *node.outputs[2],
                 &shared = *node.outputs[3], &logits = *node.outputs[5];
    const auto& p = node.params<MoeRouteParams>();
    const int64_t experts = p.router->rows - 1, tokens = h.shape[0];
    cpu::rms_norm(*node.inputs[0], *node.inputs[1], p.eps, h, context);
    cpu::linear_rows(h, *p.router, logits.as<float>(), logits.stride[0], context);
    context.pool.parallel_for(tokens, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            const float* row = logits.row<float>(t);
            choose(node, row, experts, p.used, ids.row<int32_t>(t), weights.row<float>(t));
            shared.as<float>()[t] = cpu::sigmoid(row[experts]);
        }
    });
    group(ids, experts, node.outputs[4]->as<int32_t>());
}

Cost cost(const Node& node) {
    const Tensor& x = *node.inputs[0];
    const Weight& router = *node.params<MoeRouteParams>().router;
    return {.weight_bytes = static_cast<double>(router.bytes()),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(*node.outputs[0]),
            .flops = 2.0 * static_cast<double>(x.shape[0] * router.rows * router.cols)};
}

}  // namespace

const Op kMoeRoute{"moe_route", run, cost};

MoeRouteResult moe_route(Graph& g, std::string_view name, Tensor* x, Tensor* norm, const Weight& router,
                         int used, float eps, DType activation) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous() && x->shape[1] == router.cols,
          "[moe_route] {}: router [{}, {}] does not fit x {}", name, router.rows, router.cols, describe(*x));
    CHECK(norm->rank == 1 && norm->dtype == DType::F32 && norm->shape[0] == router.cols,
          "[moe_route] {}: norm {} does not fit x {}", name, describe(*norm), describe(*x));
    CHECK(used > 0 && used < router.rows, "[moe_route] {}: {} experts used of {}", name, used,
          router.rows - 1);
    cpu::check_weight("moe_route", name, router);
    const int64_t tokens = x->shape[0], experts = router.rows - 1;
    Tensor* h = g.scratch(fmt::format("{}.h", name), activation, {tokens, router.cols});
    Tensor* ids = g.scratch(fmt::format("{}.ids", name), DType::I32, {tokens, used});
    Tensor* weights = g.scratch(fmt::format("{}.weights", name), DType::F32, {tokens, used});
    Tensor* shared = g.scratch(fmt::format("{}.shared", name), DType::F32, {tokens});
    Tensor* groups = g.scratch(fmt::format("{}.groups", name), DType::I32, {experts + 1 + tokens * used});
    Tensor* logits = g.scratch(fmt::format("{}.logits", name), DType::F32, {tokens, (experts + 8) / 8 * 8});
    g.write_ahead(x, h);
    g.add({.op = &kMoeRoute,
           .name = std::string(name),
           .inputs = {x, norm},
           .outputs = {h, ids, weights, shared, groups, logits},
           .parameters = MoeRouteParams{&router, used, eps}});
    return {h, ids, weights, shared, groups};
}

}  // namespace quern
