#include "ggml-like/cuda/delta_chunks.h"
#include "ggml-like/ops/conv_gated_delta_net.h"

namespace quern {

int64_t delta_work_bytes(int64_t tokens, int64_t sequences, const ConvGatedDeltaNetParams& params) {
    if (tokens <= sequences) return 0;
    return cuda::delta_chunks(tokens, sequences) * params.value_heads * cuda::kDeltaRecordBytes;
}

}  // namespace quern
