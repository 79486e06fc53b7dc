// Replicas of one model: engines on devices of their own, in one process (quern serve --data-parallel).
#pragma once

#include <string>
#include <vector>

#include "tools/common/loading.h"

namespace quern {

/// As load_and_start gives them, and what people call their devices: "GPU 1", on the CPU "replica 1". Engines go before the
/// backends, since they share memory that any of these may have taken.
struct LoadedReplicas {
    std::vector<LoadedModel> list;
    std::vector<std::string> devices;

    LoadedReplicas() = default;
    LoadedReplicas(LoadedReplicas&&) = default;
    LoadedReplicas& operator=(LoadedReplicas&&) = delete;
    ~LoadedReplicas();
};

/// `count` engines, each with the whole model on a GPU of its own: those of --device, else the first ones; all of one kind. On
/// the CPU they share its threads, and read the same weights in the page cache. They have the first one's tokenizer,
/// context and states in host memory. Its costs are those of all. Throws as load_and_start, Error(usage) with -tp or -sm layer, and Error(device) for
/// a GPU that is missing or of another kind.
LoadedReplicas load_replicas(const LoadOptions& options, int count);

/// Throws Error(usage) for -tp and -sm layer: a replica has the whole model on one device.
void require_whole_replicas(const DeviceChoice& choice);

}  // namespace quern
