// ExpertLoad: how often each expert of each layer was chosen.
#pragma once

#include <cstdint>
#include <vector>

#include "tools/engine/model_trace.h"

namespace quern {

struct ExpertLoad {
    std::vector<std::vector<int64_t>> tokens;  // [layer][expert] tokens that chose it

    /// How many experts equally busy would be as uneven: exp of the entropy of the load.
    double spread(size_t layer) const;
    /// Experts that nobody chose.
    int64_t dead(size_t layer) const;
};

/// `experts`: in each layer.
ExpertLoad expert_load(const ModelTrace& trace, int64_t experts);

}  // namespace quern
