#include "ggml-like/ops/follow_choice.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context&) {
    const auto input = [&](size_t i) { return node.inputs[i]->as<int32_t>(); };
    const auto *ids = input(0), *positions = input(1), *row_sequence = input(2), *start = input(3),
               *slots = input(4), *follows = input(5);
    auto *to_ids = node.outputs[0]->as<int32_t>(), *to_positions = node.outputs[1]->as<int32_t>();
    for (int64_t t = 0; t < node.inputs[0]->shape[0]; ++t) {
        to_ids[t] = ids[t], to_positions[t] = positions[t];
        const int32_t s = row_sequence[t];
        if (s < 0 || follows[s] == 0) continue;
        const auto* chosen = node.state[0]->row<int32_t>(slots[s]);
        to_positions[t] += chosen[0];
        if (t == start[s]) to_ids[t] = chosen[1];
    }
}

Cost cost(const Node& node) { return {.activation_bytes = 4 * cpu::dense_bytes(*node.inputs[0])}; }

}  // namespace

const Op kFollowChoice{"follow_choice", run, cost};

std::pair<Tensor*, Tensor*> follow_choice(Graph& g, std::string_view name, const Batch& batch,
                                          Tensor* chosen) {
    CHECK(chosen->rank == 2 && chosen->dtype == DType::I32 && chosen->shape[1] == 2 && chosen->contiguous(),
          "[follow_choice] {}: chosen {}", name, describe(*chosen));
    const int64_t rows = batch.token_ids->shape[0];
    Tensor* ids = g.scratch(fmt::format("{}.ids", name), DType::I32, {rows});
    Tensor* positions = g.scratch(fmt::format("{}.positions", name), DType::I32, {rows});
    g.add({.op = &kFollowChoice,
           .name = std::string(name),
           .inputs = {batch.token_ids, batch.positions, batch.row_sequence, batch.start, batch.slots,
                      batch.follows},
           .outputs = {ids, positions},
           .state = {chosen}});
    return {ids, positions};
}

}  // namespace quern
