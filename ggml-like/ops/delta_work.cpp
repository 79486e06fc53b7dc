#include "ggml-like/cuda/delta/chunks.h"
#include "ggml-like/ops/conv_gated_delta_net.h"

namespace quern {

int64_t delta_work_bytes(StepKind kind, int64_t tokens, int64_t sequences,
                         const ConvGatedDeltaNetParams& params) {
    const bool chunked = cuda::delta::has_chunked_heads(params.key_dim, params.value_dim);
    if (chunked && kind == StepKind::prompt)
        return cuda::delta::delta_chunks(tokens, sequences) * params.value_heads *
               cuda::delta::kDeltaRecordBytes;
    if (chunked) return 0;
    return sequences * params.value_heads * params.value_dim * params.key_dim * 4;
}

int64_t delta_told_counts(int64_t tokens, int64_t sequences, const ConvGatedDeltaNetParams& params) {
    if (params.kind != StepKind::prompt || !cuda::delta::has_chunked_heads(params.key_dim, params.value_dim))
        return 0;
    return cuda::delta::delta_told_counts(cuda::delta::delta_chunks(tokens, sequences), params.key_heads);
}

}  // namespace quern
