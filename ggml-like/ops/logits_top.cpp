#include "ggml-like/ops/logits_top.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

constexpr int64_t kWorkBytes = 16 << 10;  // of one row: maxima and sums of groups

void top_of_row(const Node& node, int64_t row) {
    const float* logits = node.inputs[0]->row<float>(row);
    const float temperature = node.inputs[1]->as<float>()[row];
    int32_t* ids = node.outputs[0]->row<int32_t>(row);
    float values[kTopLogits];
    const int64_t vocab = node.params<LogitsTopParams>().vocab;
    const bool sane = std::all_of(logits, logits + vocab, [](float x) { return x < INFINITY; });
    std::vector<int32_t> order;
    for (int32_t id = 0; id < vocab; ++id)
        if (logits[id] > -INFINITY) order.push_back(id);
    const int64_t n = std::min(static_cast<int64_t>(order.size()), int64_t{temperature < 0 ? 1 : kTopLogits});
    const auto higher = [&](int32_t a, int32_t b) {
        return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    };
    if (sane) std::partial_sort(order.begin(), order.begin() + n, order.end(), higher);
    for (int64_t i = 0; i < kTopLogits; ++i) {
        ids[i] = i < n ? order[static_cast<size_t>(i)] : -1;
        values[i] = i < n ? logits[ids[i]] : -INFINITY;
    }
    const double scale = temperature > 0 ? 1.0 / temperature : 1.0;
    double sum = 0;
    if (sane)
        for (int64_t i = 0; i < vocab; ++i) sum += std::exp((logits[i] - values[0]) * scale);
    const float rounded = static_cast<float>(sum);
    std::memcpy(ids + kTopLogits, values, sizeof values);
    std::memcpy(ids + 2 * kTopLogits, &rounded, sizeof rounded);
    ids[2 * kTopLogits + 1] = sane && n > 0 ? 1 : 0;
}

void run(const Node& node, cpu::Context& context) {
    context.pool.parallel_for(node.inputs[0]->shape[0], 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) top_of_row(node, row);
    });
}

Cost cost(const Node& node) { return {.activation_bytes = 2 * cpu::dense_bytes(*node.inputs[0])}; }

}  // namespace

const Op kLogitsTop{"logits_top", run, cost};

Tensor* logits_top(Graph& g, std::string_view name, Tensor* logits, Tensor* temperature, int64_t vocab) {
    CHECK(logits->rank == 2 && logits->dtype == DType::F32 && vocab > 0 && vocab <= logits->shape[1],
          "[logits_top] {}: vocabulary of {} does not fit logits {}", name, vocab, describe(*logits));
    CHECK(temperature->dtype == DType::F32 && temperature->elements() == logits->shape[0],
          "[logits_top] {}: temperature {} does not fit logits {}", name, describe(*temperature),
          describe(*logits));
    const int64_t rows = logits->shape[0];
    Tensor* top = g.scratch(name, DType::I32, {rows, kTopWords});
    Tensor* work = g.scratch(fmt::format("{}.work", name), DType::U8, {rows, kWorkBytes});
    g.add({.op = &kLogitsTop,
           .name = std::string(name),
           .inputs = {logits, temperature},
           .outputs = {top, work},
           .parameters = LogitsTopParams{vocab}});
    return top;
}

}  // namespace quern
