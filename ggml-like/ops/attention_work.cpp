#include <algorithm>

#include "ggml-like/ops/gated_attention.h"

namespace quern {

int64_t attention_work_bytes(int64_t tokens, int64_t, int64_t heads, int64_t, int64_t head_dim) {
    if (tokens > 64) return 0;
    return std::max<int64_t>(tokens, 8) * heads * 64 * (head_dim + 2) * 4;
}

}  // namespace quern
