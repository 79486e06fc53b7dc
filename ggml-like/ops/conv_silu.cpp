#include "ggml-like/ops/conv_silu.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// Runs one sequence over channels [begin, end). The window holds the last W-1 inputs, then the step's own.
void convolve(const Node& node, int64_t s, int64_t begin, int64_t end) {
    const Tensor &u = *node.inputs[0], &w = *node.inputs[1], &state = *node.state[0], &y = *node.outputs[0];
    const int32_t* start = node.inputs[2]->as<int32_t>();
    const int64_t taps = w.shape[1], kept = taps - 1, rows = start[s + 1] - start[s], channels = end - begin;
    const int64_t slot = node.inputs[3]->as<int32_t>()[s];
    const int32_t committed = node.inputs[5]->as<int32_t>()[s], journal = node.inputs[6]->as<int32_t>()[s];
    const bool fresh = node.inputs[4]->as<int32_t>()[start[s]] == 0;
    const auto state_at = [&](int64_t row) { return slot * state.stride[0] + row * state.stride[1] + begin; };

    std::vector<float> window(static_cast<size_t>((kept + rows) * channels), 0.0f);
    const auto line = [&](int64_t row) { return window.data() + row * channels; };
    if (!fresh)
        for (int64_t r = 0; r < kept; ++r) load_floats(state, state_at(committed + r), channels, line(r));
    for (int64_t r = 0; r < rows; ++r)
        load_floats(u, (start[s] + r) * u.stride[0] + begin, channels, line(kept + r));

    std::vector<float> out(static_cast<size_t>(channels));
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < channels; ++c) {
            float sum = 0;
            for (int64_t j = 0; j < taps; ++j) sum += w.as<float>()[(begin + c) * taps + j] * line(r + j)[c];
            out[static_cast<size_t>(c)] = cpu::silu(sum);
        }
        store_floats(y, (start[s] + r) * y.stride[0] + begin, channels, out.data());
    }

    const int64_t first = journal ? 0 : rows;  // journaling keeps the window where it was committed
    for (int64_t r = 0; r < kept; ++r) store_floats(state, state_at(r), channels, line(first + r));
    if (journal)
        for (int64_t r = 0; r < rows; ++r) store_floats(state, state_at(kept + r), channels, line(kept + r));
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &u = *node.inputs[0], &w = *node.inputs[1], &state = *node.state[0],
                 &starts = *node.inputs[2];
    const int64_t capacity = state.shape[1] - (w.shape[1] - 1);
    for (int64_t s = 0; s + 1 < starts.shape[0]; ++s) {
        const int32_t rows = starts.as<int32_t>()[s + 1] - starts.as<int32_t>()[s];
        if (rows == 0) continue;
        const int32_t committed = node.inputs[5]->as<int32_t>()[s],
                      journal = node.inputs[6]->as<int32_t>()[s];
        CHECK(committed >= 0 && committed <= capacity && (!journal || rows <= capacity),
              "[conv_silu] {}: {} committed, {} rows, journal holds {}", node.name, committed, rows,
              capacity);
        context.pool.parallel_for(u.shape[1], 256,
                                  [&](int64_t begin, int64_t end, int) { convolve(node, s, begin, end); });
    }
}

Cost cost(const Node& node) {
    const Tensor &u = *node.inputs[0], &w = *node.inputs[1], &state = *node.state[0];
    const double sequences = static_cast<double>(node.inputs[3]->shape[0]);
    return {.weight_bytes = cpu::dense_bytes(w),
            .state_bytes = 2 * sequences *
                           static_cast<double>(dtype_bytes(state.dtype, (w.shape[1] - 1) * state.shape[2])),
            .activation_bytes = 2 * cpu::dense_bytes(u),
            .flops = 2.0 * static_cast<double>(u.elements() * w.shape[1])};
}

}  // namespace

const Op kConvSilu{"conv_silu", run, cost};

Tensor* conv_silu(Graph& g, std::string_view name, Tensor* u, Tensor* w, Tensor* state, const Batch& batch) {
    CHECK(u->rank == 2 && u->stride[1] == 1 && w->rank == 2 && w->dtype == DType::F32 &&
              w->shape[0] == u->shape[1],
          "[conv_silu] {}: weight {} does not fit u {}", name, describe(*w), describe(*u));
    CHECK(state->rank == 3 && state->shape[1] >= w->shape[1] - 1 && state->shape[2] == u->shape[1],
          "[conv_silu] {}: state {} does not fit u {} and {} taps", name, describe(*state), describe(*u),
          w->shape[1]);
    Tensor* y = g.scratch(name, u->dtype, {u->shape[0], u->shape[1]});
    g.add({.op = &kConvSilu,
           .name = std::string(name),
           .inputs = {u, w, batch.start, batch.slots, batch.positions, batch.committed, batch.journal},
           .outputs = {y},
           .state = {state}});
    return y;
}

}  // namespace quern
