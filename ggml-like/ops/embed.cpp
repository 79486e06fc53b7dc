#include "ggml-like/ops/embed.h"

#include <algorithm>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/cpu/norms.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context& context) {
    const Tensor &ids = *node.inputs[0], &norm = *node.inputs[1];
    const Tensor &x = *node.outputs[0], &h = *node.outputs[1], &squares = *node.outputs[2];
    const Weight& table = *node.params<EmbedParams>().table;
    const Tensor* source = node.inputs.size() > 2 ? node.inputs[2] : nullptr;
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            int32_t id = ids.as<int32_t>()[t];
            if (const int32_t row = source != nullptr ? source->as<int32_t>()[t] : -1; row >= 0) {
                const Tensor& others = *node.inputs[3];
                CHECK(row < others.shape[0], "[embed] {}: row {} of {}", node.name, row, describe(others));
                if (others.dtype == DType::F32) {
                    std::copy_n(others.row<float>(row), table.cols, x.row<float>(t));
                    cpu::defer_norm(x.row<float>(t), norm, h, squares, t);
                    continue;
                }
                id = others.as<int32_t>()[row];
            }
            CHECK(id >= 0 && id < table.rows, "[embed] {}: token id {} is outside the table of {} rows",
                  node.name, id, table.rows);
            dequantize_row(table, id, x.row<float>(t));
            cpu::defer_norm(x.row<float>(t), norm, h, squares, t);
        }
    });
}

Cost cost(const Node& node) {
    const Tensor& x = *node.outputs[0];
    const Weight& table = *node.params<EmbedParams>().table;
    return {.weight_bytes = static_cast<double>(table.bytes()) / static_cast<double>(table.rows) *
                            static_cast<double>(x.shape[0]),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(*node.outputs[1])};
}

}  // namespace

const Op kEmbed{"embed", run, cost};

Residual embed(Graph& g, std::string_view name, const Weight& table, Tensor* ids, const NextNorm& next,
               const OtherRows& others, bool after_all) {
    CHECK(ids->rank == 1 && ids->dtype == DType::I32, "[embed] ids are {}, not I32 [T]", describe(*ids));
    const Residual out = make_residual(g, "embed", name, ids->shape[0], table.cols, next);
    Node node{.op = &kEmbed,
              .name = std::string(name),
              .inputs = {ids, next.weight},
              .outputs = {out.x, out.h, out.squares},
              .parameters = EmbedParams{&table, next.kind, after_all}};
    if (others.source != nullptr) {
        const Tensor &source = *others.source, &rows = *others.rows;
        const bool images = rows.dtype == DType::F32 && rows.rank == 2 && rows.shape[1] == table.cols;
        CHECK(source.dtype == DType::I32 && source.elements() == ids->shape[0] && rows.contiguous() &&
                  (images || (rows.dtype == DType::I32 && rows.rank == 1)),
              "[embed] {}: rows {} from {} do not fit", name, describe(source), describe(rows));
        node.inputs.push_back(others.source);
        node.inputs.push_back(others.rows);
    }
    g.add(std::move(node));
    return out;
}

}  // namespace quern
