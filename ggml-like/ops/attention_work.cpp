#include "ggml-like/cuda/attention_split.h"
#include "ggml-like/ops/gated_attention.h"

namespace quern {

int64_t attention_work_bytes(StepKind kind, int64_t tokens, int64_t kv_heads, int64_t head_dim) {
    if (head_dim != cuda::kSplitHeadDim) return 16;
    if (kind == StepKind::prompt) return cuda::kHeldSlots * cuda::kHeldBytes;
    return tokens * kv_heads * cuda::kMaxChunks * cuda::kSplitBlocks * cuda::kPartFloats * 4;
}

}  // namespace quern
