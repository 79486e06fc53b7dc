#include "ggml-like/ops/arrived_rows.h"

namespace quern {
namespace {

void run(const Node&, cpu::Context&) {}

Cost cost(const Node&) { return {}; }

}  // namespace

const Op kArrivedRows{"arrived_rows", run, cost};

Residual arrived_rows(Graph& g, std::string_view name, int64_t tokens, int64_t width, const NextNorm& norm) {
    const Residual out = make_residual(g, "arrived_rows", name, tokens, width, norm);
    g.add({.op = &kArrivedRows, .name = std::string(name), .outputs = {out.x, out.h, out.squares}});
    return out;
}

Tensor* arrived_tap(Graph& g, std::string_view name, int64_t tokens, int64_t width) {
    Tensor* x = g.scratch(name, DType::F32, {tokens, width});
    g.add({.op = &kArrivedRows, .name = std::string(name), .outputs = {x}});
    return x;
}

}  // namespace quern
