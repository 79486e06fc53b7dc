#include "ggml-like/ops/moe_gate_up.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/gate_up.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

bool any_nvfp4(const MoeGateUpParams& p) {
    for (const Weight& w : p.experts->expert)
        if (cpu::has_nvfp4(w)) return true;
    return cpu::has_nvfp4(*p.shared);
}

/// The experts in rising order, each with its (token, place) pairs in token order; the shared one last.
std::vector<cpu::GateUp> make_groups(const Node& node, const cpu::ActivationRows& x) {
    const Tensor &ids = *node.inputs[1], &routed = *node.outputs[0], &shared = *node.outputs[1];
    const auto& p = node.params<MoeGateUpParams>();
    const int64_t used = ids.shape[1], experts = p.experts->count();
    const int32_t *offsets = node.inputs[2]->as<int32_t>(), *pairs = offsets + experts + 1;
    cpu::check_groups("moe_gate_up", node.name, *node.inputs[2], experts, ids.elements());
    std::vector<cpu::GateUp> groups;
    const auto add = [&](const Weight& w, const Tensor& out, const std::vector<int64_t>& where,
                         int64_t per_token) {
        cpu::GateUp group{&w, {}, &out, {}};
        std::vector<int64_t> tokens;
        for (const int64_t place : where) {
            tokens.push_back(place / per_token);
            group.to.push_back(place * (w.rows / 2));
        }
        group.x = x.choose(tokens);
        groups.push_back(std::move(group));
    };
    for (int64_t e = 0; e < experts; ++e)
        if (offsets[e] < offsets[e + 1])
            add(p.experts->expert[static_cast<size_t>(e)], routed,
                std::vector<int64_t>(pairs + offsets[e], pairs + offsets[e + 1]), used);
    std::vector<int64_t> all(static_cast<size_t>(x.count()));
    for (size_t t = 0; t < all.size(); ++t) all[t] = static_cast<int64_t>(t);
    if (!all.empty()) add(*p.shared, shared, all, 1);
    return groups;
}

void run(const Node& node, cpu::Context& context) {
    const Tensor& x = *node.inputs[0];
    const auto& p = node.params<MoeGateUpParams>();
    const cpu::ActivationRows rows =
        cpu::activation_rows(x, x.shape[0], x.shape[1], x.stride[0], any_nvfp4(p), context, 0);
    cpu::gate_up(make_groups(node, rows), context);
}

/// Experts counted as if tokens chose different ones as long as there are any.
Cost cost(const Node& node) {
    const Tensor &x = *node.inputs[0], &ids = *node.inputs[1];
    const auto& p = node.params<MoeGateUpParams>();
    const int64_t pairs = ids.shape[0] * ids.shape[1];
    const double read = static_cast<double>(std::min(pairs, p.experts->count()));
    const double each = static_cast<double>(p.experts->bytes()) / static_cast<double>(p.experts->count());
    return {.weight_bytes = read * each + static_cast<double>(p.shared->bytes()),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(ids) +
                                cpu::dense_bytes(*node.outputs[0]) + cpu::dense_bytes(*node.outputs[1]),
            .flops = 2.0 * static_cast<double>(x.shape[1]) *
                     static_cast<double>(pairs * p.experts->rows + x.shape[0] * p.shared->rows)};
}

}  // namespace

const Op kMoeGateUp{"moe_gate_up", run, cost};

MoeGateUpResult moe_gate_up(Graph& g, std::string_view name, Tensor* x, Tensor* ids, Tensor* groups,
                            const ExpertWeights& experts, const Weight& shared) {
    CHECK(groups->rank == 1 && groups->dtype == DType::I32 &&
              groups->shape[0] == experts.count() + 1 + ids->elements(),
          "[moe_gate_up] {}: groups {} do not fit {} experts and ids {}", name, describe(*groups),
          experts.count(), describe(*ids));
    CHECK(x->rank == 2 && x->stride[1] == 1 && x->shape[1] == experts.cols && x->shape[1] == shared.cols,
          "[moe_gate_up] {}: experts [{}, {}] and shared expert [{}, {}] do not fit x {}", name, experts.rows,
          experts.cols, shared.rows, shared.cols, describe(*x));
    CHECK(ids->rank == 2 && ids->dtype == DType::I32 && ids->contiguous() && ids->shape[0] == x->shape[0],
          "[moe_gate_up] {}: ids {} do not fit x {}", name, describe(*ids), describe(*x));
    CHECK(experts.count() > 0 && experts.rows % 2 == 0 && shared.rows % 2 == 0,
          "[moe_gate_up] {}: {} experts of {} rows, shared {} rows; expected gate and up of the same height",
          name, experts.count(), experts.rows, shared.rows);
    for (const Weight& w : experts.expert) {
        CHECK(w.rows == experts.rows && w.cols == experts.cols,
              "[moe_gate_up] {}: expert {} is [{}, {}], expected [{}, {}]", name, w.name, w.rows, w.cols,
              experts.rows, experts.cols);
        cpu::check_weight("moe_gate_up", name, w);
    }
    cpu::check_weight("moe_gate_up", name, shared);
    Tensor* routed =
        g.scratch(fmt::format("{}.routed", name), x->dtype, {x->shape[0], ids->shape[1], experts.rows / 2});
    Tensor* out = g.scratch(fmt::format("{}.shared", name), x->dtype, {x->shape[0], shared.rows / 2});
    g.add({.op = &kMoeGateUp,
           .name = std::string(name),
           .inputs = {x, ids, groups},
           .outputs = {routed, out},
           .parameters = MoeGateUpParams{&experts, &shared}});
    return {routed, out};
}

}  // namespace quern
