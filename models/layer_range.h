// LayerRange: the layers that one of several devices holds; how a model's layers are shared out.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace quern {

/// Layers [begin, end).
struct LayerRange {
    int begin = 0, end = 0;

    int count() const { return end - begin; }
    bool has(int layer) const { return layer >= begin && layer < end; }
    friend bool operator==(const LayerRange&, const LayerRange&) = default;
};

/// What layers take of a device, in any unit; `before`: what the first device holds besides, `after`: the last one.
struct LayerSizes {
    std::vector<double> layer;
    double before = 0, after = 0;
};

/// One range for each share, in order, that holds about that share of everything and at least one layer. Throws Error(usage) if
/// there are more shares than layers, and for shares that are not positive.
std::vector<LayerRange> split_layers(const LayerSizes& sizes, std::span<const double> shares);

/// "layers 0-23"
std::string describe(const LayerRange& range);

}  // namespace quern
