// What is tested of a PeerGroup before a model trusts its sums.
#pragma once

#include <optional>
#include <string>

#include "ggml-like/cuda/comm/peer_group.h"

namespace quern::cuda::comm {

/// All backends attached: adds up random numbers in messages of every kind and compares them with sums by the host, bit for
/// bit, in some tenths of a second. Returns what to tell a user: "8 KB added up in 6.2 us, 8 MB in 66 us"; nothing if a
/// message did not come within two seconds, after which the group is of no use. Throws Error(device) for a wrong sum.
std::optional<std::string> test_sums(PeerGroup& group);

}  // namespace quern::cuda::comm
