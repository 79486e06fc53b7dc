// Shard: the part of a weight that one of several ranks holds.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ggml-like/weight.h"

namespace quern {

/// rows: of a product's outputs, so that each rank has some of them; columns: of its inputs, so that each rank has a part of
/// every sum, and the ranks' sums are to be added.
enum class ShardAxis : uint8_t { rows, columns };

/// Part number `rank` of `of` equal parts.
struct Shard {
    int rank = 0;
    int of = 1;
    ShardAxis axis = ShardAxis::rows;

    bool whole() const { return of == 1; }
    Shard along(ShardAxis other) const { return {rank, of, other}; }
    /// Of things that are fewer than the ranks: several ranks, neighbours, have the same one.
    Shard among(int64_t things) const {
        if (things >= of) return *this;
        return {static_cast<int>(rank * things / of), static_cast<int>(things), axis};
    }
    int64_t begin(int64_t size) const { return size / of * rank; }
    int64_t size(int64_t whole_size) const { return whole_size / of; }
    friend bool operator==(const Shard&, const Shard&) = default;
};

/// That part of a segment. A part of random weights, which have no data, gets a name of its own, so that ranks make
/// different ones. Throws Error(usage) that names the segment if parts of equal size would cut blocks of scales.
WeightSegment take_shard(const WeightSegment& s, const Shard& shard);
/// Of each of a weight's segments.
Weight take_shard(const Weight& w, const Shard& shard);
ExpertWeights take_shard(const ExpertWeights& experts, const Shard& shard);
/// A vector, or rows of a matrix in memory; no copy.
Tensor take_shard(const Tensor& t, const Shard& shard);

}  // namespace quern
