// ModelGroup: the parts of one model that several ranks run together, as one model.
#pragma once

#include <functional>
#include <memory>

#include "models/model.h"

namespace quern {

/// Opens each rank's part at the same time: `open` gets the options of open_model or open_synthetic with its shard; only
/// rank 0's has the tokenizer. With one rank: what `open` returns. Errors are those of rank 0, if it has one.
std::unique_ptr<Model> open_ranks(int ranks, const OpenOptions& options,
                                  const std::function<std::unique_ptr<Model>(const OpenOptions&)>& open);

}  // namespace quern
