// mtp_rows: what an MTP layer reads, the embedding of a row's next token beside the hidden state before it, both normed
//
// ids I32 [T], table [V, D] (any dense format), hidden F32 [N, D], rows I32 [T] or none (all in order), norms F32 [D] (plain
// form) -> y [T, 2 D] in `activation`. With n(x, w) = x / sqrt(mean(x^2) + eps) * w:
//   y[t][0, D)   = n(table[ids[t]], embedding norm)
//   y[t][D, 2 D) = n(n(hidden[rows[t]], final norm), hidden norm)
// FP32 (the CPU: sums in FP64), one rounding. The mean of the second norm's squares is computed as mean((x * w)^2) / (mean(x^2) +
// eps). Where source I32 [T] is given and not -1, an image's row is read instead of the table's: images[source[t]], images F32
// [I, D]. An id outside [0, V) or a row outside [0, N) throws on the CPU; the GPU clamps it. Source: DeepSeek-V3 (2024), section 2.2.
#pragma once

#include "ggml-like/ops/embed.h"

namespace quern {

struct MtpNorms {
    Tensor *embedding, *last, *hidden;  // last: that of the pass which left the hidden states
    float eps;
};

struct MtpRowsParams {
    const Weight* table;
    float eps;
    bool chosen, images;  // whether there are rows; source and images
    bool after_all;       // as in EmbedParams
};

/// inputs {ids, hidden, norms: embedding, last, hidden; then what there is of rows, source, images}; outputs {y}.
extern const Op kMtpRows;

/// rows: or null. images: OtherRows of images, or nothing.
Tensor* mtp_rows(Graph& g, std::string_view name, const Weight& table, Tensor* ids, Tensor* hidden,
                 Tensor* rows, const MtpNorms& norms, const OtherRows& images, DType activation,
                 bool after_all = false);

}  // namespace quern
