#include "ggml-like/ops/embed.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor& ids = *node.inputs[0];
    const Tensor& y = *node.outputs[0];
    const Weight& table = *node.params<EmbedParams>().table;
    context.pool.parallel_for(y.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(y.shape[1]));
        for (int64_t t = begin; t < end; ++t) {
            const int32_t id = ids.as<int32_t>()[t];
            CHECK(id >= 0 && id < table.rows, "[embed] {}: token id {} is outside the table of {} rows",
                  node.name, id, table.rows);
            dequantize_row(table, id, row.data());
            store_floats(y, t * y.stride[0], y.shape[1], row.data());
        }
    });
}

Cost cost(const Node& node) {
    const Tensor& y = *node.outputs[0];
    const Weight& table = *node.params<EmbedParams>().table;
    return {.weight_bytes = static_cast<double>(table.bytes()) / static_cast<double>(table.rows) *
                            static_cast<double>(y.shape[0]),
            .activation_bytes = cpu::dense_bytes(y)};
}

}  // namespace

const Op kEmbed{"embed", run, cost};

Tensor* embed(Graph& g, std::string_view name, const Weight& table, Tensor* ids, DType dtype) {
    CHECK(ids->rank == 1 && ids->dtype == DType::I32, "[embed] ids are {}, not I32 [T]", describe(*ids));
    Tensor* y = g.scratch(name, dtype, {ids->shape[0], table.cols});
    g.add({.op = &kEmbed,
           .name = std::string(name),
           .inputs = {ids},
           .outputs = {y},
           .parameters = EmbedParams{&table}});
    return y;
}

}  // namespace quern
