// write_ring: the last rows of each sequence into a ring of its slot, by position
//
// x F32 [T, D], ring F32 [slots, R, D]: row t of sequence s at position p goes to ring[slots[s]][p % R], as it is. Of a
// sequence with more than R rows only the last R are written. Padding rows (row_sequence = -1) are skipped.
#pragma once

#include "ggml-like/ops/batch.h"

namespace quern {

/// inputs {x, positions, row_sequence, start, slots}; no outputs; state {ring}.
extern const Op kWriteRing;

void write_ring(Graph& g, std::string_view name, Tensor* x, Tensor* ring, const Batch& batch);

}  // namespace quern
