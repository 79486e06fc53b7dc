#include "ggml-like/ops/write_ring.h"

#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context&) {
    const Tensor &x = *node.inputs[0], &ring = *node.state[0];
    const auto *positions = node.inputs[1]->as<int32_t>(), *sequences = node.inputs[2]->as<int32_t>(),
               *start = node.inputs[3]->as<int32_t>(), *slots = node.inputs[4]->as<int32_t>();
    const int64_t entries = ring.shape[1], width = x.shape[1];
    for (int64_t t = 0; t < x.shape[0]; ++t) {
        const int32_t s = sequences[t];
        if (s < 0 || start[s + 1] - t > entries) continue;
        std::memcpy(ring.as<float>() + (slots[s] * entries + positions[t] % entries) * width, x.row<float>(t),
                    static_cast<size_t>(width) * sizeof(float));
    }
}

Cost cost(const Node& node) {
    const double bytes = cpu::dense_bytes(*node.inputs[0]);
    return {.state_bytes = bytes, .activation_bytes = bytes};
}

}  // namespace

const Op kWriteRing{"write_ring", run, cost};

void write_ring(Graph& g, std::string_view name, Tensor* x, Tensor* ring, const Batch& batch) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous() && ring->rank == 3 &&
              ring->dtype == DType::F32 && ring->contiguous() && ring->shape[2] == x->shape[1],
          "[write_ring] {}: x {} does not fit the ring {}", name, describe(*x), describe(*ring));
    g.add({.op = &kWriteRing,
           .name = std::string(name),
           .inputs = {x, batch.positions, batch.row_sequence, batch.start, batch.slots},
           .state = {ring}});
}

}  // namespace quern
