// The backends that groups are made of, each of one GPU.
#pragma once

#include <memory>

#include "ggml-like/backend.h"
#include "ggml-like/cuda/comm/peer_group.h"

namespace quern::cuda::comm {

/// Rank `rank` of these, on its GPU.
std::unique_ptr<Backend> make_rank(int device, std::shared_ptr<PeerGroup> peers, int rank);
/// A stage. `reads_sender`: it reads the memory of the one before it (enable_reading); else rows come through the host's.
std::unique_ptr<Backend> make_stage(int device, bool reads_sender);

}  // namespace quern::cuda::comm
