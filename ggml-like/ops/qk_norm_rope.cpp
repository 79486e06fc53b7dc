#include "ggml-like/ops/qk_norm_rope.h"

#include "ggml-like/check.h"
#include "ggml-like/cpu/context.h"
#include "ggml-like/ops/row_math.h"

namespace quern {
namespace {

/// cos and sin of one position's angles, in FP64 so that large positions keep their phase.
void fill_angles(int32_t position, const QkNormRopeParams& p, std::vector<float>& cosine,
                 std::vector<float>& sine) {
    const int half = p.rotary_dims / 2;
    for (int i = 0; i < half; ++i) {
        const double angle = position * std::pow(static_cast<double>(p.theta), -2.0 * i / p.rotary_dims);
        cosine[static_cast<size_t>(i)] = static_cast<float>(std::cos(angle));
        sine[static_cast<size_t>(i)] = static_cast<float>(std::sin(angle));
    }
}

void run(const Node& node, cpu::Context& context) {
    const Tensor& positions = *node.inputs[4];
    const auto& p = node.params<QkNormRopeParams>();
    const int64_t width = node.inputs[0]->shape[2];
    const auto half = static_cast<size_t>(p.rotary_dims / 2);
    context.pool.parallel_for(node.inputs[0]->shape[0], 2, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width)), cosine(half), sine(half);
        for (int64_t t = begin; t < end; ++t) {
            fill_angles(positions.as<int32_t>()[t], p, cosine, sine);
            for (size_t part = 0; part < 2; ++part) {  // q, then k
                const Tensor &x = *node.inputs[part], &w = *node.inputs[2 + part], &y = *node.outputs[part];
                for (int64_t h = 0; h < x.shape[1]; ++h) {
                    load_floats(x, t * x.stride[0] + h * x.stride[1], width, row.data());
                    const float r = cpu::inverse_rms(row.data(), width, p.eps);
                    for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)] *= r * w.as<float>()[i];
                    for (size_t i = 0; i < half; ++i) {
                        const float a = row[i], b = row[i + half];
                        row[i] = a * cosine[i] - b * sine[i];
                        row[i + half] = b * cosine[i] + a * sine[i];
                    }
                    store_floats(y, t * y.stride[0] + h * y.stride[1], width, row.data());
                }
            }
        }
    });
}

Cost cost(const Node& node) {
    const double elements = static_cast<double>(node.outputs[0]->elements() + node.outputs[1]->elements());
    return {.activation_bytes = 2 * (cpu::dense_bytes(*node.outputs[0]) + cpu::dense_bytes(*node.outputs[1])),
            .flops = 8.0 * elements};
}

void check_part(std::string_view name, const Tensor& x, const Tensor& w) {
    CHECK(x.rank == 3 && x.stride[2] == 1 && w.rank == 1 && w.dtype == DType::F32 && w.shape[0] == x.shape[2],
          "[qk_norm_rope] {}: weight {} does not fit {}", name, describe(w), describe(x));
}

}  // namespace

const Op kQkNormRope{"qk_norm_rope", run, cost};

QkNormRopeResult qk_norm_rope(Graph& g, std::string_view name, Tensor* q_in, Tensor* k_in, Tensor* wq,
                              Tensor* wk, const Batch& batch, const QkNormRopeParams& params) {
    check_part(name, *q_in, *wq);
    check_part(name, *k_in, *wk);
    CHECK(params.rotary_dims >= 0 && params.rotary_dims % 2 == 0 && params.rotary_dims <= q_in->shape[2],
          "[qk_norm_rope] {}: {} rotary dimensions of {}", name, params.rotary_dims, q_in->shape[2]);
    Tensor* q =
        g.scratch(fmt::format("{}.q", name), q_in->dtype, {q_in->shape[0], q_in->shape[1], q_in->shape[2]});
    Tensor* k =
        g.scratch(fmt::format("{}.k", name), q_in->dtype, {k_in->shape[0], k_in->shape[1], k_in->shape[2]});
    g.add({.op = &kQkNormRope,
           .name = std::string(name),
           .inputs = {q_in, k_in, wq, wk, batch.positions},
           .outputs = {q, k},
           .parameters = params});
    return {q, k};
}

}  // namespace quern
