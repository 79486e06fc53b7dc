#include "ggml-like/ops/accept_drafts.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/logits_top.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context&) {
    const auto *ids = node.inputs[0]->as<int32_t>(), *start = node.inputs[1]->as<int32_t>(),
               *slots = node.inputs[2]->as<int32_t>(), *top = node.inputs[3]->as<int32_t>();
    const auto* source = node.inputs.size() > 4 ? node.inputs[4]->as<int32_t>() : nullptr;
    const auto id_of = [&](int64_t t) {
        return source != nullptr && source[t] >= 0 ? node.inputs[5]->as<int32_t>()[source[t]] : ids[t];
    };
    for (int64_t s = 0; s < node.inputs[2]->shape[0]; ++s) {
        if (start[s] == start[s + 1]) continue;
        int64_t t = start[s];
        while (t + 1 < start[s + 1] && id_of(t + 1) == top[t * kTopWords]) ++t;
        auto* chosen = node.state[0]->row<int32_t>(slots[s]);
        chosen[0] = static_cast<int32_t>(t - start[s] + 1), chosen[1] = top[t * kTopWords];
    }
}

Cost cost(const Node& node) { return {.activation_bytes = cpu::dense_bytes(*node.inputs[0])}; }

}  // namespace

const Op kAcceptDrafts{"accept_drafts", run, cost};

void accept_drafts(Graph& g, std::string_view name, const Batch& batch, const OtherRows& drafts, Tensor* top,
                   Tensor* chosen) {
    CHECK(top->rank == 2 && top->dtype == DType::I32 && top->shape[1] == kTopWords &&
              top->shape[0] == batch.token_ids->shape[0] && top->contiguous(),
          "[accept_drafts] {}: {} is not of all rows", name, describe(*top));
    CHECK(chosen->rank == 2 && chosen->dtype == DType::I32 && chosen->shape[1] == 2 && chosen->contiguous(),
          "[accept_drafts] {}: chosen {}", name, describe(*chosen));
    for (const Tensor* t : {batch.token_ids, batch.start, batch.slots, drafts.source})
        CHECK(t == nullptr || t->place == Place::input, "[accept_drafts] {}: {} is no input", name,
              describe(*t));
    CHECK(drafts.rows == nullptr || drafts.rows->place == Place::state, "[accept_drafts] {}: {} is no state",
          name, describe(*drafts.rows));
    Node node{.op = &kAcceptDrafts,
              .name = std::string(name),
              .inputs = {batch.token_ids, batch.start, batch.slots, top},
              .state = {chosen}};
    if (drafts.source != nullptr) {
        node.inputs.push_back(drafts.source);
        node.inputs.push_back(drafts.rows);
    }
    g.add(std::move(node));
}

}  // namespace quern
