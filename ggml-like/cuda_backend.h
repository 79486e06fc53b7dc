// The CUDA backend's door. In builds without CUDA the same functions say so.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ggml-like/backend.h"

namespace quern {

/// Whether this build can use a GPU at all.
bool cuda_built();
/// Why GPU `device` cannot be used: a build without CUDA, no driver or an old one, no such device, a card
/// older than sm_80 or one that is taken. Empty: it can.
std::string cuda_unavailable(int device);
/// Throws Error(device) that says why it cannot be had. `max_shared`: bytes of shared memory that a block may have, to run
/// what smaller cards run, which have no products of warpgroups either; 0: all that this one has.
std::unique_ptr<Backend> make_cuda_backend(int device, int max_shared = 0);
/// A group (backend_group.h) of ranks, one on each of these GPUs; of one GPU: its backend. Throws Error(device) if one of them
/// cannot be had, or if they cannot read each other's memory.
std::unique_ptr<Backend> make_cuda_backends(const std::vector<int>& devices);

}  // namespace quern
