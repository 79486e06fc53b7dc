// The weights of a model as a list, whatever its family: what each is for, and what is still to be done with
// them before the model can run (models/weight_placement.h does it).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-like/requantize.h"
#include "ggml-like/weight.h"

namespace quern {

/// What a part of the model's weights is for, and how much of it one decoded token reads. One of matrix,
/// experts and vector is set; they point into the model, and only placing and requantizing change them.
struct WeightUse {
    const char* group;  // "attention", "DeltaNet", "routed experts", "shared experts", "router", "MLP",
                        // "embedding", ...
    int layer = -1;     // -1: of no layer
    Weight* matrix = nullptr;
    ExpertWeights* experts = nullptr;
    Tensor* vector = nullptr;
    RowOrder order = RowOrder::stacked;
    int64_t picked = 0;       // experts, or rows of the embedding, that each token picks; 0: it reads all
    bool projection = false;  // OpenOptions::dense is about it
    const Weight* tied = nullptr;  // the embedding, of a head that the checkpoint does not store again

    /// Whether it is memory that another use has counted: a tied head that was not requantized.
    bool again() const;
    /// As stored in the checkpoint.
    int64_t bytes() const;
    int64_t parameters() const;
    /// Part of it that a step of `tokens` independent tokens reads, 0 to 1; expected, if they pick at random.
    double share(int64_t tokens) const;
};

/// A matrix that OpenOptions::dense changes. `other` is the form that the model does not show: until it is
/// placed the one of the checkpoint, then the new one.
struct DenseChange {
    Weight* weight;
    Weight other;
    bool tied;  // as stored, it is the embedding's memory
};

struct ModelWeights {
    /// Layer by layer in the order of placing, then those of no layer: embedding, head, small vectors.
    std::vector<WeightUse> uses;
    std::vector<DenseChange> changes;           // still to be made
    std::vector<std::shared_ptr<void>> memory;  // that placed weights point into

    bool changes_later(const Weight& w) const;
    /// From here to the placing, projections that are stored in 16 or 32 bits show the form that they will
    /// have, without data. Throws Error(usage) if there are none.
    void plan_dense(DenseFormat format);
};

}  // namespace quern
