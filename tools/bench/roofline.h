// The most that this machine can do, measured in the same run, and the least that a step computes.
#pragma once

#include "tools/engine/engine.h"
#include "tools/engine/token_bytes.h"

namespace quern {

struct Ceilings {
    double bytes_per_second = 0;  // a GPU: a large copy, read and written; a CPU: reading with all threads
    double flops = 0;             // a square BF16 product by our own kernel: a lower bound for the card
};
/// Takes less than a second on a GPU, and memory for that time (a matrix of 34 MB stays).
Ceilings measure_ceilings(Backend& backend);

/// Operations of the products with weights for one prompt token, without the head.
double token_flops(const Model& model);

}  // namespace quern
