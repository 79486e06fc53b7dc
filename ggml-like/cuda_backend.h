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

/// How ranks add up.
struct RankOptions {
    bool peer_access = true;  // by writing into each other's memory, where they can; else through the host's
    bool test = true;         // sums are first compared with the host's, in some tenths of a second
};
/// A group (backend_group.h) of ranks, one on each of these GPUs; of one GPU: its backend. Sums that do not come by peer access
/// go through the host's memory, which stderr is told. Throws Error(device) if one of the GPUs cannot be had, if they are of
/// different kinds, if a sum is wrong, and if none comes through the host's memory either.
std::unique_ptr<Backend> make_cuda_backends(const std::vector<int>& devices, const RankOptions& options = {});

/// A group (stage_group.h) of stages, one on each of these GPUs, of any kinds; of one GPU: its backend. Hidden states go from
/// GPU to GPU with `peer_access` where one can read the other's memory and rows that are sent for a test arrive right, else through host memory.
/// Throws Error(device) if one of the GPUs cannot be had, or if rows arrive wrong through host memory, too.
std::unique_ptr<Backend> make_cuda_stages(const std::vector<int>& devices, bool peer_access = true);
/// GPUs that this process can see, usable or not.
int cuda_devices();

}  // namespace quern
