// The flags that say on which devices a model runs, and as how many ranks: the same for run, serve and bench.
#pragma once

#include <vector>

namespace quern {

class ArgParser;

struct DeviceChoice {
    std::vector<int> devices;  // GPUs, by number; empty: the first ones
    int ranks = 1;             // that share the model: tensor parallelism
    bool peer_access = true;   // GPUs reach each other's memory, where they can; else through the host's
    bool by_layers = false;    // the layers of the model are on several devices (split_flags.h)
    std::vector<double> shares = {};  // of these devices; empty: by free memory

    /// Whether a GPU was named.
    bool named() const { return !devices.empty(); }
    /// One GPU for each rank. Throws Error(usage) unless as many were named, or none.
    std::vector<int> of_ranks() const;
};

/// Adds --device, -tp, --no-peer-access, -sm and -ts, which write to `choice`.
void add_device_flags(ArgParser& parser, DeviceChoice& choice);

}  // namespace quern
