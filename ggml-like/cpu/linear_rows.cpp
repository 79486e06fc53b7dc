#include "ggml-like/cpu/linear_rows.h"

#include "ggml-like/cpu/weight_rows.h"

namespace quern::cpu {

void linear_rows(const Tensor& x, const Weight& w, float* y, int64_t ldy, Context& context) {
    const int64_t tokens = x.shape[0];
    if (tokens == 0) return;
    const ActivationRows rows = activation_rows(x, tokens, w.cols, x.stride[0], has_nvfp4(w), context, 0);
    const int64_t grain = rows_per_chunk(w.rows, w.bytes() / std::max<int64_t>(w.rows, 1), w.cols * tokens,
                                         context.pool.size());
    context.pool.parallel_for(w.rows, grain, [&](int64_t begin, int64_t end, int) {
        std::vector<float*> to;
        for (int64_t t = 0; t < tokens; ++t) to.push_back(y + t * ldy + begin);
        weight_rows(context.dot, w, begin, end, rows, to.data());
    });
}

void linear(const Tensor& x, const Weight& w, Context& context,
            const std::function<void(int64_t t, float* row)>& store) {
    float* sums = context.buffer(2, x.shape[0] * w.rows);
    linear_rows(x, w, sums, w.rows, context);
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) store(t, sums + t * w.rows);
    });
}

}  // namespace quern::cpu
