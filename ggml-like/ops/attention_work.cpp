#include <algorithm>

#include "ggml-like/cuda/attention_split.h"
#include "ggml-like/ops/gated_attention.h"

namespace quern {

int64_t attention_work_bytes(StepKind kind, int64_t tokens, int64_t sequences, int64_t heads,
                             int64_t kv_heads, int64_t head_dim) {
    constexpr int64_t kNone = 16;
    const int64_t group = heads / kv_heads;
    if (head_dim != cuda::kSplitHeadDim || group > cuda::kTileM) return kNone;
    if (kind == StepKind::answer)
        return tokens * kv_heads * cuda::kMaxChunks * cuda::kSplitBlocks * cuda::kPartFloats * 4;
    const int64_t tiles = cuda::prompt_tiles(tokens, sequences, group) * kv_heads;
    return std::min<int64_t>(tiles, cuda::kHeldTiles) * cuda::kHeldBytes;
}

}  // namespace quern
