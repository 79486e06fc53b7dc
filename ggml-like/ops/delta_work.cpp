#include "ggml-like/ops/conv_gated_delta_net.h"

namespace quern {

int64_t delta_work_bytes(int64_t tokens, int64_t sequences, const ConvGatedDeltaNetParams& params) {
    if (tokens <= sequences) return 0;
    const int64_t chunks = tokens / 64 + sequences + 1;
    return chunks * params.value_heads * (64 * 64 * 4 + 64 * 16);
}

}  // namespace quern
