// From an opened model to one that runs: checks its weights and places them on a backend. The only part of the models
// that knows backends.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "ggml-like/backend.h"
#include "models/model.h"
#include "models/stage_models.h"

namespace quern {

struct LoadProgress {
    int64_t bytes_done = 0;
    int64_t bytes_total = 0;
};
using OnProgress = std::function<void(const LoadProgress&)>;

/// Opens a model for this backend: for each of its ranks, or for each of its stages, which get layers in proportion to
/// `shares` or, if there are none, so many bytes as each has free. `open`: as of open_ranks. Throws Error(usage) if there are
/// not as many shares as stages.
std::unique_ptr<Model> open_for(const Backend& backend, const std::vector<double>& shares,
                                const OpenOptions& options,
                                const std::function<std::unique_ptr<Model>(const OpenOptions&)>& open);

/// Reads every scale once and places the weights, layer by layer, on `backend`, which must outlive the model. Of ranks, each
/// its own part, at the same time; progress is then rank 0's. Of stages, too; progress is then of all.
/// What OpenOptions::dense will change is placed as stored, so that both forms can be compared; random weights are
/// made in the new form. Throws Error(model) for weights that cannot be right and, before any is read,
/// Error(memory).
void place_weights(Model& model, Backend& backend, const OnProgress& progress = {});

/// Whether requantize_weights has something to do.
bool changes_later(const Model& model);

/// Bytes that the weights as stored need beyond the weights with OpenOptions::dense. For an opened model that is not
/// placed yet; of several devices by layers one of them, of ranks each.
int64_t extra_bytes_as_stored(const Model& model, const Backend& backend);

/// Changes a placed model to OpenOptions::dense, matrix by matrix; ranks do so at the same time, stages one after another.
/// Graphs built before may not run any more.
/// Throws Error(model) if a weight is not finite.
void requantize_weights(Model& model, Backend& backend, const OnProgress& progress = {});

/// open_model, with the backend's number of threads, for each of its ranks or stages (open_for), and place_weights.
std::unique_ptr<Model> load_model(const std::string& path, Backend& backend, OpenOptions options = {},
                                  const OnProgress& progress = {}, const std::vector<double>& shares = {});

}  // namespace quern
