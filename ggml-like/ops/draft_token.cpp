#include "ggml-like/ops/draft_token.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/weight_rows.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const DraftTokenNodes nodes(node);
    kNormLinear.run_cpu(nodes.product, context);
    kBestToken.run_cpu(nodes.best, context);
}

Cost cost(const Node& node) { return kNormLinear.cost(DraftTokenNodes(node).product); }

}  // namespace

const Op kDraftToken{"draft_token", run, cost};

DraftTokenNodes::DraftTokenNodes(const Node& node) {
    const auto& p = node.params<DraftTokenParams>();
    Tensor *ids = node.outputs[0], *logits = node.outputs[1], *work = node.outputs[2];
    product = {.op = &kNormLinear,
               .name = node.name,
               .inputs = node.inputs,
               .outputs = {logits},
               .parameters = p.product,
               .layer = node.layer};
    best = {.op = &kBestToken,
            .name = node.name,
            .inputs = {logits},
            .outputs = {ids, work},
            .parameters = p.columns,
            .layer = node.layer};
}

void draft_token(Graph& g, std::string_view name, const Residual& in, const Weight& head,
                 const TokenColumns& columns, float eps, StepKind kind, Tensor* ids) {
    check_normed("draft_token", name, in, head.cols);
    cpu::check_weight("draft_token", name, head);
    const int64_t rows = in.h->shape[0];
    check_best("draft_token", name, columns, head.rows, ids, rows);
    Tensor* logits = g.scratch(fmt::format("{}.logits", name), DType::F32, {rows, head.rows});
    Tensor* work = best_token_work(g, name, rows);
    g.add({.op = &kDraftToken,
           .name = std::string(name),
           .inputs = {in.h, in.squares},
           .outputs = {ids, logits, work},
           .parameters = DraftTokenParams{{&head, eps, kind}, columns}});
}

}  // namespace quern
