// The weights of a model as a list, whatever its family: what each is for, and what models/weight_placement.h still
// has to do with it before the model can run.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-like/requantize.h"
#include "ggml-like/weight.h"

namespace quern {

/// One weight: what it is for, and how much of it one decoded token reads. One of matrix, experts and vector is set;
/// it points into the model, and only placing and requantizing change it.
struct WeightUse {
    const char* group;  // "attention", "DeltaNet", "routed experts", "shared experts", "router", "MLP",
                        // "embedding", ...
    int layer = -1;     // -1: none
    Weight* matrix = nullptr;
    ExpertWeights* experts = nullptr;
    Tensor* vector = nullptr;
    RowOrder order = RowOrder::stacked;
    int64_t picked = 0;        // experts, or rows of the embedding, that each token picks; 0: it reads all
    bool projection = false;   // whether OpenOptions::dense applies
    bool draft_layer = false;  // of a DFlash drafter's layers: OpenOptions::draft_format applies
    bool mtp_product =
        false;  // of the MTP layer, all but the router: NVFP4 then, if the model's own layers have any
    bool draft = false;            // of the MTP layer or a drafter: only drafting reads it
    bool vision = false;           // of the vision tower: only images read it
    bool copy = false;             // made of another weight when the weights are placed: ModelWeights::copies
    const Weight* tied = nullptr;  // of a head that the checkpoint does not store: the embedding

    /// Whether another use has counted this memory: a tied head that was not requantized.
    bool again() const;
    /// As stored in the checkpoint.
    int64_t bytes() const;
    int64_t parameters() const;
    /// The share of it that a step of `tokens` tokens reads without drafting, 0 to 1; expected, as if each token picked at random.
    double share(int64_t tokens) const;
};

/// A matrix that OpenOptions::dense changes. `other` is the form that `weight` does not have now: the checkpoint's
/// until it is placed, then the new one.
struct DenseChange {
    Weight* weight;
    Weight other;
    bool tied;  // whether the stored form is the embedding's memory
    DenseFormat format;
    Weight part = {}, whole = {};  // of a rank: as stored, its part and the matrix; else empty
};

/// A matrix that the checkpoint does not store: requantize.h makes it of rows that it stores. Without data until then.
struct WeightCopy {
    Weight* weight;
    Weight from;
    const ExpertWeights* of = nullptr;  // whose expert it is, if it is one
    Weight* first_rows = nullptr;       // a weight that is as many of its first rows, if any

    bool placed() const { return (of != nullptr ? of->placed : weight->placed) != nullptr; }
};

struct ModelWeights {
    /// In the order of placing: layer by layer, then embedding, head and small vectors.
    std::vector<WeightUse> uses;
    std::vector<DenseChange> changes;           // still to be made
    std::vector<std::shared_ptr<void>> memory;  // what placed weights point into
    std::vector<WeightCopy> copies;

    bool changes_later(const Weight& w) const;
    /// Gives projections that are stored in 16 or 32 bits the form that they will have, without data, until they are
    /// placed. Throws Error(usage) if there are none.
    void plan_dense(DenseFormat format);
    /// The same for the matrices of the vision tower; those that are quantized already stay.
    void plan_vision(DenseFormat format);
    /// Gives the matrices of a DFlash drafter's layers that are stored in 16 or 32 bits this form, and those of an MTP layer NVFP4, if the
    /// model's own layers have weights in that: they become copies, and what is stored is not placed.
    void plan_drafters(DenseFormat format);
    /// After `uses` has changed: drops what was planned of weights that are not among them any more, and says of the others
    /// which are copies.
    void drop_unused();
    /// Gives weights that will change the form that they are stored in, until a rank has its part of them and calls
    /// plan_parts, which throws Error(usage) if a part is no whole blocks of the new format.
    void begin_parts();
    void plan_parts();
    /// The same change for a copy of a weight that is not a rank's part, if that will change.
    void change_copy(Weight& copy, const Weight& of);

  private:
    void plan_change(const WeightUse& use, DenseFormat format);
    void plan_copy(WeightUse& use, DenseFormat format);
};

}  // namespace quern
