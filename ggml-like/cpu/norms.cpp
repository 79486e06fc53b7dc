#include "ggml-like/cpu/norms.h"

#include "ggml-like/ops/row_math.h"

namespace quern::cpu {

void rms_norm(const Tensor& x, const Tensor& w, float eps, const Tensor& y, Context& context) {
    const int64_t width = x.shape[1];
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width));
        for (int64_t t = begin; t < end; ++t) {
            load_floats(x, t * x.stride[0], width, row.data());
            const float r = inverse_rms(row.data(), width, eps);
            for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)] *= r * w.as<float>()[i];
            store_floats(y, t * y.stride[0], width, row.data());
        }
    });
}

void gated_rms_norm(const Tensor& x, const Tensor& z, const Tensor& w, float eps, const Tensor& y,
                    Context& context) {
    const int64_t heads = x.shape[1], width = x.shape[2];
    context.pool.parallel_for(x.shape[0], 4, [&](int64_t begin, int64_t end, int) {
        std::vector<float> row(static_cast<size_t>(width)), gate(row.size());
        for (int64_t t = begin; t < end; ++t) {
            for (int64_t h = 0; h < heads; ++h) {
                load_floats(x, t * x.stride[0] + h * x.stride[1], width, row.data());
                load_floats(z, t * z.stride[0] + h * z.stride[1], width, gate.data());
                const float r = inverse_rms(row.data(), width, eps);
                for (size_t i = 0; i < row.size(); ++i)
                    row[i] = row[i] * r * w.as<float>()[i] * silu(gate[i]);
                store_floats(y, t * y.stride[0] + h * width, width, row.data());
            }
        }
    });
}

}  // namespace quern::cpu
