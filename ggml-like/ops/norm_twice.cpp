#include "ggml-like/ops/norm_twice.h"

#include <cmath>

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

void norm_row(const float* x, const float* first, const float* second, int64_t width, float eps, float* y) {
    double squares = 0, weighted = 0;
    for (int64_t i = 0; i < width; ++i) {
        const double u = double{x[i]} * double{first[i]};
        squares += double{x[i]} * double{x[i]};
        weighted += u * u;
    }
    const auto columns = static_cast<double>(width);
    const double one = 1 / std::sqrt(squares / columns + double{eps});
    const double two = 1 / std::sqrt(weighted * one * one / columns + double{eps});
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * static_cast<float>(one * two) * first[i] * second[i];
}

void run(const Node& node, cpu::Context& context) {
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const Tensor* rows = node.inputs.size() > 3 ? node.inputs[3] : nullptr;
    const float eps = node.params<NormTwiceParams>().eps;
    const int64_t width = x.shape[1];
    context.pool.parallel_for(y.shape[0], 16, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width));
        for (int64_t t = begin; t < end; ++t) {
            const int64_t from = rows != nullptr ? rows->as<int32_t>()[t] : t;
            CHECK(from >= 0 && from < x.shape[0], "[norm_twice] {}: row {} of {}", node.name, from,
                  describe(x));
            norm_row(x.row<float>(from), node.inputs[1]->as<float>(), node.inputs[2]->as<float>(), width, eps,
                     row.data());
            store_floats(y, t * width, width, row.data());
        }
    });
}

Cost cost(const Node& node) { return {.activation_bytes = 3 * cpu::dense_bytes(*node.outputs[0])}; }

}  // namespace

const Op kNormTwice{"norm_twice", run, cost};

Tensor* norm_twice(Graph& g, std::string_view name, Tensor* x, Tensor* rows, Tensor* first, Tensor* second,
                   float eps, DType activation) {
    CHECK(x->rank == 2 && x->dtype == DType::F32 && x->contiguous(), "[norm_twice] {}: x is {}", name,
          describe(*x));
    for (const Tensor* w : {first, second})
        CHECK(w->dtype == DType::F32 && w->elements() == x->shape[1], "[norm_twice] {}: norm {} of x {}",
              name, describe(*w), describe(*x));
    CHECK(rows == nullptr || (rows->rank == 1 && rows->dtype == DType::I32), "[norm_twice] {}: rows are {}",
          name, describe(*rows));
    Tensor* y = g.scratch(name, activation, {rows != nullptr ? rows->shape[0] : x->shape[0], x->shape[1]});
    Node node{.op = &kNormTwice,
              .name = std::string(name),
              .inputs = {x, first, second},
              .outputs = {y},
              .parameters = NormTwiceParams{eps}};
    if (rows != nullptr) node.inputs.push_back(rows);
    g.add(std::move(node));
    return y;
}

}  // namespace quern
