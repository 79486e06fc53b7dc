// --split-mode and --tensor-split: a model on several devices by layers.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/common/device_flags.h"

namespace quern {

class Backend;
struct GpuOptions;

/// Positive numbers between commas or slashes, as llama.cpp takes them. Throws Error(usage).
std::vector<double> parse_shares(const std::string& text);
/// Adds -sm and -ts, which write to `choice`.
void add_split_flags(ArgParser& parser, DeviceChoice& choice);

/// The devices of a model by layers, DeviceChoice::by_layers: the GPUs that were named, else as many as there are shares, else all;
/// or as many simulated ones on the CPU as there are shares. Throws Error(usage) and Error(device).
std::unique_ptr<Backend> make_split_backend(const GpuOptions& gpu, int threads, const DeviceChoice& choice);

/// Throws Error(usage) for -sm layer with -tp.
void require_one_split(const DeviceChoice& choice);

/// Throws Error(usage) for a model by layers, which `what` does not take.
void require_no_split(const DeviceChoice& choice, const char* what);

}  // namespace quern
