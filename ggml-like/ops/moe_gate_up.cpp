#include "ggml-like/ops/moe_gate_up.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/gate_up.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// NaN is lower than any number.
bool higher(float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); }

/// The `used` highest logits, falling, ties to the lower id.
void choose(const float* logits, float factor, int64_t experts, int used, int32_t* ids, float* weights) {
    float sum = 0;
    for (int j = 0; j < used; ++j) {
        int32_t best = -1;
        for (int32_t e = 0; e < experts; ++e) {
            const bool taken = std::find(ids, ids + j, e) != ids + j;
            if (!taken && (best < 0 || higher(logits[e], logits[best]))) best = e;
        }
        ids[j] = best;
        weights[j] = std::exp(logits[best] * factor - logits[ids[0]] * factor);
        sum += weights[j];
    }
    for (int j = 0; j < used; ++j) weights[j] /= sum;
}

/// Pairs (t*K + j) by expert, rising.
void group(const Tensor& ids, int64_t experts, int32_t* groups) {
    const int64_t pairs = ids.elements();
    int32_t* place = groups + 1;  // place[e]: the count of expert e, then the end of its group
    std::fill(groups, groups + experts + 1, 0);
    for (int64_t i = 0; i < pairs; ++i) ++place[ids.as<int32_t>()[i]];
    for (int64_t e = 1; e < experts; ++e) place[e] += place[e - 1];
    std::vector<int32_t> next(groups, groups + experts);
    for (int64_t i = 0; i < pairs; ++i)
        groups[experts + 1 + next[static_cast<size_t>(ids.as<int32_t>()[i])]++] = static_cast<int32_t>(i);
}

/// Writes ids, weights, gate and groups; returns the norm's factors.
std::vector<float> choose_all(const Node& node, cpu::Context& context) {
    const Tensor &h = *node.inputs[0], &squares = *node.inputs[1], &logits = *node.inputs[2];
    const Tensor &ids = *node.outputs[2], &weights = *node.outputs[3], &gate = *node.outputs[4];
    const auto& p = node.params<MoeGateUpParams>();
    const int64_t experts = p.experts->count();
    std::vector<float> factors(static_cast<size_t>(h.shape[0]));
    context.pool.parallel_for(h.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            const float* row = logits.row<float>(t);
            const float factor = factors[static_cast<size_t>(t)] =
                cpu::norm_factor(squares, t, h.shape[1], p.eps);
            choose(row, factor, experts, p.used, ids.row<int32_t>(t), weights.row<float>(t));
            gate.as<float>()[t] = cpu::sigmoid(row[experts] * factor);
        }
    });
    group(ids, experts, node.outputs[5]->as<int32_t>());
    return factors;
}

bool any_nvfp4(const MoeGateUpParams& p) {
    for (const Weight& w : p.experts->expert)
        if (cpu::has_nvfp4(w)) return true;
    return cpu::has_nvfp4(*p.shared);
}

/// The chosen experts in rising order, each with its pairs in token order, then the shared expert.
std::vector<cpu::GateUp> make_groups(const Node& node, const cpu::ActivationRows& x,
                                     const std::vector<float>& factors) {
    const Tensor &routed = *node.outputs[0], &shared = *node.outputs[1], &ids = *node.outputs[2];
    const auto& p = node.params<MoeGateUpParams>();
    const int64_t used = ids.shape[1], experts = p.experts->count();
    const int32_t *offsets = node.outputs[5]->as<int32_t>(), *pairs = offsets + experts + 1;
    std::vector<cpu::GateUp> groups;
    const auto add = [&](const Weight& w, const Tensor& out, const std::vector<int64_t>& where,
                         int64_t per_token) {
        cpu::GateUp group{&w, {}, {}, &out, {}};
        std::vector<int64_t> tokens;
        for (const int64_t place : where) {
            tokens.push_back(place / per_token);
            group.factor.push_back(factors[static_cast<size_t>(tokens.back())]);
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
    const Tensor& h = *node.inputs[0];
    const auto& p = node.params<MoeGateUpParams>();
    CHECK(node.inputs[2]->dtype == DType::F32, "[moe_gate_up] {}: the CPU reads logits in F32, not {}",
          node.name, dtype_name(node.inputs[2]->dtype));
    const std::vector<float> factors = choose_all(node, context);
    const cpu::ActivationRows rows =
        cpu::activation_rows(h, h.shape[0], h.shape[1], h.stride[0], any_nvfp4(p), context, 0);
    cpu::gate_up(make_groups(node, rows, factors), context);
}

/// Counts experts as if tokens chose different ones, as far as there are enough.
Cost cost(const Node& node) {
    const Tensor &h = *node.inputs[0], &ids = *node.outputs[2];
    const auto& p = node.params<MoeGateUpParams>();
    const int64_t pairs = ids.shape[0] * ids.shape[1];
    const double read = static_cast<double>(std::min(pairs, p.experts->count()));
    const double each = static_cast<double>(p.experts->bytes()) / static_cast<double>(p.experts->count());
    return {.weight_bytes = read * each + static_cast<double>(p.shared->bytes()),
            .activation_bytes = cpu::dense_bytes(h) + cpu::dense_bytes(ids) +
                                cpu::dense_bytes(*node.outputs[0]) + cpu::dense_bytes(*node.outputs[1]),
            .flops = 2.0 * static_cast<double>(h.shape[1]) *
                     static_cast<double>(pairs * p.experts->rows + h.shape[0] * p.shared->rows)};
}

void check(std::string_view name, const Residual& in, const ExpertWeights& experts, const Weight& shared,
           int used) {
    check_normed("moe_gate_up", name, in, experts.cols);
    CHECK(in.h->shape[1] == shared.cols, "[moe_gate_up] {}: shared expert [{}, {}] does not fit h {}", name,
          shared.rows, shared.cols, describe(*in.h));
    CHECK(in.logits != nullptr && in.logits->rank == 2 && in.logits->shape[0] == in.h->shape[0] &&
              in.logits->shape[1] > experts.count(),
          "[moe_gate_up] {}: no logits of {} experts and the shared one's gate", name, experts.count());
    CHECK(used > 0 && used <= experts.count(), "[moe_gate_up] {}: {} experts used of {}", name, used,
          experts.count());
    CHECK(experts.count() > 0 && experts.rows % 2 == 0 && shared.rows % 2 == 0,
          "[moe_gate_up] {}: {} experts of {} rows, shared {} rows; expected gate and up of the same height",
          name, experts.count(), experts.rows, shared.rows);
    cpu::check_experts("moe_gate_up", name, experts);
    cpu::check_weight("moe_gate_up", name, shared);
}

/// Whether a GPU may lay out rows of h by expert.
bool lays_out(const MoeGateUpParams& p) {
    return p.kind == StepKind::prompt || p.experts->expert.at(0).segments.at(0).dtype == DType::F8_E4M3;
}

}  // namespace

const Op kMoeGateUp{"moe_gate_up", run, cost};

MoeGateUpResult moe_gate_up(Graph& g, std::string_view name, const Residual& in, const ExpertWeights& experts,
                            const Weight& shared, int used, float eps, StepKind kind) {
    check(name, in, experts, shared, used);
    const int64_t tokens = in.h->shape[0], width = experts.rows / 2;
    const bool permuted = kind == StepKind::answer && tokens > 1 && tokens <= kToldRows && width % 64 == 0 &&
                          shared.rows == experts.rows;
    const auto part = [&](const char* what) { return fmt::format("{}.{}", name, what); };
    const MoeGateUpResult out{
        .routed = g.scratch(part("routed"), in.h->dtype, {tokens, used, experts.rows / 2}),
        .shared = g.scratch(part("shared"), in.h->dtype, {tokens, shared.rows / 2}),
        .ids = g.scratch(part("ids"), DType::I32, {tokens, used}),
        .weights = g.scratch(part("weights"), DType::F32, {tokens, used}),
        .shared_gate = g.scratch(part("shared_gate"), DType::F32, {tokens}),
        .groups = g.scratch(part("groups"), DType::I32, {experts.count() + 1 + tokens * used}),
        .ready = g.zeros(part("ready"), DType::I64, {told_words(tokens, used)}),
        .permuted = permuted ? g.scratch(part("permuted"), DType::U8,
                                         {tokens * (used + 1), permuted_row_bytes(width)})
                             : nullptr,
        .experts = &experts,
        .shared_expert = &shared,
    };
    Node node{.op = &kMoeGateUp,
              .name = std::string(name),
              .inputs = {in.h, in.squares, in.logits},
              .outputs = {out.routed, out.shared, out.ids, out.weights, out.shared_gate, out.groups,
                          out.ready, g.scratch(part("factor"), DType::F32, {tokens})},
              .parameters = MoeGateUpParams{&experts, &shared, used, eps, kind}};
    if (lays_out(node.params<MoeGateUpParams>())) {
        node.outputs.push_back(g.scratch(part("grouped"), in.h->dtype, {tokens * used, experts.cols}));
        node.outputs.push_back(g.scratch(part("places"), DType::I32, {tokens * used}));
    }
    if (permuted) node.outputs.push_back(out.permuted);
    g.add(std::move(node));
    return out;
}

}  // namespace quern
