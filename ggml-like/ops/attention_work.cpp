#include "ggml-like/cuda/attention_split.h"
#include "ggml-like/ops/gated_attention.h"

namespace quern {

int64_t attention_work_bytes(int64_t tokens, int64_t sequences, int64_t /*heads*/, int64_t kv_heads,
                             int64_t /*head_dim*/) {
    if (!cuda::has_few_rows(tokens, sequences, kv_heads)) return 16;
    const int64_t part = cuda::kPartFloats * 4, chunk = cuda::kChunkPairs * 16;
    return tokens * kv_heads * cuda::most_chunks(tokens) * (cuda::kSplitBlocks * part + chunk);
}

}  // namespace quern
