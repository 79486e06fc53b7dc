#include "models/layer_range.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ggml-like/check.h"

namespace quern {

std::vector<LayerRange> split_layers(const LayerSizes& sizes, std::span<const double> shares) {
    const int layers = static_cast<int>(sizes.layer.size()), devices = static_cast<int>(shares.size());
    if (devices > layers)
        FAIL(usage, "--split-mode layer: this model has {} layers, too few for {} devices", layers, devices);
    for (const double share : shares)
        if (!(share > 0) || !std::isfinite(share))
            FAIL(usage,
                 "--tensor-split: {} is no share of a model; give each device a positive number, and leave "
                 "devices out with --device",
                 share);
    const double all = std::accumulate(sizes.layer.begin(), sizes.layer.end(), sizes.before + sizes.after),
                 parts = std::accumulate(shares.begin(), shares.end(), 0.0);
    std::vector<LayerRange> ranges;
    double held = sizes.before, wanted = 0;
    int next = 0;
    for (int d = 0; d < devices; ++d) {
        LayerRange range{next, next + 1};
        held += sizes.layer[static_cast<size_t>(next)];
        wanted += shares[static_cast<size_t>(d)] / parts * all;
        const int most = d + 1 == devices ? layers : layers - (devices - d - 1);
        // The border that is nearest to what is wanted
        while (range.end < most) {
            const double more = sizes.layer[static_cast<size_t>(range.end)];
            if (d + 1 < devices && held + more / 2 > wanted) break;
            held += more;
            ++range.end;
        }
        next = range.end;
        ranges.push_back(range);
    }
    return ranges;
}

std::string describe(const LayerRange& range) {
    return range.count() == 1 ? fmt::format("layer {}", range.begin)
                              : fmt::format("layers {}-{}", range.begin, range.end - 1);
}

}  // namespace quern
