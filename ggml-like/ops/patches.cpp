#include "ggml-like/ops/patches.h"

#include <algorithm>
#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run_values(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const int64_t width = x.shape[1];
    context.pool.parallel_for(x.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width));
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t i = 0; i < width; ++i)
                row[static_cast<size_t>(i)] = (static_cast<float>(x.row<uint8_t>(t)[i]) - 127.5f) / 127.5f;
            store_floats(y, t * width, width, row.data());
        }
    });
}

Cost cost_of_values(const Node& node) {
    return {.activation_bytes = cpu::dense_bytes(*node.inputs[0]) + cpu::dense_bytes(*node.outputs[0])};
}

/// Where index i of n lies in a table's axis: between two entries.
struct Between {
    Between(int32_t i, int32_t n, int64_t side) {
        const float s =
            static_cast<float>(i) * (static_cast<float>(side - 1) / static_cast<float>(std::max(n - 1, 1)));
        low = std::min(static_cast<int64_t>(s), side - 1);
        high = std::min(low + 1, side - 1);
        part = s - static_cast<float>(low);
    }
    int64_t low, high;
    float part;
};

void run_embedding(const Node& node, cpu::Context& context) {
    const Tensor &place = *node.inputs[0], &table = *node.inputs[1], &y = *node.outputs[0];
    const auto side = std::llround(std::sqrt(static_cast<double>(table.shape[0])));
    context.pool.parallel_for(y.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            const int32_t* at = place.row<int32_t>(t);
            const Between r(at[0], at[2], side), c(at[1], at[3], side);
            const float weight[4] = {(1 - r.part) * (1 - c.part), (1 - r.part) * c.part,
                                     r.part * (1 - c.part), r.part * c.part};
            const float* row[4] = {
                table.row<float>(side * r.low + c.low), table.row<float>(side * r.low + c.high),
                table.row<float>(side * r.high + c.low), table.row<float>(side * r.high + c.high)};
            float* to = y.row<float>(t);
            for (int64_t i = 0; i < y.shape[1]; ++i)
                to[i] = weight[0] * row[0][i] + weight[1] * row[1][i] + weight[2] * row[2][i] +
                        weight[3] * row[3][i];
        }
    });
}

Cost cost_of_embedding(const Node& node) {
    return {.activation_bytes = 5 * cpu::dense_bytes(*node.outputs[0])};
}

}  // namespace

const Op kPatchValues{"patch_values", run_values, cost_of_values};
const Op kGridEmbedding{"grid_embedding", run_embedding, cost_of_embedding};

Tensor* patch_values(Graph& g, std::string_view name, Tensor* x, DType activation) {
    CHECK(x->rank == 2 && x->dtype == DType::U8 && x->contiguous(), "[patch_values] {}: x is {}", name,
          describe(*x));
    Tensor* y = g.scratch(name, activation, {x->shape[0], x->shape[1]});
    g.add({.op = &kPatchValues, .name = std::string(name), .inputs = {x}, .outputs = {y}});
    return y;
}

Tensor* grid_embedding(Graph& g, std::string_view name, Tensor* place, Tensor* table) {
    CHECK(place->rank == 2 && place->dtype == DType::I32 && place->shape[1] == 4,
          "[grid_embedding] {}: place is {}", name, describe(*place));
    const auto side = std::llround(std::sqrt(static_cast<double>(table->shape[0])));
    CHECK(table->rank == 2 && table->dtype == DType::F32 && side * side == table->shape[0] &&
              table->contiguous(),
          "[grid_embedding] {}: the table is {}", name, describe(*table));
    Tensor* y = g.scratch(name, DType::F32, {place->shape[0], table->shape[1]});
    g.add({.op = &kGridEmbedding, .name = std::string(name), .inputs = {place, table}, .outputs = {y}});
    return y;
}

}  // namespace quern
