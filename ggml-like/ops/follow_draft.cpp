#include "ggml-like/ops/follow_draft.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

constexpr size_t kOptional = 7;  // of the inputs, the first that may be missing

void run(const Node& node, cpu::Context&) {
    const auto input = [&](size_t i) { return node.inputs[i]->as<int32_t>(); };
    const auto *ids = input(0), *row_sequence = input(1), *start = input(2), *slots = input(3),
               *follows = input(4), *source = input(5), *drafts = input(6);
    const auto chosen = [&](int64_t s) { return node.state[0]->row<int32_t>(slots[s]); };
    const int64_t sequences = node.inputs[3]->shape[0];
    for (int64_t t = 0; t < node.inputs[0]->shape[0]; ++t) {
        auto& id = node.outputs[0]->as<int32_t>()[t];
        id = source[t] >= 0 ? drafts[source[t]] : ids[t];
        const int32_t s = row_sequence[t];
        if (s >= 0 && follows[s] != 0 && t == start[s] + chosen(s)[0] - 1) id = chosen(s)[1];
    }
    const auto& has = node.params<FollowDraftParams>();
    size_t i = kOptional;
    if (has.last_rows) {
        for (int64_t s = 0; s < sequences; ++s)
            node.outputs[1]->as<int32_t>()[s] = follows[s] != 0 ? start[s] + chosen(s)[0] - 1 : input(i)[s];
        ++i;
    }
    for (; i < node.inputs.size(); ++i)
        for (int64_t k = 0; k < node.inputs[i]->elements(); ++k) {
            const int64_t s = k % sequences;
            node.outputs[i - kOptional + 1]->as<int32_t>()[k] =
                input(i)[k] + (follows[s] != 0 ? chosen(s)[0] : 0);
        }
}

Cost cost(const Node& node) { return {.activation_bytes = 4 * cpu::dense_bytes(*node.inputs[0])}; }

}  // namespace

const Op kFollowDraft{"follow_draft", run, cost};

FollowedRows follow_draft(Graph& g, std::string_view name, const Batch& batch, const OtherRows& drafts,
                          const FollowedRows& from, Tensor* chosen) {
    CHECK(chosen->rank == 2 && chosen->dtype == DType::I32 && chosen->shape[1] == 2 && chosen->contiguous(),
          "[follow_draft] {}: chosen {}", name, describe(*chosen));
    Node node{.op = &kFollowDraft,
              .name = std::string(name),
              .inputs = {from.ids, batch.row_sequence, batch.start, batch.slots, batch.follows, drafts.source,
                         drafts.rows},
              .state = {chosen},
              .parameters = FollowDraftParams{from.last_rows != nullptr, from.later_positions != nullptr,
                                              from.later_rope != nullptr}};
    const auto changed = [&](Tensor* t, const char* what) -> Tensor* {
        if (t == nullptr) return nullptr;
        if (t != from.ids) node.inputs.push_back(t);
        const std::string own = fmt::format("{}.{}", name, what);
        Tensor* out = t->rank == 1 ? g.scratch(own, DType::I32, {t->shape[0]})
                                   : g.scratch(own, DType::I32, {t->shape[0], t->shape[1]});
        node.outputs.push_back(out);
        return out;
    };
    FollowedRows to{};
    to.ids = changed(from.ids, "ids");
    to.last_rows = changed(from.last_rows, "last_rows");
    to.later_positions = changed(from.later_positions, "later_positions");
    to.later_rope = changed(from.later_rope, "later_rope");
    g.add(std::move(node));
    return to;
}

}  // namespace quern
