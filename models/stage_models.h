// StageModels: the parts of one model that several devices hold by layers, as one model.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "models/model.h"

namespace quern {

/// How a model's layers are shared out among devices.
struct StageShares {
    std::vector<double> of_device;
    /// Whether these are shares of the weights' bytes, with embedding and head; else of the number of layers.
    bool by_bytes = false;
};

/// Opens the model once for each share, at the same time, and leaves each its layers; the first has the tokenizer. With one
/// share: what `open` returns. Throws Error(usage) if the model cannot be shared so.
std::unique_ptr<Model> open_stages(const StageShares& shares, const OpenOptions& options,
                                   const std::function<std::unique_ptr<Model>(const OpenOptions&)>& open);

}  // namespace quern
