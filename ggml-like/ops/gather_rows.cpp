#include "ggml-like/ops/gather_rows.h"

#include <cstring>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void gather(const Tensor& x, const Tensor& rows, const Tensor& y) {
    const int64_t bytes = dtype_bytes(x.dtype, x.shape[1]);
    for (int64_t r = 0; r < y.shape[0]; ++r) {
        const int32_t from = rows.as<int32_t>()[r];
        CHECK(from >= 0 && from < x.shape[0], "[gather_rows] {}: row {} of {}", y.name, from, describe(x));
        std::memcpy(y.as<char>() + r * bytes, x.as<char>() + from * bytes, static_cast<size_t>(bytes));
    }
}

void run(const Node& node, cpu::Context&) {
    gather(*node.inputs[0], *node.inputs[2], *node.outputs[0]);
    gather(*node.inputs[1], *node.inputs[2], *node.outputs[1]);
}

Cost cost(const Node& node) { return {.activation_bytes = 2 * cpu::dense_bytes(*node.outputs[0])}; }

}  // namespace

const Op kGatherRows{"gather_rows", run, cost};

std::pair<Tensor*, Tensor*> gather_rows(Graph& g, std::string_view name, Tensor* a, Tensor* b, Tensor* rows) {
    CHECK(a->rank == 2 && a->contiguous() && b->rank == 2 && b->contiguous() && b->dtype == DType::F32 &&
              a->shape[0] == b->shape[0],
          "[gather_rows] {}: {} and {}", name, describe(*a), describe(*b));
    CHECK(rows->rank == 1 && rows->dtype == DType::I32, "[gather_rows] {}: rows {} of {}", name,
          describe(*rows), describe(*a));
    Tensor* to_a = g.scratch(name, a->dtype, {rows->shape[0], a->shape[1]});
    Tensor* to_b = g.scratch(fmt::format("{}.b", name), DType::F32, {rows->shape[0], b->shape[1]});
    g.add({.op = &kGatherRows, .name = std::string(name), .inputs = {a, b, rows}, .outputs = {to_a, to_b}});
    return {to_a, to_b};
}

Residual gather_rows(Graph& g, std::string_view name, const Residual& in, Tensor* rows) {
    check_normed("gather_rows", name, in, in.h->shape[1]);
    const auto [h, squares] = gather_rows(g, name, in.h, in.squares, rows);
    return {.h = h, .squares = squares};
}

}  // namespace quern
