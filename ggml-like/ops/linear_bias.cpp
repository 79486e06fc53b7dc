#include "ggml-like/ops/linear_bias.h"

#include <cmath>
#include <numbers>

#include "ggml-like/check.h"
#include "ggml-like/cpu/linear_rows.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// Rows whose sums are held at a time.
constexpr int64_t kTileRows = 256;

float gelu_erf(float v) { return 0.5f * v * (1.0f + std::erf(v / std::numbers::sqrt2_v<float>)); }

void apply(Activation activation, float* row, int64_t width, const cpu::DotKernels& dot) {
    if (activation == Activation::gelu_tanh) dot.gelu_tanh(row, width);
    if (activation != Activation::gelu_erf) return;
    for (int64_t i = 0; i < width; ++i) row[i] = gelu_erf(row[i]);
}

void run(const Node& node, cpu::Context& context) {
    const auto& p = node.params<LinearBiasParams>();
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    const float* bias = node.inputs[1]->as<float>();
    const Tensor* add = node.inputs.size() > 2 ? node.inputs[2] : nullptr;
    const int64_t width = y.shape[1], element = dtype_bytes(x.dtype, 1);
    for (int64_t first = 0; first < x.shape[0]; first += kTileRows) {
        Tensor rows = x;
        rows.shape[0] = std::min(kTileRows, x.shape[0] - first);
        rows.data = x.as<std::byte>() + first * x.stride[0] * element;
        cpu::linear(rows, *p.weight, context, [&](int64_t t, float* row) {
            const float* more = add != nullptr ? add->row<float>(first + t) : nullptr;
            for (int64_t i = 0; i < width; ++i) row[i] += bias[i];
            apply(p.activation, row, width, context.dot);
            for (int64_t i = 0; more != nullptr && i < width; ++i) row[i] += more[i];
            store_floats(y, (first + t) * width, width, row);
        });
    }
}

Cost cost(const Node& node) {
    const auto& p = node.params<LinearBiasParams>();
    const Tensor &x = *node.inputs[0], &y = *node.outputs[0];
    return {.weight_bytes = static_cast<double>(p.weight->bytes()),
            .activation_bytes = cpu::dense_bytes(x) + cpu::dense_bytes(y) * (node.inputs.size() > 2 ? 2 : 1),
            .flops =
                2.0 * static_cast<double>(x.shape[0]) * static_cast<double>(p.weight->rows * p.weight->cols)};
}

}  // namespace

const Op kLinearBias{"linear_bias", run, cost};

Tensor* linear_bias(Graph& g, std::string_view name, Tensor* x, const Weight& weight, Tensor* bias,
                    Activation activation, Tensor* add, DType output, Tensor* to) {
    CHECK(x->rank == 2 && x->shape[1] == weight.cols && x->contiguous(), "[linear_bias] {}: x {} of [{}, {}]",
          name, describe(*x), weight.rows, weight.cols);
    CHECK(bias->dtype == DType::F32 && bias->elements() == weight.rows,
          "[linear_bias] {}: bias {} of {} rows", name, describe(*bias), weight.rows);
    CHECK(add == nullptr || (add->dtype == DType::F32 && add->contiguous() && add->shape[0] == x->shape[0] &&
                             add->shape[1] == weight.rows),
          "[linear_bias] {}: add {}", name, describe(*add));
    CHECK(to == nullptr || (to != x && to != add && to->dtype == output && to->contiguous() &&
                            to->shape[0] == x->shape[0] && to->shape[1] == weight.rows),
          "[linear_bias] {}: into {}", name, describe(*to));
    Tensor* y = to != nullptr ? to : g.scratch(name, output, {x->shape[0], weight.rows});
    Node node{.op = &kLinearBias,
              .name = std::string(name),
              .inputs = {x, bias},
              .outputs = {y},
              .parameters = LinearBiasParams{&weight, activation}};
    if (add != nullptr) node.inputs.push_back(add);
    g.add(std::move(node));
    return y;
}

}  // namespace quern
