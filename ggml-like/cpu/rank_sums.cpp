#include "ggml-like/cpu/rank_sums.h"

#include "ggml-like/communicator.h"
#include "ggml-like/cpu/norms.h"

namespace quern::cpu {

void add_over_ranks(const float* part, const Tensor& residual, const Tensor& norm, const Tensor& x,
                    const Tensor& h, const Tensor& squares, Context& context) {
    const float* sum = part;
    if (context.communicator != nullptr) {
        context.communicator->all_reduce(context.rank, part, x.as<float>(), x.elements());
        sum = x.as<float>();
    }
    const int64_t width = x.shape[1];
    context.pool.parallel_for(x.shape[0], 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            float* to = x.row<float>(t);
            for (int64_t i = 0; i < width; ++i) to[i] = residual.row<float>(t)[i] + sum[t * width + i];
            defer_norm(to, norm, h, squares, t);
        }
    });
}

}  // namespace quern::cpu
