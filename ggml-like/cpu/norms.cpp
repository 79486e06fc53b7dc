#include "ggml-like/cpu/norms.h"

#include <algorithm>
#include <vector>

#include "ggml-like/ops/row_math.h"

namespace quern::cpu {

void defer_norm(const float* x, const Tensor& w, const Tensor& h, const Tensor& squares, int64_t row) {
    const int64_t width = h.shape[1];
    std::vector<float> scaled(static_cast<size_t>(width));
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) {
        scaled[static_cast<size_t>(i)] = x[i] * w.as<float>()[i];
        sum += x[i] * x[i];
    }
    store_floats(h, row * h.stride[0], width, scaled.data());
    float* to = squares.row<float>(row);
    std::fill(to, to + squares.shape[1], 0.0f);
    to[0] = sum;
}

void defer_norm(const Tensor& x, const Tensor& w, const Tensor& h, const Tensor& squares, Context& context) {
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) defer_norm(x.row<float>(t), w, h, squares, t);
    });
}

float norm_factor(const Tensor& squares, int64_t row, int64_t columns, float eps) {
    float sum = 0;
    for (int64_t i = 0; i < squares.shape[1]; ++i) sum += squares.row<float>(row)[i];
    return 1.0f / std::sqrt(sum / static_cast<float>(columns) + eps);
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
