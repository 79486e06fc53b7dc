#include "ggml-like/ops/moe_down.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/cpu/rank_sums.h"
#include "ggml-like/cpu/weight_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// One expert and its rows of `routed`.
struct Group {
    const Weight* weight = nullptr;
    cpu::ActivationRows x;
    std::vector<int64_t> place;  // token * used + j of each row
};

struct Work {
    std::vector<Group> groups;
    cpu::ActivationRows shared;
    const Tensor *weights = nullptr, *shared_gate = nullptr, *residual = nullptr, *y = nullptr;
    const Weight* shared_weight = nullptr;
    int64_t tokens = 0, used = 0;
};

/// Columns [begin, end) of y: all products of these rows first, then each token's sum in its own order.
void run_columns(const Work& work, int64_t begin, int64_t end, const cpu::DotKernels& dot) {
    const int64_t width = end - begin, terms = work.used + 1;
    std::vector<float> products(static_cast<size_t>(work.tokens * terms * width));
    std::vector<float*> to;
    for (const Group& group : work.groups) {
        to.clear();
        for (const int64_t place : group.place)
            to.push_back(products.data() + (place / work.used * terms + place % work.used) * width);
        cpu::weight_rows(dot, *group.weight, begin, end, group.x, to.data());
    }
    to.clear();
    for (int64_t t = 0; t < work.tokens; ++t) to.push_back(products.data() + (t * terms + work.used) * width);
    cpu::weight_rows(dot, *work.shared_weight, begin, end, work.shared, to.data());

    std::vector<float> sum(static_cast<size_t>(width));
    for (int64_t t = 0; t < work.tokens; ++t) {
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t j = 0; j < terms; ++j) {
            const float weight = j < work.used ? work.weights->as<float>()[t * work.used + j]
                                               : work.shared_gate->as<float>()[t];
            const float* product = products.data() + (t * terms + j) * width;
            for (int64_t i = 0; i < width; ++i) sum[static_cast<size_t>(i)] += weight * product[i];
        }
        const float* residual = work.residual->row<float>(t) + begin;
        for (int64_t i = 0; i < width; ++i)
            sum[static_cast<size_t>(i)] = residual[i] + sum[static_cast<size_t>(i)];
        store_floats(*work.y, t * work.y->stride[0] + begin, width, sum.data());
    }
}

/// The experts that some token chose, in rising order.
std::vector<Group> make_groups(const Node& node, const cpu::ActivationRows& routed) {
    const auto& experts = *node.params<MoeDownParams>().experts;
    const int32_t *offsets = node.inputs[5]->as<int32_t>(), *pairs = offsets + experts.count() + 1;
    std::vector<Group> groups;
    for (int64_t e = 0; e < experts.count(); ++e) {
        if (offsets[e] == offsets[e + 1]) continue;
        std::vector<int64_t> places(pairs + offsets[e], pairs + offsets[e + 1]);
        groups.push_back({&experts.expert[static_cast<size_t>(e)], routed.choose(places), std::move(places)});
    }
    return groups;
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &routed = *node.inputs[0], &shared = *node.inputs[1];
    const auto& p = node.params<MoeDownParams>();
    Tensor y = *node.outputs[0];
    const bool over_ranks = p.sums != Sums::none;
    std::vector<float> part(over_ranks ? static_cast<size_t>(y.elements()) : 0);
    if (over_ranks) y.data = part.data();
    const int64_t tokens = routed.shape[0], used = routed.shape[1], width = routed.shape[2];
    if (tokens == 0) return;
    bool pack = false;
    for (const Weight& w : p.experts->expert) pack = pack || cpu::has_nvfp4(w);
    const cpu::ActivationRows rows =
        cpu::activation_rows(routed, tokens * used, width, width, pack, context, 0);
    const Work work{
        .groups = make_groups(node, rows),
        .shared = cpu::activation_rows(shared, tokens, shared.shape[1], shared.stride[0],
                                       cpu::has_nvfp4(*p.shared), context, 2),
        .weights = node.inputs[3],
        .shared_gate = node.inputs[4],
        .residual = node.inputs[over_ranks ? 9 : 7],
        .y = &y,
        .shared_weight = p.shared,
        .tokens = tokens,
        .used = used,
    };
    const int64_t row_bytes = p.experts->expert[0].bytes() / std::max<int64_t>(p.experts->rows, 1);
    const int64_t experts_read = static_cast<int64_t>(work.groups.size()) + 1;
    const int64_t step = std::min<int64_t>(
        128, cpu::rows_per_chunk(y.shape[1], row_bytes * experts_read,
                                 tokens * (used * width + shared.shape[1]), context.pool.size()));
    context.pool.parallel_for(y.shape[1], step, [&](int64_t begin, int64_t end, int) {
        run_columns(work, begin, end, context.dot);
    });
    const Tensor &norm = *node.inputs[8], &h = *node.outputs[1], &squares = *node.outputs[2];
    if (over_ranks)
        cpu::add_over_ranks(y.as<float>(), *node.inputs[7], norm, *node.outputs[0], h, squares, context);
    else
        cpu::defer_norm(y, norm, h, squares, context);
}

/// Counts experts as if tokens chose different ones, as far as there are enough.
Cost cost(const Node& node) {
    const Tensor &routed = *node.inputs[0], &shared = *node.inputs[1];
    const auto& p = node.params<MoeDownParams>();
    const int64_t pairs = routed.shape[0] * routed.shape[1];
    const double read = static_cast<double>(std::min(pairs, p.experts->count()));
    const double each = static_cast<double>(p.experts->bytes()) / static_cast<double>(p.experts->count());
    return {.weight_bytes = read * each + static_cast<double>(p.shared->bytes()),
            .activation_bytes =
                cpu::dense_bytes(routed) + cpu::dense_bytes(shared) + cpu::dense_bytes(*node.outputs[0]),
            .flops = 2.0 * static_cast<double>(p.experts->rows) *
                     static_cast<double>(pairs * routed.shape[2] + routed.shape[0] * shared.shape[1])};
}

void check(std::string_view name, const MoeGateUpResult& in, const Tensor& residual,
           const ExpertWeights& experts, const Weight& shared) {
    const Tensor& routed = *in.routed;
    CHECK(routed.rank == 3 && routed.contiguous() && routed.shape[2] == experts.cols,
          "[moe_down] {}: experts [{}, {}] do not fit routed {}", name, experts.rows, experts.cols,
          describe(routed));
    CHECK(in.shared->rank == 2 && in.shared->stride[1] == 1 && in.shared->shape[0] == routed.shape[0] &&
              in.shared->shape[1] == shared.cols && shared.rows == experts.rows,
          "[moe_down] {}: shared expert [{}, {}] does not fit shared {} and {} rows of the experts", name,
          shared.rows, shared.cols, describe(*in.shared), experts.rows);
    CHECK(in.groups->shape[0] == experts.count() + 1 + in.ids->elements(),
          "[moe_down] {}: groups {} do not fit {} experts and ids {}", name, describe(*in.groups),
          experts.count(), describe(*in.ids));
    CHECK(residual.rank == 2 && residual.dtype == DType::F32 && residual.contiguous() &&
              residual.shape[0] == routed.shape[0] && residual.shape[1] == experts.rows,
          "[moe_down] {}: residual {} should be F32 [{}, {}]", name, describe(residual), routed.shape[0],
          experts.rows);
    CHECK(experts.count() > 0, "[moe_down] {}: no experts", name);
    cpu::check_experts("moe_down", name, experts);
    cpu::check_weight("moe_down", name, shared);
}

}  // namespace

const Op kMoeDown{"moe_down", run, cost};

Residual moe_down(Graph& g, std::string_view name, const MoeGateUpResult& in, Tensor* residual,
                  const ExpertWeights& experts, const Weight& shared, const NextNorm& next,
                  const OverRanks& ranks) {
    check(name, in, *residual, experts, shared);
    check_zeros("moe_down", name, ranks.zeros, *residual);
    const int64_t tokens = in.routed->shape[0], used = in.routed->shape[1];
    const Residual out = make_residual(g, "moe_down", name, tokens, experts.rows, next);
    Tensor* terms = g.scratch(fmt::format("{}.terms", name),
                              next.kind == StepKind::answer ? DType::F32 : in.routed->dtype,
                              {tokens * (used + 1), experts.rows});
    Node node{.op = &kMoeDown,
              .name = std::string(name),
              .inputs = {in.routed, in.shared, in.ids, in.weights, in.shared_gate, in.groups, in.ready,
                         residual, next.weight},
              .outputs = {out.x, out.h, out.squares, terms},
              .parameters = MoeDownParams{.experts = &experts,
                                          .shared = &shared,
                                          .kind = next.kind,
                                          .sums = ranks.sums(),
                                          .gate_up_experts = in.experts,
                                          .gate_up_shared = in.shared_expert,
                                          .permuted = in.permuted != nullptr}};
    if (ranks.zeros != nullptr) node.inputs.push_back(ranks.zeros);
    if (in.permuted != nullptr) node.inputs.push_back(in.permuted);
    g.add(std::move(node));
    return out;
}

}  // namespace quern
