#include "ggml-like/ops/gather_rows.h"

#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void run(const Node& node, cpu::Context&) {
    const Tensor &x = *node.inputs[0], &rows = *node.inputs[1], &y = *node.outputs[0];
    const int64_t bytes = dtype_bytes(x.dtype, x.shape[1]);
    for (int64_t r = 0; r < y.shape[0]; ++r) {
        const int32_t from = rows.as<int32_t>()[r];
        CHECK(from >= 0 && from < x.shape[0], "[gather_rows] {}: row {} of {}", node.name, from, describe(x));
        std::memcpy(y.as<char>() + r * bytes, x.as<char>() + dtype_bytes(x.dtype, from * x.stride[0]),
                    static_cast<size_t>(bytes));
    }
}

Cost cost(const Node& node) { return {.activation_bytes = 2 * cpu::dense_bytes(*node.outputs[0])}; }

}  // namespace

const Op kGatherRows{"gather_rows", run, cost};

Tensor* gather_rows(Graph& g, std::string_view name, Tensor* x, Tensor* rows) {
    CHECK(x->rank == 2 && rows->rank == 1 && rows->dtype == DType::I32, "[gather_rows] {}: rows {} of x {}",
          name, describe(*rows), describe(*x));
    Tensor* y = g.scratch(name, x->dtype, {rows->shape[0], x->shape[1]});
    g.add({.op = &kGatherRows, .name = std::string(name), .inputs = {x, rows}, .outputs = {y}});
    return y;
}

}  // namespace quern
