#include "ggml-like/cuda/attention/split.h"
#include "ggml-like/ops/gated_attention.h"

namespace quern {

int64_t attention_work_bytes(StepKind kind, bool packed, int64_t tokens, int64_t kv_heads, int64_t head_dim) {
    if (head_dim != cuda::attention::kSplitHeadDim) return 16;
    if (kind == StepKind::prompt)
        return cuda::attention::kHeldSlots * cuda::attention::kHeldBytes +
               (packed ? cuda::attention::unpacked_bytes(tokens, kv_heads) : 0);
    const int chunks = packed ? cuda::attention::kMaxPackedChunks : cuda::attention::kMaxChunks;
    return tokens * kv_heads * chunks * cuda::attention::kSplitBlocks * cuda::attention::kPartFloats * 4;
}

}  // namespace quern
