// What this machine can do at most, measured in the same run, and what a step moves and computes at least.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tools/engine/engine.h"

namespace quern {

struct Ceilings {
    double bytes_per_second =
        0;             // a GPU: reading and writing of a large copy; a CPU: reading with all threads
    double flops = 0;  // of a square BF16 product by our own kernel: a lower bound of what the card can do
};
/// Less than a second on a GPU. Takes memory for the time of the measurement (a matrix of 34 MB stays).
Ceilings measure_ceilings(Backend& backend);

/// Bytes that one decoded token reads and writes, by component: each matrix once a step, each sequence's KV
/// and state.
using TokenBytes = std::vector<std::pair<std::string, double>>;
/// In a step of `sequences`, each with `depth` tokens before it; experts as if chosen at random.
TokenBytes token_bytes(const Engine& engine, int64_t sequences, double depth);
double total(const TokenBytes& bytes);

/// Products with weights for one prompt token; without attention's products and the head.
double token_flops(const Model& model);

}  // namespace quern
