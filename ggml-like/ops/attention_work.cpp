#include "ggml-like/cuda/attention_split.h"
#include "ggml-like/ops/gated_attention.h"

namespace quern {

int64_t attention_work_bytes(int64_t tokens, int64_t /*sequences*/, int64_t heads, int64_t /*kv_heads*/,
                             int64_t head_dim) {
    // Two values with their maximum and sum: 16 bytes for each pair of output elements.
    return tokens * heads * cuda::attention_slots(tokens) * (head_dim / 2) * 16;
}

}  // namespace quern
